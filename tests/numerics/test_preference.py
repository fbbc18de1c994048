"""Losses of preferences are those of their papers, written out in plain torch; and of the start's
store: what it holds, and which rows and bases it refuses.
"""

from __future__ import annotations

import json
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.bases import base_of
from tests.facts import TINY_T5, experiment, write_facts
from tests.wording import refused
from trainer import tasks
from trainer.errors import ConfigError
from trainer.models import losses as base_losses
from trainer.protocol.task import Places
from trainer.tasks.preference import start_store

BLOCKS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3},
    "smoothed": {"label_smoothing": 0.2},
    "normalised": {"length_normalised": True, "beta": 2.0},
    "ipo": {"loss": "ipo", "beta": 0.2},
    "simpo": {"loss": "simpo", "gamma": 0.7},
    "orpo": {"loss": "orpo", "beta": 0.4},
    "kto": {"loss": "kto", "desirable": 1.5, "undesirable": 0.5},
    "reward": {"loss": "reward", "margin": True, "centre": 0.1},
}

# Encoder-decoders, the last two of which read padded rows.
T5: dict[str, Any] = {
    "t5": TINY_T5,
    "umt5": base_of("summariser", "umt5", vocab_size=384),
    "longt5": base_of("summariser", "longt5", vocab_size=384),
    "t5gemma": base_of("summariser", "t5gemma", vocab_size=384),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The facts, each row with a margin."""
    folder = write_facts(tmp_path_factory.mktemp("facts"))
    for name in ("train", "valid"):
        path = folder / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for number, row in enumerate(rows):
            row["margin"] = number / 8
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def load(folder: Path, block: dict[str, Any], **changes: Any) -> Any:
    values = experiment("preference", folder, preference=block, **changes)
    places = Places(folder, folder / "cache", folder / "runs")
    return tasks.load(tasks.parse(values), places)


class Rows(list):
    """Encoded rows in place of a token store."""

    digest = "these rows"

    @property
    def lengths(self) -> np.ndarray:
        return np.array([sum(len(row[name]) for name in row) for row in self])


def other_start(task: Any) -> Any:
    """A model whose weights are others than those of the task's own."""
    torch.manual_seed(3)
    model = task.model().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return model


def logps(model: Any, rows: list[Any], name: str, *, whole: bool = False) -> list[Tensor]:
    """By row the log-probabilities of the answer's tokens, each row read by itself, without
    padding; whole: of all tokens but the first. An encoder-decoder reads the prompt again for each
    answer.
    """
    by_row: list[Tensor] = []
    for row in rows:
        ids = torch.tensor(row[name])
        if "prompt" in row:
            source = torch.tensor(row["prompt"])[None]
            logits = model.base(input_ids=source, labels=ids[None]).logits[0].float()
            by_row.append(logits.log_softmax(-1)[torch.arange(len(ids)), ids])
            continue
        logits = model.base(ids[None]).logits[0, :-1].float()
        every = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        scored = torch.tensor(row[f"{name}_scored"][1:], dtype=torch.bool)
        by_row.append(every if whole else every[scored])
    return by_row


def as_written(task: Any, model: Any, start: Any, rows: list[Any], block: dict[str, Any]) -> Tensor:
    """The mean loss of some rows, from the formulas of the papers."""
    loss, beta = block.get("loss", "dpo"), block.get("beta", 2.0 if "gamma" in block else 0.1)
    if loss == "reward":
        score = [
            [model.head(model.base(torch.tensor(row[name])[None])[0][0, -1])[0] for row in rows]
            for name in ("chosen", "rejected")
        ]
        margins = np.array([row["margin"][0] for row in rows], np.int32).view(np.float32)
        each = [
            -torch.log(torch.sigmoid(c - r - float(m))) + block["centre"] * (c + r) ** 2
            for c, r, m in zip(*score, margins, strict=True)
        ]
        return torch.stack(each).mean()
    names = ("answer", "other") if loss == "kto" else ("chosen", "rejected")
    own = {name: logps(model, rows, name) for name in names}
    with torch.no_grad():
        before = {name: logps(start, rows, name) for name in names}
    mean = {name: torch.stack([one.mean() for one in own[name]]) for name in names}
    pairs = {name: zip(own[name], before[name], strict=True) for name in names}
    ratio = {name: [a.sum() - b.sum() for a, b in pairs[name]] for name in names}
    if loss == "kto":
        kl = max(0.0, float(torch.stack(ratio["other"]).mean()))
        each = []
        for one, row in zip(ratio["answer"], rows, strict=True):
            desired = row["is_desired"][0]
            value = torch.sigmoid(beta * (one - kl if desired else kl - one))
            each.append(block["desirable" if desired else "undesirable"] * (1 - value))
        return torch.stack(each).mean()
    if loss == "orpo":
        chosen = logps(model, rows, "chosen", whole=True)
        p, q = mean["chosen"].exp(), mean["rejected"].exp()
        odds = torch.log((p / (1 - p)) / (q / (1 - q)))
        return -torch.cat(chosen).mean() - beta * F.logsigmoid(odds).mean()
    if loss == "simpo":
        gap = beta * (mean["chosen"] - mean["rejected"]) - block["gamma"]
        return -F.logsigmoid(gap).mean()
    is_mean = loss == "ipo" or block.get("length_normalised")
    tokens = {name: torch.tensor([len(one) for one in own[name]]) for name in names}
    by = {name: torch.stack(ratio[name]) / (tokens[name] if is_mean else 1) for name in names}
    gap = by["chosen"] - by["rejected"]
    if loss == "ipo":
        return ((gap - 1 / (2 * beta)) ** 2).mean()
    epsilon = block.get("label_smoothing", 0.0)
    good, bad = F.logsigmoid(beta * gap), F.logsigmoid(-beta * gap)
    return (-(1 - epsilon) * good - epsilon * bad).mean()


CASES = [
    *(("decoder", name) for name in BLOCKS),
    *(("t5", name) for name in BLOCKS),
    ("umt5", "dpo"),
    *((base, name) for base in ("longt5", "t5gemma") for name in ("dpo", "orpo", "kto")),
]


@pytest.mark.parametrize(("base", "name"), CASES)
def test_a_loss_and_its_gradients_are_those_of_its_formula(
    base: str, name: str, folder: Path
) -> None:
    """Over two micro-batches of different lengths."""
    block = BLOCKS[name]
    task = load(folder, block, **({"base": T5[base]} if base in T5 else {}))
    rows = task.encode_rows(list(task.rows("train"))[:5])
    assert ("prompt" in rows[0]) == (base in T5 and name != "reward")
    start, model = other_start(task), task.model().train()
    of_store = Rows(rows)
    of_store.digest = f"{base} {name}"
    task.read_start(lambda: start, {"train": of_store}, batch=2)
    window = [task.collate(rows[:2]), task.collate(rows[2:])]
    for loss in task.losses(model, window):
        (loss / 5).backward()
    got = {key: weight.grad for key, weight in model.named_parameters()}
    value = sum(float(loss.detach()) for loss in task.losses(model, window)) / 5
    model.zero_grad()
    want = as_written(task, model, start, rows, block)
    want.backward()
    assert value == pytest.approx(float(want.detach()), rel=2e-6)
    for key, weight in model.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(got[key], weight.grad, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_chunks_change_no_loss_and_no_gradient(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load(folder, BLOCKS[name])
    rows = task.encode_rows(list(task.rows("train"))[:4])
    gradients: list[dict[str, Tensor]] = []
    for positions in (10_000, 7):
        monkeypatch.setattr(base_losses, "CHUNK_BYTES", 0)
        monkeypatch.setattr(base_losses, "CHUNK_POSITIONS", positions)
        model = task.model().train()
        for loss in task.losses(model, [task.collate(rows)]):
            loss.backward()
        gradients.append({k: w.grad for k, w in model.named_parameters() if w.grad is not None})
    for key, one in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], one, rtol=1e-5, atol=1e-6, msg=key)


# What the start says
# --------------------------------------------------------------------------------------------------


def test_the_start_is_read_once_and_a_killed_reading_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_store, "SHARD_ROWS", 3)
    task = load(folder, {"reference": str(tmp_path / "start")})
    rows = Rows(task.encode_rows(list(task.rows("train"))[:8]))
    model, calls = task.model().eval(), []
    usual = task._log_probabilities

    def dying(of_model: Any, some: Any) -> Any:
        calls.append(len(some))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return usual(of_model, some)

    task._log_probabilities = dying
    with pytest.raises(KeyboardInterrupt):
        task.read_start(lambda: model, {"train": rows}, batch=4)
    task.read_start(lambda: model, {"train": rows}, batch=4)
    assert calls == [3, 3, 3, 2]  # the first part was whole
    task.read_start(lambda: pytest.fail("all is there"), {"train": rows}, batch=4)
    batch = task.collate(rows[:4])
    torch.testing.assert_close(batch["start"], model(**_read(batch))["logps"].detach())
    (loss,) = task.losses(model, [batch])
    assert float(loss.detach()) == pytest.approx(4 * math.log(2), rel=1e-5)


def _read(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    beside = ("start", "margin", "is_desired", "answer_tokens")
    return {name: tensor for name, tensor in batch.items() if name not in beside}


def test_a_store_of_another_base_or_of_other_rows_is_refused(folder: Path, tmp_path: Path) -> None:
    block = {"reference": str(tmp_path / "start")}
    task = load(folder, block)
    rows = Rows(task.encode_rows(list(task.rows("train"))[:3]))
    task.read_start(lambda: task.model().eval(), {"train": rows}, batch=4)
    base = experiment("preference", folder)["base"]
    another = load(folder, block, base={**base, "seed": 7})  # type: ignore[dict-item]
    with refused("shards_of_others", ConfigError, differences=re.compile("base was 'random:.*")):
        another.read_start(lambda: another.model().eval(), {"train": rows}, batch=4)
    others = Rows(rows[:2])
    others.digest = "other rows"
    how = {"differences": re.compile("rows was 'these rows', is 'other rows'.*")}
    with refused("shards_of_others", ConfigError, flag="preference.reference", **how):
        task.read_start(lambda: task.model().eval(), {"train": others}, batch=4)


def test_of_runs_that_begin_together_one_reads_the_rows(folder: Path, tmp_path: Path) -> None:
    """As the trials of a sweep do."""
    tasks_of = [load(folder, {"reference": str(tmp_path / "start")}) for _ in range(2)]
    rows = Rows(tasks_of[0].encode_rows(list(tasks_of[0].rows("train"))[:3]))
    is_reading, may_read = threading.Event(), threading.Event()

    def slow() -> Any:
        is_reading.set()
        assert may_read.wait(60)
        return tasks_of[0].model().eval()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(tasks_of[0].read_start, slow, {"train": rows}, batch=4)
        assert is_reading.wait(60)
        unread = partial(pytest.fail, "the other one reads")
        second = pool.submit(tasks_of[1].read_start, unread, {"train": rows}, batch=4)
        wait([second], timeout=0.3)
        may_read.set()
        first.result()
        second.result()
    assert tasks_of[1].collate(rows)["start"].equal(tasks_of[0].collate(rows)["start"])


def test_a_whole_store_is_only_read(folder: Path, tmp_path: Path) -> None:
    """As where it lies on a disk that takes no writes."""
    task = load(folder, {"reference": str(tmp_path / "start")})
    rows = Rows(task.encode_rows(list(task.rows("train"))[:3]))
    task.read_start(lambda: task.model().eval(), {"train": rows}, batch=4)
    files = {path: path.stat() for path in (tmp_path / "start").rglob("*")}
    task.read_start(lambda: pytest.fail("all is there"), {"train": rows}, batch=4)
    assert {path: path.stat().st_ino for path in files} == {p: s.st_ino for p, s in files.items()}


def test_a_row_that_the_start_has_not_read_is_refused(folder: Path, tmp_path: Path) -> None:
    task = load(folder, {"reference": str(tmp_path / "start")})
    rows = Rows(task.encode_rows(list(task.rows("train"))[:3]))
    task.read_start(lambda: task.model().eval(), {"train": Rows(rows[:2])}, batch=4)
    with refused("start_row_unread"):
        task.collate(rows)


def test_an_export_without_its_start_is_scored_by_nobody(folder: Path, tmp_path: Path) -> None:
    task = load(folder, {})
    model = task.model().eval()
    task.export(dict(model.named_parameters()), tmp_path)
    again = task.load_export(tmp_path).eval()
    batch = task.collate(task.encode_rows(list(task.rows("train"))[:2]))
    with refused("start_unread"):
        task.scores(again, batch)


def test_a_damaged_part_is_named(folder: Path, tmp_path: Path) -> None:
    task = load(folder, {"reference": str(tmp_path / "start")})
    rows = Rows(task.encode_rows(list(task.rows("train"))[:3]))
    task.read_start(lambda: task.model().eval(), {"train": rows}, batch=4)
    part = tmp_path / "start" / "train" / "start-00000.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    with refused("start_part_torn", part=re.compile(r"\S*start-00000.safetensors")):
        task.read_start(lambda: task.model().eval(), {"train": rows}, batch=4)
