"""The packed model gives the recorded numbers of the published Fusion-in-Decoder readers, before
and after training.

Bounds: what the recordings' README suggests. A recorded loss is a mean over labelled tokens; ours
is their sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.parity import fid_recordings
from tests.parity.fid_recordings import (
    ATTENTIONS,
    SYSTEM,
    Forward,
    Recording,
    Told,
    Trained,
    Training,
)
from tests.parity.recordings import known, params
from tests.ranks import run_on_ranks
from tests.tolerance import assert_close, note
from trainer import tasks
from trainer.config.schema import Schedule
from trainer.data import vocabulary
from trainer.data.order import Sharding, StepBatches
from trainer.data.padding import unflat
from trainer.data.token_store import store_of
from trainer.metrics.mergeable import exact_match, normalise
from trainer.protocol.task import Batch, Places
from trainer.tasks.fid.model import FiD, Generation
from trainer.tasks.fid.task import Task
from trainer.tasks.fid.tokens import Prompts
from trainer.training import schedule

# As tests/tolerance.py means them. A number has passed the products of every block of encoder and
# decoder, six in each and sums over the width; a gradient has passed them twice.
DEPTH = 6 * fid_recordings.num_blocks_times_width()
STATES = {"what": "states", "depth": DEPTH, "margin": 0.6}
LOGITS = {"what": "logits", "depth": DEPTH, "margin": 0.6}
LOSSES = {"what": "loss", "depth": DEPTH, "margin": 0.06}
SCORES = {"what": "passage scores", "depth": DEPTH, "margin": 0.6}
GRADIENTS = {"what": "gradients", "depth": 2 * DEPTH, "margin": 2.0}
NORMS = {"what": "norm", "depth": 2 * DEPTH, "margin": 0.15}
FIRST_LOSS = 1e-5  # of the first two micro-batches, by which the order of the rows is known
# A recorded score tells of which training some weights are: those of the other are 0.3 away.
SAME_SCORES = 1e-5
GREEDY = Generation(max_length=50)

# A gradient that is nothing but rounding has either sign, and Adam moves its weight by the whole
# rate either way. So a replay is exact to rounding for as long as no weight met such a gradient,
# and from there its distance grows by about a quarter with every micro-batch, until the losses
# are as small as their distance. All relative, and measured on every processor (docs/log.md).
QUIET = 6  # micro-batches
GROWTH = 1.25
# The bound of the quiet micro-batches, of the first one after them, and of the last ones.
LOSS_GROWS = (1.5e-6, 6e-4, 0.15)
NORM_GROWS = (1e-5, 0.015, 2.0)
WEIGHT = 0.02  # of the way that training took the weights

TRAINED = fid_recordings.trained()

every_forward = pytest.mark.parametrize(
    "case", params(fid_recordings.forwards(), "*/forward_*.safetensors", SYSTEM)
)
every_told = pytest.mark.parametrize(
    "case", params(fid_recordings.told(), "case in a */meta.json", SYSTEM)
)
every_attention = pytest.mark.parametrize("attention", ATTENTIONS)
every_trained = pytest.mark.parametrize("case", params(TRAINED, "trained weights", SYSTEM))
every_training = pytest.mark.parametrize(
    "case", params(fid_recordings.trainings(), "training log with its batch", SYSTEM)
)
every_recording = pytest.mark.parametrize(
    "recording", params(fid_recordings.recordings(), "texts", SYSTEM)
)


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recording], Path]:
    """The tokenizer of a recording, written once."""
    written: dict[Recording, Path] = {}

    def tokenizer_of(recording: Recording) -> Path:
        if recording not in written:
            folder = tmp_path_factory.mktemp("fid") / "tokenizer"
            written[recording] = fid_recordings.write_tokenizer(recording, folder)
        return written[recording]

    return tokenizer_of


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest, tokenizers: Callable[[Recording], Path]) -> Path:
    """That of the recording to which the test's case belongs."""
    values = request.node.callspec.params
    if "recording" in values:
        return tokenizers(values["recording"])
    case = values["case"]
    reference = case.reference if isinstance(case, Forward | Told) else case.forward.reference
    return tokenizers(reference.recording)


# One batch forward and backward
# ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replay:
    """One recorded forward and backward, run again."""

    task: Task
    model: FiD
    batch: Batch
    loss: float
    logits: Tensor
    states: Tensor  # (M, D)
    gradients: dict[str, Tensor]


@cache
def replay(case: Forward, tokenizer: Path, attention: str, **reader: Any) -> Replay:
    task = case.task(tokenizer, attention=attention, **reader)
    model: Any = task.model().train()
    batch = task.collate(case.rows())
    loss = next(iter(task.losses(model, [batch]))) / task.units(batch)
    loss.backward()
    with torch.no_grad():
        states = model.encode(batch)
        logits = model.head(
            model.decode(model.fuse(states, batch), batch["fused_mask"], batch["labels"])
        )
    gradients = {
        name.removeprefix("t5."): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return Replay(task, model, batch, loss.item(), logits, states, gradients)


@torch.no_grad()
def generated(ours: Replay) -> Tensor:
    return ours.model.eval()(generation=GREEDY, **ours.batch)["tokens"]


@torch.no_grad()
def passage_scores(model: FiD, batch: Batch) -> Tensor:
    return model.eval()(score_passages=True, **batch)["passage_scores"]


@every_attention
@every_forward
def test_logits_equal_the_recorded_ones(case: Forward, attention: str, tokenizer: Path) -> None:
    logits = known(replay(case, tokenizer, attention).logits, case.tensors["logits"])
    assert_close(*logits, **LOGITS)


@every_attention
@every_forward
def test_the_mean_loss_equals_the_recorded_one(
    case: Forward, attention: str, tokenizer: Path
) -> None:
    loss = replay(case, tokenizer, attention).loss
    assert_close(loss, case.tensors["loss"].item(), **LOSSES)


@every_attention
@every_forward
def test_encoder_states_of_real_tokens_equal_the_recorded_ones(
    case: Forward, attention: str, tokenizer: Path
) -> None:
    width = case.tensors["encoder_last_hidden"].shape[-1]
    recorded = case.tensors["encoder_last_hidden"].reshape(*case.mask.shape, width)[case.mask]
    assert_close(*known(replay(case, tokenizer, attention).states, recorded), **STATES)


@every_attention
@every_forward
def test_every_gradient_equals_the_recorded_one(
    case: Forward, attention: str, tokenizer: Path
) -> None:
    ours = replay(case, tokenizer, attention).gradients
    assert ours.keys() == case.gradients.keys()
    for name, want in case.gradients.items():
        assert_close(*known(ours[name], want), of=name, **GRADIENTS)


@every_attention
@every_forward
def test_greedy_answers_are_the_recorded_ids_and_texts(
    case: Forward, attention: str, tokenizer: Path
) -> None:
    ours = replay(case, tokenizer, attention)
    tokens = generated(ours)
    assert torch.equal(tokens, case.tensors["generated"])
    assert [ours.task.prompts.answer(ids).text for ids in tokens[:, 1:].tolist()] == case.meta[
        "generated_text"
    ]


@every_attention
@every_forward
def test_passage_scores_equal_the_recorded_ones_and_change_no_answer(
    case: Forward, attention: str, tokenizer: Path
) -> None:
    if "crossattention_scores" not in case.tensors:
        pytest.skip("this reference scores no passages")
    ours = replay(case, tokenizer, attention)
    scores = passage_scores(ours.model, ours.batch)
    assert_close(scores, case.tensors["crossattention_scores"].flatten(), **SCORES)
    assert torch.equal(generated(ours), case.tensors["generated"])


@every_forward
def test_without_the_old_position_bias_only_later_steps_change(
    case: Forward, tokenizer: Path
) -> None:
    if not case.reference.has_cross_bias:
        pytest.skip("this reference has no position bias in cross-attention")
    ours = replay(case, tokenizer, "bucketed", compat_cross_bias=False).logits
    want = case.tensors["logits"]
    assert_close(*known(ours[:, 0], want[:, 0]), **LOGITS)
    later, want_later = known(ours[:, 1:], want[:, 1:])
    assert (later - want_later).abs().max() > 1e-3 * want_later.abs().max()


@every_forward
def test_passages_hold_as_many_tokens_as_recorded(case: Forward, tokenizer: Path) -> None:
    lengths = replay(case, tokenizer, "bucketed").batch["passage"].bincount()
    assert lengths.tolist() == [count for counts in case.meta["n_real_tokens"] for count in counts]


@every_forward
def test_questions_as_text_become_the_recorded_batch(case: Forward, tokenizer: Path) -> None:
    if not case.reference.has_slow_tokenizer:
        pytest.skip(
            "its fast tokenizer of transformers 4.x finds an extra piece at some spaces (specs: "
            "feed the ids)"
        )
    task = case.task(tokenizer)
    batch = task.collate([task.encode(row) for row in task.rows("train")])
    assert torch.equal(batch["tokens"], case.tensors["input_ids"][case.mask])
    assert torch.equal(batch["labels"], case.tensors["labels"])


@every_attention
@every_told
def test_what_the_notes_tell_of_a_batch_comes_out_again(
    case: Told, attention: str, tokenizer: Path
) -> None:
    task = case.reference.task(
        tokenizer, lengths=fid_recordings.lengths_of(case.meta), attention=attention
    )
    model: Any = task.model()
    batch = task.collate(case.rows())
    assert batch["passage"].bincount().tolist() == [
        count for counts in case.meta["n_real_tokens"] for count in counts
    ]
    loss = model(**batch)["loss"] / task.units(batch)
    loss.backward()
    assert_close(loss.item(), case.meta["loss"], **LOSSES)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    assert_close(norm, case.meta["grad_total_norm"], **NORMS)
    with torch.no_grad():
        tokens = model.eval()(generation=GREEDY, **batch)["tokens"]
    assert [task.prompts.answer(ids).text for ids in tokens[:, 1:].tolist()] == case.meta[
        "generated_text"
    ]
    if "crossattention_scores" in case.meta:
        want = torch.tensor(case.meta["crossattention_scores"]).flatten()
        assert_close(passage_scores(model, batch), want, **SCORES)


# Weights after a reference's own training
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Answered:
    """What trained weights give for the batch that their reference answered."""

    tokens: Tensor
    texts: list[str]
    scores: Tensor  # (P,)


def answered(case: Trained, tokenizer: Path, folder: Path) -> Answered:
    task = case.forward.task(tokenizer, base=case.imported(folder))
    model: Any = task.model().eval()
    batch = task.collate(case.forward.rows())
    with torch.no_grad():
        tokens = model(generation=GREEDY, **batch)["tokens"]
    texts = [task.prompts.answer(ids).text for ids in tokens[:, 1:].tolist()]
    return Answered(tokens, texts, passage_scores(model, batch))


def training_of(case: Trained, ours: Answered) -> str | None:
    """The training that ended with these weights; a public-style reader does not say, but its
    scores tell.
    """
    if case.log:
        return case.log
    for name, meta in case.forward.reference.meta.items():
        if isinstance(meta, dict) and "final_crossattention_scores" in meta:
            want = torch.tensor(meta["final_crossattention_scores"]).flatten()
            if (ours.scores - want).abs().max() <= SAME_SCORES:
                return name
    return None


@every_trained
def test_trained_weights_answer_and_score_as_recorded(
    case: Trained, tokenizer: Path, tmp_path: Path
) -> None:
    ours = answered(case, tokenizer, tmp_path)
    name = training_of(case, ours)
    assert name or case.said, "these weights score as no recorded training ended"
    meta = case.forward.reference.meta[name] if name else {}
    if "generated" in case.said:
        assert torch.equal(ours.tokens, case.said["generated"])
    if "crossattention_scores" in case.said:
        assert_close(ours.scores, case.said["crossattention_scores"].flatten(), **SCORES)
    if "final_text" in meta:
        assert ours.texts == meta["final_text"]


# Training from the common start
# ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayed:
    """A recorded training, run again."""

    losses: list[float] = field(default_factory=list)  # of every micro-batch
    rates: list[float] = field(default_factory=list)  # of every optimizer step, as the next two
    norms: list[float] = field(default_factory=list)
    exact_matches: dict[int, float] = field(default_factory=dict)  # behind so many micro-batches
    weights: dict[int, dict[str, Tensor]] = field(
        default_factory=dict
    )  # likewise: the best and the last
    texts: list[str] = field(default_factory=list)  # the answers at the end


def _train_again(case: Training, tokenizer: Path, folder: Path) -> Replayed:
    """The loop's own step where a window is one micro-batch; else the engine alone.

    The references add up the gradients of micro-batch means, which a mean over all units is not.
    """
    from trainer.config import deepspeed_config
    from trainer.training.engine import Engine

    cfg: Any = tasks.parse(case.experiment(tokenizer))
    questions = case.forward.reference.recording.questions
    task = Task(cfg, Places(questions.parent, folder / "cache", folder / "runs"))
    ds = deepspeed_config.build(
        deepspeed_config.read("zero0"), train=cfg.train, optim=cfg.optim, world=1, source=""
    )
    live = Engine(task.model(), deepspeed_config.for_engine(ds), cfg.optim)
    rows, raw, found = case.forward.rows(), list(task.rows("valid")), Replayed()
    session = _session(cfg, task, live, folder)
    live.train()
    for number, own in enumerate(_order(case, task, live)):
        batch = task.collate([rows[row] for row in own])
        step, is_last = number // case.accumulation, (number + 1) % case.accumulation == 0
        lr = cfg.optim.lr * schedule.factor(cfg.schedule, step, cfg.train.steps)
        if case.accumulation == 1:
            found.losses.append(
                _one_step(
                    session, StepBatches(step, [batch], [np.array(own)], task.units(batch)), lr
                )
            )
        else:
            found.losses.append(_one_micro_batch(task, live, batch))
            if is_last:
                live.step(lr)
        if is_last:
            found.rates.append(lr)
            found.norms.append(live.grad_norm())
        if number + 1 in case.exact_matches:
            _answer(found, number + 1, task, live, rows, raw)
        if number + 1 in (case.best_step, len(case.losses)):
            found.weights[number + 1] = live.weights(lambda k: True)
    live.destroy()
    return found


def _session(cfg: Any, task: Any, live: Any, folder: Path) -> Any:
    from trainer.runtime.preemption import Preemption
    from trainer.telemetry.meter import Meter
    from trainer.telemetry.run_record import RunRecord
    from trainer.training.session import Cadence, Session

    store = store_of(task, "train", folder / "cache")
    return Session(
        cfg=cfg,
        task=task,
        engine=live,
        train=store,
        valid=store,
        sharding=Sharding(1, 1, 1, 0),
        cadence=Cadence(1, 1, 1),
        record=RunRecord(folder, total=cfg.train.steps),
        meter=Meter(),
        preemption=Preemption(),
        save=lambda progress: None,
        export_best=lambda: None,
    )


def _order(case: Training, task: Task, live: Any) -> list[list[int]]:
    """The recorded rows of every micro-batch, or those orders' first that gives the first two
    losses; lr 0 is first.
    """
    rows = case.forward.rows()
    for order in case.orders():
        batches = [task.collate([rows[row] for row in own]) for own in order[:2]]
        with torch.no_grad():
            losses = [(live.model(**batch)["loss"] / task.units(batch)).item() for batch in batches]
        if losses == pytest.approx(case.losses[:2], abs=FIRST_LOSS):
            return order
    raise AssertionError("no order of the recorded rows gives the first recorded losses")


def _one_step(session: Any, window: StepBatches, lr: float) -> float:
    from trainer.training.loop import train_step

    return float(
        train_step(session, window, lr=lr, unsound_before=torch.zeros((), dtype=torch.int64)).loss
    )


def _one_micro_batch(task: Task, live: Any, batch: Batch) -> float:
    loss = next(iter(task.losses(live.model, [batch]))) / task.units(batch)
    live.backward(loss)
    return loss.item()


@torch.no_grad()
def _answer(found: Replayed, step: int, task: Task, live: Any, rows: Any, raw: Any) -> None:
    live.eval()
    answered = task.answers(live.model, rows, raw)
    found.exact_matches[step] = answered.scores["em"].value()
    found.texts[:] = answered.predictions
    live.train()


@cache
def train_again(case: Training, tokenizer: Path) -> Replayed:
    folder = tokenizer.parent / f"{case.forward.reference.folder.name}-{case.name}"
    folder.mkdir()
    return run_on_ranks(1, _train_again, case, tokenizer, folder)[0]


def permitted(number: int, grows: tuple[float, float, float]) -> float:
    """How far the micro-batch of this number may be from its recording, as a share of it."""
    quiet, first, last = grows
    return quiet if number < QUIET else min(first * GROWTH ** (number - QUIET), last)


def assert_follows(
    ours: list[float],
    want: list[float],
    grows: tuple[float, float, float],
    *,
    every: int,
    what: str,
) -> None:
    """every: micro-batches from one number to the next."""
    assert len(ours) == len(want)
    for step, (got, recorded) in enumerate(zip(ours, want, strict=True)):
        number = (step + 1) * every - 1
        distance, bound = abs(got - recorded) / abs(recorded), permitted(number, grows)
        is_quiet = number < QUIET
        note(f"{what} of the {'first' if is_quiet else 'later'} steps", f"{step}", distance, bound)
        assert distance <= bound, f"step {step}: {got} is {distance:.1e} away, {bound:.1e} may be"


@every_training
def test_training_again_gives_the_recorded_losses(case: Training, tokenizer: Path) -> None:
    ours = train_again(case, tokenizer).losses
    assert_follows(ours, case.losses, LOSS_GROWS, every=1, what="losses")


@every_training
def test_training_again_takes_the_recorded_learning_rates(case: Training, tokenizer: Path) -> None:
    want = [step["lr"] for step in case.steps]
    assert train_again(case, tokenizer).rates == pytest.approx(want, rel=1e-12, abs=1e-18)


@every_training
def test_training_again_gives_the_recorded_gradient_norms(case: Training, tokenizer: Path) -> None:
    ours, want = train_again(case, tokenizer).norms, [step["grad_norm"] for step in case.steps]
    assert_follows(ours, want, NORM_GROWS, every=case.accumulation, what="norms")


@every_training
def test_training_again_gives_the_recorded_exact_matches_on_the_way(
    case: Training, tokenizer: Path
) -> None:
    if not case.exact_matches:
        pytest.skip("this training records no exact match")
    assert train_again(case, tokenizer).exact_matches == pytest.approx(case.exact_matches, abs=1e-3)


@every_training
def test_training_again_ends_with_the_recorded_answers(case: Training, tokenizer: Path) -> None:
    if "final_text" not in case.meta:
        pytest.skip("this training records no answers")
    assert train_again(case, tokenizer).texts == case.meta["final_text"]


@every_training
def test_training_again_ends_at_the_recorded_weights(
    case: Training, tokenizer: Path, tmp_path: Path
) -> None:
    ends: dict[str, dict[str, Tensor]] = {}
    # by what they say, as weights from outside may belong to a training of this clone
    meta = case.forward.reference.meta
    of_reference = [entry.case for entry in TRAINED if entry.case.forward.reference.meta == meta]
    for number, own in enumerate(of_reference):
        folder = tmp_path / str(number)
        folder.mkdir()
        if training_of(own, answered(own, tokenizer, folder)) == case.name:
            ends[own.name] = load_file(folder / "base" / "model.safetensors")
    if not ends:
        pytest.skip("the weights of this training are not here")
    start = load_file(case.forward.reference.recording.init / "model.safetensors")
    ours = train_again(case, tokenizer).weights
    for name, want in ends.items():
        got = ours[case.best_step if name.startswith("best") else len(case.losses)]
        assert {f"t5.{part}" for part in want} == got.keys()
        off = math.hypot(*(float((got[f"t5.{part}"] - want[part]).norm()) for part in want))
        way = math.hypot(*(float((want[part] - start.get(part, 0)).norm()) for part in want))
        note("weights", name, off, WEIGHT * way)
        assert off <= WEIGHT * way, name


# Text and scores
# --------------------------------------------------------------------------------------------------


@every_recording
def test_the_tokenizer_gives_the_ids_of_the_slow_one_and_of_this_transformers(
    recording: Recording, tokenizer: Path
) -> None:
    loaded = vocabulary.load_tokenizer(str(tokenizer), data_path=None, cache_dir=tokenizer.parent)
    texts = recording.json("tokenizer", "prompts_and_ids.json")
    for version in ("3.0.2", "5.23.0"):
        want = recording.json("tokenizer", f"ids_{version}.json")["ids"]
        assert (
            loaded(texts["prompts"] + texts["extra"], add_special_tokens=False)["input_ids"] == want
        )


@every_recording
def test_question_and_passage_apart_give_the_ids_of_the_recorded_prompts(
    recording: Recording, tokenizer: Path
) -> None:
    task = fid_recordings.task_of(recording, tokenizer, reader={})
    want = recording.json("tokenizer", "ids_3.0.2.json")["ids"]
    prompts = [prompt for row in task.rows("train") for prompt in whole_prompts(task.prompts, row)]
    assert prompts == want[: len(prompts)]


def whole_prompts(prompts: Prompts, row: dict[str, Any]) -> list[list[int]]:
    question = prompts.question(row["question"])
    return [[*question, *passage] for passage in prompts.passages(row["ctxs"])]


@every_recording
def test_targets_end_once(recording: Recording, tokenizer: Path) -> None:
    task = fid_recordings.task_of(recording, tokenizer, reader={})
    recorded = recording.json("tokenizer", "ids_3.0.2.json")
    ours = [unflat(task.encode(row), "targets") for row in task.rows("train")]
    assert ours == [[ids] for ids in recorded["target_fb"]]


@every_recording
def test_prompts_are_the_recorded_texts(recording: Recording, tokenizer: Path) -> None:
    prompts = recording.json("fb302", "meta.json")["prompts"]
    task = fid_recordings.task_of(recording, tokenizer, reader={})
    said: list[list[str]] = []
    for row in task.rows("train"):
        asked: list[str] = []
        spy = Prompts(_Spelling(asked), task.cfg.data)
        spy.question(row["question"])
        spy.passages(row["ctxs"])
        said.append([asked[0] + passage for passage in asked[1:]])
    assert said == prompts


class _Spelling:
    """A tokenizer that writes down what it is asked."""

    eos_token_id = 1

    def __init__(self, asked: list[str]) -> None:
        self.asked = asked

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        self.asked += texts
        return {"input_ids": [[0] for _ in texts]}


@pytest.mark.parametrize(
    ("clean", "version"), [(True, "3.0.2"), (True, "4.17.0"), (False, "5.23.0")]
)
@every_recording
def test_answers_are_cleaned_of_spaces_as_recorded(
    recording: Recording, clean: bool, version: str, tokenizer: Path
) -> None:
    recorded = recording.json("tokenizer", f"ids_{version}.json")
    prompts = fid_recordings.task_of(recording, tokenizer, reader={}, clean_up_spaces=clean).prompts
    ids = prompts.tokenizer("it 's 5 , 000 . n't ( a ) do n't")["input_ids"]
    assert prompts.answer(ids).text == recorded["dec_clean_probe"]
    assert [prompts.answer(target).text for target in recorded["target_default"]] == recorded["dec"]


@every_recording
def test_texts_are_normalised_as_recorded(recording: Recording) -> None:
    for text, want in recording.json("eval_cases.json")["normalize_answer"].items():
        assert normalise(text) == want, text


@every_recording
def test_exact_matches_are_the_recorded_ones(recording: Recording) -> None:
    for prediction, references, want in recording.json("eval_cases.json")["ems"]:
        assert exact_match(prediction, references) == want, (prediction, references)


@every_recording
def test_learning_rates_are_the_recorded_ones(recording: Recording) -> None:
    for name, want in recording.json("eval_cases.json")["lr"].items():
        warmup, total = (
            int(part.lstrip("warmuptol")) for part in name.removeprefix("fixed_lr_").split("_")
        )
        shape = "constant" if name.startswith("fixed_lr") else "linear"
        of_ours = Schedule(shape=shape, warmup_steps=warmup)
        assert [
            schedule.factor(of_ours, step, total) for step in range(len(want))
        ] == pytest.approx(want), name
