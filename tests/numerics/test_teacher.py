"""What a teacher says of rows is computed once and is that of plain torch; a student's loss and
gradients are those of the formula; and which teachers, rows and folders are refused.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exp_configs import vary
from tests.facts import LLAMA, TINY_BERT, TINY_T5, experiment, write_facts
from tests.tolerance import assert_all_close
from tests.wording import refused
from trainer import tasks
from trainer.config import deepspeed_config
from trainer.data.order import Sharding
from trainer.data.readings import likely_tokens
from trainer.data.token_store import store_of
from trainer.errors import ConfigError, StorageError
from trainer.models import base_source
from trainer.models.head import OutputLayer
from trainer.plan.memory import plan_text
from trainer.plan.memory.plan import make
from trainer.plan.memory.subject import subject_of
from trainer.protocol.task import DRAW, EPOCH, Places

TOKENS = 384  # of the tokenizer; the teacher's vocabulary is padded to more
BASES: dict[str, dict[str, Any]] = {
    "causal_lm": LLAMA,
    "summariser": TINY_T5,
    "fid": TINY_T5,
}
ANSWERS = {"summariser": "sample_summaries", "fid": "sample_targets"}  # draw one of several


def wider(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Another model of the same family, whose vocabulary is padded."""
    return {"config": {**base["config"], "vocab_size": 400, **changes}, "seed": 9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The facts, every other row with two answers."""
    folder = write_facts(tmp_path_factory.mktemp("facts"))
    for name in ("train", "valid"):
        path = folder / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for number, row in enumerate(rows):
            row["answers"] = [row["answer"], row["context"][:40]][: 1 + number % 2]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def load(task: str, folder: Path, teacher: dict[str, Any] | None = None, **changes: Any) -> Any:
    values = experiment(task, folder, base=BASES[task], **changes)
    if task == "summariser":
        values = vary(values, data={"summaries": ["answers"]})
    if task in ANSWERS:
        values = vary(values, data={ANSWERS[task]: True})
    values["teacher"] = {"base": wider(BASES[task]), **(teacher or {})}
    places = Places(folder, folder / "cache", folder / "runs")
    return tasks.load(tasks.parse(values), places)


class Rows(list):
    """Encoded rows in place of a token store."""

    digest = "these rows"

    @property
    def lengths(self) -> np.ndarray:
        return np.array([sum(len(row[name]) for name in row) for row in self])


def some_rows(task: Any, count: int, split: str = "train") -> Rows:
    encoded = [task.encode(row) for _, row in zip(range(count), task.rows(split), strict=False)]
    as_stored = [{name: np.asarray(ids, np.int32) for name, ids in one.items()} for one in encoded]
    return Rows(as_stored)


def drawn(rows: list[Any], draw: int) -> list[dict[str, Any]]:
    return [{**row, DRAW: np.array([draw]), EPOCH: np.array([draw])} for row in rows]


def logits_by_row(task: Any, model: Any, rows: list[Any]) -> Tensor:
    """(N, V) of all labels, each row read by itself."""
    parts: list[Tensor] = []
    for row in rows:
        batch = task.collate([task.with_one_target(row)])
        states = model.scored_states(**batch)
        parts.append(OutputLayer(model.get_submodule(task.base_name))(states))
    return torch.cat(parts)


def divergence(name: str, teacher: Tensor, student: Tensor) -> Tensor:
    """(N,) over all tokens."""
    log_p, log_q = teacher.log_softmax(-1), student.log_softmax(-1)
    if name == "forward":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if name == "reverse":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    p, q = log_p.exp(), log_q.exp()
    mean = ((p + q) / 2).log()
    return ((p * (log_p - mean)).sum(-1) + (q * (log_q - mean)).sum(-1)) / 2


@pytest.mark.parametrize(
    ("name", "is_packed"),
    [
        *(("causal_lm", True), ("causal_lm", False)),
        *(("summariser", True), ("summariser", False)),
        ("fid", True),  # which reads streams alone
    ],
)
def test_a_batch_holds_what_the_teacher_says_of_the_targets_that_are_drawn(
    name: str, is_packed: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load(name, folder, {"top_k": 5})
    if not is_packed:
        monkeypatch.setattr(type(task), "is_packed", False)
    rows = some_rows(task, 7)
    task.read_teacher({"train": rows, "valid": Rows(rows[:2])}, batch=3)
    teacher_task = task.task_of_teacher()
    torch.manual_seed(0)
    teacher = teacher_task.model().eval()
    for draw in (0, 1, 2):
        of_epoch = drawn(rows, draw)
        batch = task.collate(of_epoch)
        with torch.no_grad():
            logits = logits_by_row(task, teacher, of_epoch)[:, :TOKENS]
        want = logits.log_softmax(-1)
        ids = batch["teacher_ids"].long()
        assert len(ids) == len(batch["scored"])
        assert torch.equal(ids.sort(-1).values, want.topk(5).indices.sort(-1).values)
        torch.testing.assert_close(batch["teacher_logps"], want.gather(1, ids), rtol=0, atol=1e-5)
        rest = want.scatter(1, ids, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(batch["teacher_rest"], rest, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "how", "temperature"),
    [("causal_lm", "reverse", 2.0), ("summariser", "mixed", 1.0), ("fid", "forward", 1.0)],
)
def test_with_every_token_loss_and_gradients_are_those_of_the_whole_divergence(
    name: str, how: str, temperature: float, folder: Path
) -> None:
    """Over two micro-batches of different lengths; in evaluation both terms stand apart."""
    block = {"top_k": 1000, "divergence": how, "weight": 0.3, "temperature": temperature}
    task = load(name, folder, block)
    rows = some_rows(task, 5)
    task.read_teacher({"train": rows}, batch=2)
    of_epoch = drawn(rows, 1)
    model, teacher = task.model().train(), task.task_of_teacher().model().eval()
    window = [task.collate(of_epoch[:2]), task.collate(of_epoch[2:])]
    total = sum(task.losses(model, window))
    total.backward()
    got = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    with torch.no_grad():
        of_teacher = logits_by_row(task, teacher, of_epoch)[:, :TOKENS]
    student = logits_by_row(task, model, of_epoch)
    labels = torch.cat([batch["labels"][batch["labels"] != -100] for batch in window])
    hard = torch.nn.functional.cross_entropy(student, labels, reduction="sum")
    soft = divergence(how, of_teacher / temperature, student / temperature).sum()
    (0.7 * hard + 0.3 * temperature**2 * soft).backward()
    want = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
    value = float(0.7 * hard.detach() + 0.3 * temperature**2 * soft.detach())
    assert float(total.detach()) == pytest.approx(value, rel=1e-6)
    assert_all_close(got, want, what="gradients", depth=400, margin=0.6, cancels=0.03)
    model.eval()
    with torch.no_grad():
        sums = [model(**batch) for batch in window]
    assert float(sum(one["loss"] for one in sums)) == pytest.approx(float(hard.detach()), rel=1e-6)
    assert float(sum(one["divergence"] for one in sums)) == pytest.approx(
        float(soft.detach()), rel=1e-5
    )


# The folder
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part holds three rows."""
    monkeypatch.setattr(likely_tokens, "MIN_SHARDS", 1000)
    monkeypatch.setattr(likely_tokens, "MIN_SHARD_ROWS", 3)


@pytest.mark.usefixtures("small_parts")
def test_the_teacher_reads_once_and_a_killed_reading_goes_on(folder: Path, tmp_path: Path) -> None:
    task = load("causal_lm", folder, {"store": str(tmp_path / "values")})
    rows = some_rows(task, 8)
    usual, read = task.likeliest, []

    def dying(model: Any, batch: Any) -> Any:
        read.append(len(batch["starts"]) - 1)
        if len(read) == 2:
            raise KeyboardInterrupt
        return usual(model, batch)

    task.likeliest = dying
    with pytest.raises(KeyboardInterrupt):
        task.read_teacher({"train": rows}, batch=4)
    task.read_teacher({"train": rows}, batch=4)
    assert read == [3, 3, 3, 2]  # the first part was whole
    again = load("causal_lm", folder, {"store": str(tmp_path / "values"), "weight": 0.9})
    again._teacher_model = lambda: pytest.fail("all is there")
    again.read_teacher({"train": rows}, batch=4)
    others = Rows(rows[::-1])  # in another order
    got, want = again.collate(drawn(others, 0)), task.collate(drawn(others, 0))
    assert torch.equal(got["teacher_logps"], want["teacher_logps"])


def test_a_folder_of_another_teacher_or_of_other_rows_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    block: dict[str, Any] = {"store": str(tmp_path / "values"), "top_k": 3}
    task = load("causal_lm", folder, block)
    rows = some_rows(task, 3)
    task.read_teacher({"train": rows}, batch=4)
    another = load("causal_lm", folder, {**block, "base": wider(LLAMA, hidden_size=16)})
    with refused("shards_of_others", ConfigError, differences=re.compile("teacher was 'random:.*")):
        another.read_teacher({"train": rows}, batch=4)
    warm = load("causal_lm", folder, {**block, "temperature": 2.0, "top_k": 4})
    how = {"differences": "top_k was 3, is 4; temperature was 1.0, is 2.0"}
    with refused("shards_of_others", ConfigError, flag="teacher.store", **how):
        warm.read_teacher({"train": rows}, batch=4)
    others = Rows(rows[:2])
    others.digest = "other rows"
    how = {"differences": re.compile("rows was 'these rows', is 'other rows'.*")}
    with refused("shards_of_others", ConfigError, flag="teacher.store", **how):
        task.read_teacher({"train": others}, batch=4)


def test_a_row_that_the_teacher_has_not_read_is_refused(folder: Path) -> None:
    task = load("causal_lm", folder, {"top_k": 2})
    rows = some_rows(task, 3)
    task.read_teacher({"train": Rows(rows[:2])}, batch=4)
    with refused("teacher_row_unread"):
        task.collate(drawn(rows, 0))


def test_a_damaged_part_is_named_when_its_row_is_read(folder: Path, tmp_path: Path) -> None:
    block = {"store": str(tmp_path / "values"), "top_k": 3}
    task = load("causal_lm", folder, block)
    rows = some_rows(task, 3)
    task.read_teacher({"train": rows}, batch=4)
    part = tmp_path / "values" / "train" / "teacher-00000.safetensors"
    content, name = part.read_bytes(), re.compile(r"\S*teacher-00000.safetensors")
    torn = bytearray(content)
    torn[8 + int.from_bytes(content[:8], "little") + 3 * 200] ^= 1  # behind the header: values
    part.write_bytes(torn)
    again = load("causal_lm", folder, block)
    again.read_teacher({"train": rows}, batch=4)
    with refused("start_part_torn", part=name):
        again.collate(drawn(rows, 0))
    part.write_bytes(content[:-1])
    with refused("start_part_torn", part=name):
        load("causal_lm", folder, block)._teacher_store().read(
            {"train": task._reading(rows, draws=False)}
        )


def test_a_disk_without_room_is_refused_before_the_teacher_reads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load("causal_lm", folder, {"store": str(tmp_path / "values")})
    rows = some_rows(task, 3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1024))
    task._teacher_model = lambda: pytest.fail("there is no room")
    with refused("teacher_disk", StorageError, free="1.0 KiB"):
        task.read_teacher({"train": rows}, batch=4)


def test_probabilities_that_are_not_finite_are_refused(folder: Path) -> None:
    task = load("causal_lm", folder, {"top_k": 2})
    usual = task.likeliest

    def broken(model: Any, batch: Any) -> Any:
        ids, logps, rest = usual(model, batch)
        return ids, logps * torch.nan, rest

    task.likeliest = broken
    with refused("teacher_not_finite"):
        task.read_teacher({"train": Rows(some_rows(task, 5)[2:])}, batch=4)


# The teacher
# --------------------------------------------------------------------------------------------------


def refusal_of(task: str, folder: Path, base: Any, **changes: Any) -> Any:
    return load(task, folder, {"base": base}, **changes).teacher_fingerprint()


def test_a_teacher_of_another_kind_or_of_fewer_tokens_is_refused(folder: Path) -> None:
    with refused("teacher_of_another_kind", family="t5"):
        refusal_of("causal_lm", folder, TINY_T5)
    with refused("teacher_of_another_kind", family="bert"):
        refusal_of("causal_lm", folder, TINY_BERT)
    with refused("teacher_too_small", largest=383, embeddings=300):
        refusal_of("causal_lm", folder, wider(LLAMA, vocab_size=300))
    with refused("teacher_positions", max_tokens=64, positions=32):
        refusal_of("causal_lm", folder, wider(LLAMA, max_position_embeddings=32))


def test_a_teacher_of_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    teacher = load("causal_lm", folder).task_of_teacher()
    base_source.config_of(teacher.cfg.base, teacher.places).save_pretrained(tmp_path / "teacher")
    assert refusal_of("causal_lm", folder, str(tmp_path / "teacher"))  # it brings no tokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.save_pretrained(tmp_path / "teacher")
    assert refusal_of("causal_lm", folder, str(tmp_path / "teacher"))
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path / "teacher")
    fields = {"count": 1, "tokens": 385, "token": "<extra>", "got": 384, "want": None}
    with refused("teacher_tokenizer", **fields):
        refusal_of("causal_lm", folder, str(tmp_path / "teacher"))


def test_a_teacher_whose_files_lack_a_weight_is_refused(folder: Path, tmp_path: Path) -> None:
    """It would be drawn at random, as the output layer of an encoder is: a student trains such a
    weight, a teacher does not.
    """
    whole = load("causal_lm", folder)
    whole.export(dict(whole.model().named_parameters()), tmp_path / "teacher")
    path = tmp_path / "teacher" / "model.safetensors"
    weights = load_file(path)
    del weights["lm_head.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    task = load("causal_lm", folder, {"base": str(tmp_path / "teacher")})
    with refused("base_lacks_weights", source=str(tmp_path / "teacher"), names="lm_head.weight"):
        task.read_teacher({"train": some_rows(task, 2)}, batch=2)


def test_keys_that_do_not_go_with_a_teacher_are_refused(folder: Path) -> None:
    with refused("teacher_stream"):
        load("causal_lm", folder, data={"stream": True})
    with refused("teacher_terms", terms="train.z_loss"):
        load("causal_lm", folder, {"weight": 1.0}, train={"z_loss": 0.1})


def test_a_trained_student_needs_no_teacher(folder: Path, tmp_path: Path) -> None:
    """Neither to be read again nor to be evaluated."""
    task = load("causal_lm", folder)
    task.export(dict(task.model().named_parameters()), tmp_path / "student")
    values = task.cfg.model_dump(mode="json", exclude_unset=True)
    values["teacher"]["base"] = str(tmp_path / "nowhere")
    again = tasks.load(tasks.parse(values), task.places)
    model = again.load_export(tmp_path / "student").eval()
    scores = again.scores(model, again.collate(some_rows(task, 2)))
    assert list(scores) == ["loss"]
    with pytest.raises(ConfigError):
        again.teacher_fingerprint()


def test_the_rows_of_a_mix_are_read_whatever_their_source(folder: Path) -> None:
    mix = {"train.jsonl": 0.5, "train.jsonl[:9]": 0.5}
    task = load("causal_lm", folder, {"top_k": 2}, data={"mix": mix})
    store = store_of(task, "train", folder / "cache")
    task.read_teacher({"train": store}, batch=16)
    rows = [store[0], store[len(store) - 1]]  # of both sources
    batch = task.collate(drawn(rows, 0))
    assert len(batch["teacher_ids"]) == len(batch["scored"])
    assert batch["teacher_logps"].isfinite().all()


def test_a_reader_with_few_cross_attention_learns_from_a_whole_one(folder: Path) -> None:
    few = {"cross_attention_every": 3, "cross_attention_multi_query": True}
    task = load("fid", folder, {"top_k": 2}, reader=few)
    rows = some_rows(task, 2)
    task.read_teacher({"train": rows}, batch=2)
    reader = task.task_of_teacher().cfg.reader
    assert (reader.cross_attention_every, reader.cross_attention_multi_query) == (1, False)
    (loss,) = task.losses(task.model().train(), [task.collate(drawn(rows, 0))])
    assert math.isfinite(float(loss.detach()))


@pytest.mark.long
def test_adapters_teach_as_the_model_that_they_make(folder: Path, tmp_path: Path) -> None:
    base = load("causal_lm", folder)
    saved = tmp_path / "base"
    base.export(dict(base.model().named_parameters()), saved)
    values = base.cfg.model_dump(mode="json", exclude_unset=True)
    values = {**values, "base": str(saved), "lora": {"r": 2}, "teacher": None}
    tuned = tasks.load(tasks.parse(values), base.places)
    model = tuned.model()
    torch.manual_seed(2)
    weights = {n: w.detach() + 0.1 * torch.randn_like(w) for n, w in model.named_parameters()}
    weights = {name: weight for name, weight in weights.items() if "lora_" in name}
    tuned.export(weights, tmp_path / "adapters")
    record = {"experiment": values}
    (tmp_path / "adapters" / "lathe.json").write_text(json.dumps(record))
    task = load("causal_lm", folder, {"base": str(tmp_path / "adapters"), "top_k": 3})
    rows = some_rows(task, 3)
    task.read_teacher({"train": rows}, batch=4)
    batch = task.collate(drawn(rows, 0))
    with torch.no_grad():
        logits = logits_by_row(tuned, tuned.load_export(tmp_path / "adapters").eval(), rows)
    want = logits.log_softmax(-1).gather(1, batch["teacher_ids"].long())
    torch.testing.assert_close(batch["teacher_logps"], want, rtol=0, atol=1e-4)


@pytest.mark.long
def test_the_plan_has_a_column_of_the_teachers_pass(folder: Path) -> None:
    """Before the student is in memory each rank holds the whole teacher, and nothing that trains."""
    task = load("causal_lm", folder, {"base": wider(LLAMA, hidden_size=256)})
    values = task.cfg.model_dump(mode="json", exclude_unset=True)
    ds = deepspeed_config.build(
        deepspeed_config.read("zero2"),
        train=task.cfg.train,
        optim=task.cfg.optim,
        world=1,
        source="zero2",
    )
    subject = subject_of(
        values,
        ds=ds,
        sharding=Sharding(8, 2, world=1, rank=0),
        places=task.places,
        store_of=lambda of, split: store_of(of, split, folder / "cache"),
        answers=False,
    )
    plan = make(subject, cublas=0).plan
    phases = {phase.name: phase.peak for phase in plan.phases}
    assert list(phases) == ["training step", "evaluation", "teacher's pass"]
    of_teacher = phases["teacher's pass"]
    weights = sum(weight.numel() for weight in task.task_of_teacher().skeleton().parameters())
    assert of_teacher.weights == 4 * weights
    assert (of_teacher.gradients, of_teacher.optimizer) == (0, 0)
    assert of_teacher.activations > 0
    assert plan.peak.name == "teacher's pass", "the teacher is larger than all of the training"
    assert "in the teacher's pass" in plan_text.summary(plan, None)
