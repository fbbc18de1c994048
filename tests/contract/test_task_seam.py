"""What generic code asks of a task by name: its limits, a made-up row, and what a batch says. For
every task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tests.facts import experiment, write_facts
from tests.wording import refused
from trainer import tasks
from trainer.config import deepspeed_config
from trainer.data.order import Sharding
from trainer.data.token_store import store_of
from trainer.plan.memory import advice, plan
from trainer.plan.memory.measure import (
    Measured,
    MeasureRequest,
    Moment,
    measure,
    measuring,
    with_value,
)
from trainer.plan.memory.planned_rows import binding_limit
from trainer.plan.memory.subject import Subject, subject_of
from trainer.protocol.abilities import Answers, ShowsCuts, question_of
from trainer.protocol.task import Encoded, Places, Task

TASKS = tasks.names()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def load(values: dict[str, Any], folder: Path) -> Task:
    return tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder / "runs"))


def encoded(task: Task, split: str) -> list[Encoded]:
    return [task.encode(row) for row in task.rows(split)]


@pytest.mark.parametrize("name", TASKS)
def test_limits_are_keys_of_the_dictionary_with_their_values(name: str, folder: Path) -> None:
    task = load(experiment(name, folder), folder)
    cfg = task.cfg.model_dump()
    assert task.limits()
    for key, limit in task.limits().items():
        assert reduce(lambda block, part: block[part], key.split("."), cfg) == limit


@pytest.mark.parametrize("name", TASKS)
def test_a_made_up_row_is_as_long_as_any_and_shorter_under_a_lower_limit(
    name: str, folder: Path
) -> None:
    values = experiment(name, folder)
    task = load(values, folder)
    specimen = task.encode(task.specimen())
    assert isinstance(specimen, Encoded)
    assert task.length(specimen) >= max(task.length(row) for row in encoded(task, "train"))
    assert specimen.keys() >= encoded(task, "train")[0].keys() - {"other", "other_lengths"}
    key, limit = binding_limit(task) or ("", 0)
    lower = load(with_value(values, key, limit // 2), folder)
    assert lower.length(lower.encode(lower.specimen())) < task.length(specimen)


@pytest.mark.parametrize("name", TASKS)
def test_a_described_batch_says_what_was_read(name: str, folder: Path) -> None:
    task = load(experiment(name, folder), folder)
    batch = task.collate(encoded(task, "valid")[:3])
    texts = task.describe(batch)
    assert any("keep" in task.decode(text.ids.flatten().tolist()) for text in texts.values())
    for text in texts.values():
        assert all(
            mask is None or mask.shape == text.ids.shape for mask in (text.is_real, text.in_loss)
        )
    if task.unit == "tokens":
        in_loss = [text.in_loss for text in texts.values() if text.in_loss is not None]
        assert sum(int(mask.sum()) for mask in in_loss) >= int(task.units(batch)) > 0


@pytest.mark.parametrize("name", TASKS)
def test_the_ledger_sees_a_cut_wherever_encoding_says_so(name: str, folder: Path) -> None:
    values = experiment(name, folder)
    for key in load(values, folder).limits():
        values = with_value(values, key, 12)
    task = load(values, folder)
    if not isinstance(task, ShowsCuts):
        pytest.skip("an optional ability")
    for row in list(task.rows("train"))[:8]:
        uncut = task.uncut_fields(row).values()
        longest = [
            max(map(len, text.texts), default=0) - text.limit
            for text in uncut
            if text.limit is not None
        ]
        if max(longest, default=0) > 0:
            assert task.encode(row).is_truncated


def planned_without_data(name: str, folder: Path, cache: Path) -> Subject:
    values = experiment(name, folder)
    cfg = tasks.parse(values)
    ds = deepspeed_config.build(
        deepspeed_config.read("zero2"), train=cfg.train, optim=cfg.optim, world=1, source="zero2"
    )
    return subject_of(
        values,
        ds=ds,
        sharding=Sharding(cfg.train.global_batch, cfg.train.micro_batch, 1, 0),
        places=Places(None, cache, cache),
        store_of=lambda task, split: store_of(task, split, cache),
        answers=True,
    )


def test_every_task_is_planned_for_without_data(folder: Path, tmp_path: Path) -> None:
    requests: list[MeasureRequest] = []
    for name in TASKS:
        subject = planned_without_data(name, folder, tmp_path)
        assert "every row is taken to fill its limits" in subject.notes[-1], name
        rows = subject.train.encoded_rows([0, 1], is_drawn=True)
        requests += [
            MeasureRequest(subject.values, "train", rows),
            MeasureRequest(subject.values, "evaluate", rows),
        ]
        if isinstance(subject.task, Answers):
            raw = [question_of(subject.task, row) for row in subject.valid.raw([0, 1])]
            rows = subject.valid.encoded_rows([0, 1], is_drawn=False)
            requests += [
                MeasureRequest(subject.values, "answer", rows, raw, answer_tokens=tokens)
                for tokens in (4, 8)
            ]
    places = Places(None, tmp_path, tmp_path)
    with measuring():  # one process, and a new one behind one that died
        with refused("measuring_ended", exit_code=1):
            measure([replace(requests[0], experiment={"task": "none"})], places)
        steps = measure(requests, places)
        (again,) = measure(requests[:1], places)
    assert replace(again, seconds=steps[0].seconds) == steps[0]
    peaks = [(request, step.peak.total) for request, step in zip(requests, steps, strict=True)]
    assert all(total > 0 for _, total in peaks)
    answers = [total for request, total in peaks if request.kind == "answer"]
    pairs = list(zip(answers[::2], answers[1::2], strict=True))
    assert all(few <= more for few, more in pairs)


def measured_by_rows(requests: Sequence[MeasureRequest], places: Places) -> list[Measured]:
    """In place of measuring, which costs a process: a thousand bytes a row."""
    weights = Measured(
        weights=0,
        buffers=0,
        trainable=0,
        frozen=0,
        largest=0,
        states=0,
        moments=[],
        scratch=0,
        shapes={},
        tensors=[],
        seconds=0.0,
    )
    return [
        replace(weights, moments=[Moment(0, 1000 * len(request.rows), 0)]) for request in requests
    ]


def test_advice_names_each_other_value_that_was_measured_whatever_its_block_is_called(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (plan, advice):
        monkeypatch.setattr(module, "measure", measured_by_rows)
    subject = planned_without_data("causal_lm", folder, tmp_path)
    made = plan.make(subject, cublas=0)
    fewer_rows = subject.training_request(made.numbers[:1])  # as another value might
    monkeypatch.setattr(
        advice, "_other_attention", lambda subject, made: [("some.attention a -> b", fewer_rows)]
    )
    fixes = advice.advise(subject, made, None, cublas=0).fixes
    assert "some.attention a -> b" in [fix.what for fix in fixes]
