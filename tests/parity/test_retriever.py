"""The retriever gives Tevatron v1's numbers: losses, gradients, GradCache, dropout, choices, traces
of training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.long import long_but
from tests.parity import retriever_recordings as recorded
from tests.parity.recordings import known, params
from tests.parity.retriever_recordings import SYSTEM, Case, Choice, Note, Recording, batch_of
from tests.ranks import run_on_ranks
from tests.tolerance import assert_close
from trainer import tasks
from trainer.config.schema import Schedule
from trainer.protocol.abilities import Side
from trainer.protocol.task import DRAW, EPOCH, Batch, Places
from trainer.runtime import distributed
from trainer.tasks.retriever import selection
from trainer.tasks.retriever.config import Loss
from trainer.tasks.retriever.loss import losses
from trainer.tasks.retriever.model import rows_of_streams
from trainer.training import schedule

# As tests/tolerance.py means them: the products of every layer, six in each and sums over the
# width. A gradient has passed them twice, and the number of a later step once more for each step.
DEPTH = 6 * recorded.num_layers_times_width()
LOSSES = {"what": "loss", "depth": DEPTH, "margin": 1.5}
SCORES = {"what": "scores", "depth": DEPTH, "margin": 0.6}
VECTORS = {"what": "vectors", "depth": DEPTH, "margin": 1.0}
NORMS = {"what": "norms", "depth": 2 * DEPTH, "margin": 12.0}
TOTAL_NORM = {"what": "total norm", "depth": 2 * DEPTH, "margin": 2.0}
GRADIENTS = {"what": "gradients", "depth": 2 * DEPTH, "margin": 6.0}
TRACE = {"what": "losses of a trace", "depth": 2 * DEPTH, "margin": 1.0}
TRACE_NORMS = {"what": "norms of a trace", "depth": 2 * DEPTH, "margin": 1.2}
# The gradient of a key's bias is 0: what is left of it is the rounding of its parts, which are as
# large as this share of the largest norm.
CANCELS = 0.01
QUERIES = 8
MODES = ("local", "xdev")
Key = tuple[Path, str, str]  # of a case and a mode

each_of_one_rank = pytest.mark.parametrize(
    "case", params(recorded.losses(1), "expected_world1.json", SYSTEM)
)
each_of_two_ranks = pytest.mark.parametrize(
    "case", params(recorded.losses(2), "expected_world2.json", SYSTEM)
)


def task_of(case: Case, **loss: Any) -> Any:
    """Our task, of which only the losses are used here."""
    values = {
        "task": "retriever",
        "base": str(case.recording.folder / "tinybert"),
        "train": {"steps": 24, "global_batch": 8, "micro_batch": 8, "precision": "fp32"},
        "optim": {"lr": 1e-3},
        "data": {"source": "pretokenised", "passages": case.passages},
        "encoder": json.loads(recorded.encoder_of(case.variant).model_dump_json()),
        "loss": loss,
    }
    return tasks.load(tasks.parse(values), Places(None, Path("unused"), Path("unused")))


def own_batches(case: Case, cut: Sequence[int]) -> list[Batch]:
    """This rank's contiguous share of 8 queries, in micro-batches of these sizes."""
    share = QUERIES // distributed.world()
    start = share * distributed.rank()
    assert sum(cut) == share
    starts = np.cumsum([start, *cut])
    return [
        batch_of(case.recording, range(starts[k], starts[k + 1]), case.passages)
        for k in range(len(cut))
    ]


def run(case: Case, cut: Sequence[int] = (), **loss: Any) -> tuple[float, float, dict[str, Tensor]]:
    """(mean loss over all ranks, this rank's mean, gradients of the mean over all ranks) of 8
    queries.
    """
    model = recorded.retriever(case.recording, case.variant, case.dtype)
    share = QUERIES // distributed.world()
    total = torch.zeros((), dtype=torch.float64)
    for summed in task_of(case, **loss).losses(model, own_batches(case, cut or [share])):
        summed.backward()
        total += summed.detach()
    gradients = {
        n: (distributed.total(g) / QUERIES).to(g.dtype)
        for n, g in recorded.gradients_of(model).items()
    }
    return float(distributed.total(total)) / QUERIES, float(total) / share, gradients


def assert_norms(
    gradients: Mapping[str, Tensor], want: Mapping[str, Any], dtype: torch.dtype
) -> None:
    norms = dict(recorded.named(want["grad_norms"]))
    assert norms.keys() == gradients.keys()
    floor = CANCELS * max(norm or 0.0 for norm in norms.values())
    for name, norm in norms.items():
        got, scale = gradients[name].double().norm().item(), max(norm or 0.0, floor)
        assert_close(got, norm or 0.0, of=name, scale=scale, dtype=dtype, **NORMS)


def assert_loss(got: float, want: float, dtype: torch.dtype, of: str = "") -> None:
    assert_close(got, want, of=of, dtype=dtype, **LOSSES)


def assert_total_norm(
    gradients: Mapping[str, Tensor], want: float, dtype: torch.dtype, of: str = ""
) -> None:
    assert_close(total_norm(gradients), want, of=of, dtype=dtype, **TOTAL_NORM)


def total_norm(gradients: Mapping[str, Tensor]) -> float:
    return math.hypot(*(gradient.double().norm().item() for gradient in gradients.values()))


# Losses and gradients
# -----------------------------------------------------------------------------------------------


@each_of_one_rank
def test_the_loss_and_the_norm_of_every_gradient_equal_the_recorded_ones(case: Case) -> None:
    want = case.recorded["local"]
    loss, _, gradients = run(case)
    assert_loss(loss, want["loss_logged"], case.dtype)
    assert_norms(gradients, want, case.dtype)
    assert_total_norm(gradients, want["grad_norm_total"], case.dtype)


@each_of_one_rank
def test_the_scores_equal_the_recorded_ones(case: Case) -> None:
    want = case.recorded["local"].get("scores")
    if want is None:
        pytest.skip("no scores are recorded of this case")
    found = recorded.retriever(case.recording, case.variant, case.dtype)(
        **{
            key: value
            for key, value in batch_of(case.recording, range(QUERIES), case.passages).items()
            if key != "counts"
        }
    )
    got = (found["queries"] @ found["passages"].T).detach().double()
    want = torch.tensor(want, dtype=torch.float64)
    # a dot product that cancels is left with the rounding of its terms, which the vectors' lengths
    # bound
    length = found["queries"].norm(dim=-1).max() * found["passages"].norm(dim=-1).max()
    assert_close(got, want, scale=float(length.detach()), dtype=case.dtype, **SCORES)


@each_of_one_rank
def test_cached_gradients_equal_the_recorded_ones_whatever_the_chunks(case: Case) -> None:
    want = case.recorded["local"]
    cached = recorded.chunks_of(want)
    assert cached
    for name, query, passage in cached:
        loss, _, gradients = run(case, query_chunk=query, passage_chunk=passage)
        assert_loss(loss, want[name]["loss_returned"], case.dtype, name)
        assert_norms(gradients, want[name] if "grad_norms" in want[name] else want, case.dtype)
        assert_total_norm(gradients, want[name]["grad_norm_total"], case.dtype, name)


@each_of_one_rank
@pytest.mark.parametrize("cut", [[4, 4], [2, 2, 2, 2], [3, 1, 4]], ids=str)
def test_micro_batches_are_chunks_of_one_pool(case: Case, cut: list[int]) -> None:
    want = case.recorded["local"]
    loss, _, gradients = run(case, cut)
    assert_loss(loss, want["loss_logged"], case.dtype)
    assert_norms(gradients, want, case.dtype)


each_full = pytest.mark.parametrize(
    "note", params(recorded.full_gradients(), "grads_*.safetensors", SYSTEM)
)


def case_of_file(note: Note) -> Case:
    """Of a name like f64_untied_pooler_norm_n2."""
    words = note.name.split("_")
    return Case(note.recording, f"{words[0]}/{'_'.join(words[1:-1])}/{words[-1]}", {})


@each_full
@pytest.mark.parametrize(
    "loss", [{}, {"query_chunk": 2, "passage_chunk": 4}, {"pool_on_host": True}], ids=str
)
def test_every_element_of_a_gradient_equals_the_recorded_one(
    note: Note, loss: dict[str, Any]
) -> None:
    _, _, gradients = run(case_of_file(note), **loss)
    want = dict(recorded.named(note.recording.tensors(f"grads_{note.name}.safetensors")))
    pairs = {name: known(gradients[name], gradient) for name, gradient in want.items()}
    floor = CANCELS * max(float(gradient.abs().max()) for _, gradient in pairs.values())
    for parameter, (got, gradient) in pairs.items():
        scale = max(float(gradient.abs().max()), floor)
        assert_close(got, gradient, of=parameter, scale=scale, **GRADIENTS)


@each_full
def test_every_vector_equals_the_recorded_one(note: Note) -> None:
    case = case_of_file(note)
    want = note.recording.tensors(f"reps_{note.name}.safetensors")
    if not want:
        pytest.skip(f"no reps_{note.name}.safetensors")
    texts = {
        key: value
        for key, value in batch_of(case.recording, range(QUERIES), case.passages).items()
        if key != "counts"
    }
    found = recorded.retriever(case.recording, case.variant, case.dtype)(**texts)
    assert_close(*known(found["queries"], want["q_reps"]), of="queries", **VECTORS)
    assert_close(*known(found["passages"], want["p_reps"]), of="passages", **VECTORS)


# Two ranks
# --------------------------------------------------------------------------------------------------


def _every_run(case: Case, mode: str) -> dict[str, tuple[float, float, dict[str, Tensor]]]:
    across = {"negatives_x_device": mode == "xdev"}
    found = {"plain": run(case, **across), "micro_batches": run(case, [1, 3], **across)}
    for name, query, passage in recorded.chunks_of(case.recorded[mode]):
        if not name.endswith("_nosync"):
            found[name] = run(case, query_chunk=query, passage_chunk=passage, **across)
    return found


def _key(case: Case, mode: str) -> Key:
    return case.recording.folder, case.name, mode


def _every_case() -> dict[Key, dict[str, tuple[float, float, dict[str, Tensor]]]]:
    return {
        _key(entry.case, mode): _every_run(entry.case, mode)
        for entry in recorded.losses(2)
        for mode in MODES
        if mode in entry.case.recorded
    }


@pytest.fixture(scope="module")
def of_two_ranks() -> list[dict[Key, Any]]:
    """By rank, and by case and mode: of all of them, from one start of two processes."""
    return run_on_ranks(2, _every_case)


@each_of_two_ranks
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_have_the_recorded_loss_and_gradients(
    case: Case, mode: str, of_two_ranks: list[dict[Key, Any]]
) -> None:
    if mode not in case.recorded:
        pytest.skip(f"{mode} is not recorded of this case")
    want = case.recorded[mode]
    for rank, every in enumerate(of_two_ranks):
        for name, (loss, own_loss, gradients) in every[_key(case, mode)].items():
            if mode == "xdev":  # what it returns is twice the mean over the whole batch
                assert_loss(loss, want["loss_logged"], case.dtype, name)
            else:
                returned = want["loss_returned_per_rank"][rank]
                assert_loss(own_loss, returned, case.dtype, name)
            cached = want.get(name, want)
            assert_norms(gradients, cached if "grad_norms" in cached else want, case.dtype)
            assert_total_norm(gradients, want["grad_norm_total"], case.dtype, name)


# Dropout, accumulation
# ----------------------------------------------------------------------------------------------


def _case_of(note: Note) -> Case:
    """Of names like dropout0.1_seed1234_f64_tied_n2 or trace_f32_tied_n2_24steps."""
    words = note.name.split("_")
    start = next(k for k, word in enumerate(words) if word in recorded.DTYPES)
    stop = next(
        k for k, word in enumerate(words) if k > start and word[0] == "n" and word[1:].isdigit()
    )
    name = f"{words[start]}/{'_'.join(words[start + 1 : stop])}/{words[stop]}"
    return Case(note.recording, name, {})


def _with_dropout(
    note: Note, chunks: tuple[int, int] | None
) -> tuple[float, dict[str, Tensor], Tensor]:
    case, words = _case_of(note), note.name.split("_")
    rate = float(words[0].removeprefix("dropout"))
    seed = next(int(word.removeprefix("seed")) for word in words if word.startswith("seed"))
    model = recorded.retriever(case.recording, case.variant, case.dtype, dropout=rate)
    loss = {} if chunks is None else {"query_chunk": chunks[0], "passage_chunk": chunks[1]}
    torch.manual_seed(seed)
    (summed,) = task_of(case, **loss).losses(
        model, [batch_of(case.recording, range(QUERIES), case.passages)]
    )
    (summed / QUERIES).backward()
    return float(summed.detach()) / QUERIES, recorded.gradients_of(model), torch.rand(3)


@pytest.mark.parametrize(
    "note", params(recorded.more(1, "dropout"), "dropout in expected_more_world1.json", SYSTEM)
)
def test_dropout_is_replayed_and_random_numbers_go_on_as_recorded(note: Note) -> None:
    runs = {
        "plain": None,
        "gc_single_chunk(q8,p16)": (8, 16),
        "gc_q2_p4": (2, 4),
        "chunked_single_graph_q2_p4": (2, 4),
    }
    for mode, chunks in runs.items():
        if mode not in note.recorded:
            continue
        want, case = note.recorded[mode], _case_of(note)
        loss, gradients, after = _with_dropout(note, chunks)
        assert_loss(loss, want["loss"], case.dtype, mode)
        assert_total_norm(gradients, want["grad_norm_total"], case.dtype, mode)
        assert after.tolist() == want["rand_after"], mode
        if "grad_norms" in want:
            assert_norms(gradients, want, case.dtype)


@pytest.mark.parametrize("note", params(recorded.more(1, "grad_accum"), "grad_accum", SYSTEM))
@pytest.mark.parametrize(
    "chunked", [{}, {"query_chunk": 2, "passage_chunk": 4}], ids=["plain", "cached"]
)
def test_micro_batches_that_are_pools_of_their_own_are_averaged(
    note: Note, chunked: dict[str, int]
) -> None:
    want, case = note.recorded["plain_hf_divides_by_GA"], _case_of(note)
    count = len(want["micro_losses"])
    model, size = recorded.retriever(case.recording, case.variant, case.dtype), QUERIES // count
    window = [
        batch_of(case.recording, range(k * size, (k + 1) * size), case.passages)
        for k in range(count)
    ]
    for k, summed in enumerate(task_of(case, pool="micro_batch", **chunked).losses(model, window)):
        assert_loss(float(summed.detach()) / size, want["micro_losses"][k], case.dtype)
        (summed / QUERIES).backward()
    gradients = recorded.gradients_of(model)
    assert_total_norm(gradients, want["grad_norm_total"], case.dtype)
    assert_norms(gradients, want, case.dtype)


# Training
# --------------------------------------------------------------------------------------------------


def _trained(
    case: Case, batches: Sequence[Batch], *, shape: Schedule, **loss: Any
) -> list[tuple[float, float, float]]:
    """(loss, gradient norm before clipping, rate) of AdamW steps, each on one batch of all
    ranks.
    """
    model, task = (
        recorded.retriever(case.recording, case.variant, case.dtype),
        task_of(case, **loss),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    found = []
    for step, batch in enumerate(batches):
        rate = 1e-3 * schedule.factor(shape, step, len(batches))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        total = 0.0
        units = len(batch["counts"])
        for summed in task.losses(model, [batch]):
            (summed / units).backward()
            total += float(summed.detach()) / units
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((total, float(norm), rate))
    return found


LINEAR = Schedule(shape="linear", warmup_ratio=0.1)
CACHED = {"query_chunk": 2, "passage_chunk": 4}


@pytest.mark.parametrize(
    "note", params(recorded.more(1, "trace"), "traces in expected_more_world1.json", SYSTEM)
)
@pytest.mark.parametrize("chunked", long_but([CACHED], [{}, CACHED]), ids=["plain", "cached"])
def test_24_steps_of_training_follow_the_recorded_trace(
    note: Note, chunked: dict[str, int]
) -> None:
    plain = note.recorded["plain"]
    case, want = _case_of(note), note.recorded.get("gc_q2_p4", plain) if chunked else plain
    batches = [
        batch_of(case.recording, range(step % 4 * 8, step % 4 * 8 + 8), case.passages)
        for step in range(len(want["loss"]))
    ]
    found = _trained(case, batches, shape=LINEAR, **chunked)
    assert [rate for _, _, rate in found] == pytest.approx(want["lr"], rel=1e-12, abs=1e-18)
    losses_of_steps = [loss for loss, _, _ in found]
    assert_close(losses_of_steps, want["loss"], dtype=case.dtype, **TRACE)
    norms_of_steps = [norm for _, norm, _ in found]
    assert_close(norms_of_steps, want["grad_norm_before_clip"], dtype=case.dtype, **TRACE_NORMS)


def _traced(note: Note, across: bool, chunked: dict[str, int], steps: int) -> list[float]:
    """The mean loss of each step of the recorded training on this process group's ranks."""
    case, share = _case_of(note), QUERIES // distributed.world()
    model, task = (
        recorded.retriever(case.recording, case.variant, case.dtype),
        task_of(case, negatives_x_device=across, **chunked),
    )
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), []
    for step in range(steps):
        start = step % 4 * 8 + share * distributed.rank()
        optimizer.param_groups[0]["lr"] = 1e-3 * schedule.factor(LINEAR, step, steps)
        optimizer.zero_grad()
        (summed,) = task.losses(
            model, [batch_of(case.recording, range(start, start + share), case.passages)]
        )
        summed.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = (distributed.total(parameter.grad) / QUERIES).to(parameter.dtype)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append(float(distributed.total(summed.detach())) / QUERIES)
    return seen


@pytest.mark.parametrize(
    "note", params(recorded.more(2, "trace"), "traces in expected_more_world2.json", SYSTEM)
)
def test_training_on_two_ranks_follows_the_recorded_trace(note: Note) -> None:
    modes = {
        mode: run
        for mode, run in note.recorded.items()
        if isinstance(run, dict) and isinstance(run.get("loss"), list)
    }
    assert modes, f"{note.name} holds no list of losses"
    for mode, run in modes.items():
        chunked = {"query_chunk": 2, "passage_chunk": 4} if "gc" in mode else {}
        across = "local" not in f"{note.name}{mode}"
        found = run_on_ranks(2, _traced, note, across, chunked, len(run["loss"]))[0]
        # what negatives across devices return is twice the mean
        scale = 2 if across and run["loss"][0] > 1.5 * found[0] else 1
        dtype = _case_of(note).dtype
        assert_close([scale * loss for loss in found], run["loss"], of=mode, dtype=dtype, **TRACE)


@pytest.mark.parametrize("case", params(recorded.poolings(), "v2_expected.json", SYSTEM))
def test_every_pooling_and_temperature_has_the_later_programs_loss(case: recorded.Pooling) -> None:
    model = recorded.retriever(case.recording, "tied", torch.float64)
    model.how = case.how
    batch = batch_of(case.recording, range(QUERIES), 2)
    found = model(**{key: value for key, value in batch.items() if key != "counts"})
    scores = found["queries"] @ found["passages"].T
    divided = scores / case.how.temperature
    loss = float(
        losses.in_batch({**found, **batch}, Loss(), temperature=case.how.temperature).detach()
    )
    assert_loss(loss / QUERIES, case.recorded["loss"], torch.float64, case.name)
    if isinstance(case.recorded.get("scores"), list):
        want = torch.tensor(case.recorded["scores"], dtype=torch.float64)
        got = min((scores, divided), key=lambda each: float((each.detach() - want).abs().max()))
        assert_close(got, want, **SCORES)


@pytest.mark.parametrize("note", params(recorded.driver_runs(), "v1_driver_*.json", SYSTEM))
def test_the_published_programs_run_is_followed_example_by_example(
    note: Note, tmp_path: Path
) -> None:
    want = note.recorded
    examples = want["examples_in_order"]
    size = len(examples) // len(want["per_step_loss"])
    task = _toy_task(note.recording, tmp_path)
    encoded = [task.encode(row) for row in task.rows("train")]
    batches = []
    for start in range(0, len(examples), size):
        seen = examples[start : start + size]
        rows = [
            {**_arrays(encoded[one["item"]]), DRAW: np.array([0]), EPOCH: np.array([one["epoch"]])}
            for one in seen
        ]
        batch = task.collate(rows)
        assert _ids(batch, "query") == [one["query_ids"] for one in seen]
        assert _ids(batch, "passage") == [ids for one in seen for ids in one["passage_ids"]]
        kept = ("query_", "passage_", "counts", "identities")
        batches.append({name: x for name, x in batch.items() if name.startswith(kept)})
    case = Case(note.recording, "f32/tied/n2", {})
    chunked = {"query_chunk": 2, "passage_chunk": 4} if note.name.endswith("gc.json") else {}
    found = _trained(case, batches, shape=LINEAR, **chunked)
    assert_close([loss for loss, _, _ in found], want["per_step_loss"], **TRACE)


def _toy_task(recording: Recording, tmp_path: Path) -> Any:
    rows = recording.folder / "toy_pretok"
    if not (rows / "train.jsonl").is_file():
        pytest.skip("no toy_pretok/ is recorded")
    values = {
        "task": "retriever",
        "base": str(recording.folder / "tinybert"),
        "train": {
            "steps": 24,
            "global_batch": 8,
            "micro_batch": 8,
            "precision": "fp32",
            "seed": 42,
        },
        "optim": {"lr": 1e-3},
        "data": {"source": "pretokenised", "passages": 2, "query_tokens": 12, "passage_tokens": 24},
    }
    return tasks.load(tasks.parse(values), Places(rows, tmp_path, tmp_path))


def _arrays(encoded: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(values, dtype=np.int32) for name, values in encoded.items()}


def _ids(batch: Batch, side: Side) -> list[list[int]]:
    return [ids.tolist() for ids in rows_of_streams(batch, side)]


@pytest.mark.parametrize("recording", params(recorded.toys(), "toy/train.jsonl", SYSTEM))
def test_texts_and_their_pretokenised_form_are_the_same_rows(
    recording: Recording, tmp_path: Path
) -> None:
    pretokenised = _toy_task(recording, tmp_path)
    cfg = pretokenised.cfg
    cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"source": "tevatron"})})
    texts = tasks.load(cfg, Places(recording.folder / "toy", tmp_path, tmp_path))
    assert [texts.encode(row) for row in texts.rows("train")] == [
        pretokenised.encode(row) for row in pretokenised.rows("train")
    ]


@pytest.mark.parametrize("case", params(recorded.selections(), "negative_selection.json", SYSTEM))
def test_the_passages_of_every_epoch_are_the_recorded_ones(case: Choice) -> None:
    for epoch, want in enumerate(case.recorded["selected_per_epoch"]):
        turn = selection.Turn(
            item=case.recorded["item"], epoch=epoch, seed=case.recorded["seed"], draw=0
        )
        got = [f"p{selection.positive(case.recorded['n_pos'], turn, 'by_epoch')}"]
        wanted = case.recorded["train_n_passages"] - 1
        got += [
            f"n{place}"
            for place in selection.negatives(case.recorded["n_neg"], wanted, turn, "by_epoch")
        ]
        assert got == want


# ZeRO
# --------------------------------------------------------------------------------------------------


def _six_steps(note: Note, stage: int, chunked: dict[str, int], cut: list[int]) -> list[float]:
    """The losses of the recorded six steps under an engine."""
    from tests.numerics.test_engine import ds_for
    from trainer.config.schema import Optim
    from trainer.training.engine import Engine

    case = Case(note.recording, "f32/tied/n2", {})
    world, rank = distributed.world(), distributed.rank()
    optim = Optim(lr=1e-3, clip=1.0)
    live = Engine(
        recorded.retriever(case.recording, case.variant, case.dtype),
        ds_for(stage, "fp32", world) | _clipped(),
        optim,
    )
    live.train()
    task, seen = task_of(case, **chunked), []
    for step in range(len(note.recorded["loss"])):
        starts = np.cumsum([step % 4 * 8 + QUERIES // world * rank, *cut])
        window = [
            batch_of(case.recording, range(starts[k], starts[k + 1]), case.passages)
            for k in range(len(cut))
        ]
        total = torch.zeros((), dtype=torch.float64)
        for summed in task.losses(live.model, window):
            live.backward(summed / QUERIES)
            total += summed.detach() / QUERIES
        live.step(1e-3)
        seen.append(float(distributed.total(total)))
    live.destroy()
    return seen


def _clipped() -> dict[str, float]:
    return {"gradient_clipping": 1.0}


def _at_every_stage(note: Note, cuts: list[list[int]]) -> dict[str, list[float]]:
    """Every cut under ZeRO-3; under the other stages the one that goes backward most often."""
    chunks: list[dict[str, int]] = [{}, {"query_chunk": 3, "passage_chunk": 5}]
    entries = [(3, chunked, cut) for chunked in chunks for cut in cuts]
    entries += [(stage, chunks[-1], cuts[-1]) for stage in (0, 1, 2)]
    return {
        f"ZeRO {stage}, {chunked}, micro-batches {cut}": _six_steps(note, stage, chunked, cut)
        for stage, chunked, cut in entries
    }


@pytest.mark.parametrize(
    "note", params(recorded.traces_of_zero(), "deepspeed_trace_6steps.json", SYSTEM)
)
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_recorded_six_steps_are_followed_at_every_stage(world: int, note: Note) -> None:
    cuts = {1: [[8], [4, 4]], 2: [[4], [1, 3]]}[world]
    for found in run_on_ranks(world, _at_every_stage, note, cuts):
        for name, seen in found.items():
            assert_close(seen, note.recorded["loss"], of=name, **TRACE)
