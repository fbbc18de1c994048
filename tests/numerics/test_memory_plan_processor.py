"""The memory plan of a processor against the bytes that a real step of its run takes at most."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bases import wider
from tests.facts import write_facts
from tests.families import LIMITS, experiment_on
from tests.long import cases_long_but
from tests.numerics.test_recomputation import options
from tests.ranks import run_alone
from trainer.commands.plan import subject_for
from trainer.devices import Device
from trainer.plan.memory import fake_step
from trainer.plan.memory.advice import Room
from trainer.plan.memory.measure import measuring
from trainer.plan.memory.planned_rows import training_batches

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
from memory_plan import live_bytes, recorded

TOLERANCE = 0.01
STEPS = [
    ("summariser", "t5"),
    ("cross_attention", "qwen3"),
    ("retriever", "bert"),
    ("causal_lm", "llama"),
]


def _planned_and_real(task: str, name: str, folder: Path) -> tuple[int, int, int]:
    """Bytes planned with a processor's kernels and, behind that, with a GPU's; those of a step."""
    train = {"steps": 1, "global_batch": 2, "micro_batch": 2}
    values: Any = experiment_on(task, name, folder, data=LIMITS[task], train=train)
    values["base"]["config"] = wider(values["base"]["config"])
    of_gpu = subject_for(values, replace(options(folder), data_path=None), 1)  # rows fill limits
    planned: list[int] = []
    with measuring(fake_step.answer_all):
        for subject in (of_gpu.of_processor(), of_gpu):
            step = Room(subject, Device("any", 2**40, 0)).step(False)[1]
            planned.append(step.weights + step.buffers + step.peak.total)
    (heaviest,) = training_batches(of_gpu)
    rows = of_gpu.training_request(heaviest.numbers).rows
    return planned[0], planned[1], _real(of_gpu.task, rows)


def _real(task: Any, rows: list[dict[str, list[int]]]) -> int:
    """The most that a micro-batch of these rows has at once."""
    model = task.model().train()
    resident = {one.data_ptr(): one.nbytes for one in [*model.parameters(), *model.buffers()]}
    whole = task.collate([{key: np.asarray(ids) for key, ids in row.items()} for row in rows])
    with recorded() as profiler:
        batch = {key: tensor.clone() for key, tensor in whole.items()}
        (loss,) = task.losses(model, [batch])
        loss.backward()
    return max(live for _, live in live_bytes(profiler, resident))


@pytest.mark.parametrize(("task", "name"), cases_long_but(STEPS[:1], STEPS))
def test_a_processor_is_planned_with_the_bytes_that_its_step_takes(
    task: str, name: str, tmp_path: Path
) -> None:
    planned, of_gpu, real = run_alone(_planned_and_real, task, name, write_facts(tmp_path))
    assert planned == pytest.approx(real, rel=TOLERANCE)
    assert of_gpu != pytest.approx(real, rel=TOLERANCE)
