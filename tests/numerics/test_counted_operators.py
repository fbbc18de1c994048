"""The operators that a plan counts for a step against those that the step really runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.facts import experiment, write_facts
from tests.ranks import run_alone
from trainer import tasks
from trainer.plan.memory import fake_step
from trainer.plan.memory.measure import MeasureRequest
from trainer.plan.memory.planned_rows import Specimens
from trainer.plan.time.calibration import operators_of
from trainer.protocol.task import Places


@pytest.mark.parametrize("task_name", ["retriever", "causal_lm"])
def test_a_step_of_several_micro_batches_is_counted_once(task_name: str, tmp_path: Path) -> None:
    planned, ran = run_alone(_planned_and_ran, task_name, write_facts(tmp_path), 4)
    assert planned == ran


def _planned_and_ran(task_name: str, folder: Path, count: int) -> tuple[Any, Any]:
    """Products with weights in a step of `count` micro-batches: [(sides, how often)]."""
    values: Any = experiment(task_name, folder)
    places = Places(folder, folder / "cache", folder)
    task = tasks.load(tasks.parse(values), places)
    rows = Specimens(task).encoded_rows([0, 0], is_drawn=True)
    request = MeasureRequest(values, "train", rows, accumulates=True, device="cpu")
    step = fake_step._measure(request, places)
    planned: Counter[Any] = Counter()
    for operators, times in (
        (step.operators, count - 1),
        (step.operators_of_last or step.operators, 1),
    ):
        planned.update(_products(operators, times))
    arrays = [{name: np.asarray(ids) for name, ids in row.items()} for row in rows]
    window = [task.collate(arrays)] * count
    model = task.model().train()

    def run() -> None:
        for loss in task.losses(model, window):
            loss.backward()

    ran = Counter(_products([[*one, 1] for one in operators_of(run)], 1))
    return _of_weights(planned), _of_weights(ran)


def _threads() -> int:
    torch.set_num_threads(2)
    fake_step.answer_all(StringIO(), StringIO())
    return torch.get_num_threads()


def test_whoever_answers_has_one_thread_before_a_backward_pass_starts_its_own() -> None:
    """Else a fork ended, once, by `Invalid thread pool!` (torch 2.11)."""
    assert run_alone(_threads) == 1


def _products(operators: Iterable[Any], times: int) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for name, _, _, sides, _, runs in operators:
        if name in ("mm", "addmm"):
            found[tuple(sides)] += runs * times
    return found


def _of_weights(products: Counter[Any]) -> list[Any]:
    """Without those of a pool's vectors, whose sides grow with the pool."""
    return sorted((sides, runs) for sides, runs in products.items() if runs > 3)
