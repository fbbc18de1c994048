"""The same promises on a CUDA device. Run by hand where there is one: nothing here runs on a CPU
machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import golden_files
from tests.contract.runs import untimed
from tests.facts import experiment, write_facts
from tests.ranks import run_alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device; none is visible here"
    ),
]


def train(values: dict[str, Any], folder: Path, savedir: Path, stage: int) -> list[dict[str, Any]]:
    return run_alone(_train, values, folder, savedir, stage)


def _train(values: dict[str, Any], folder: Path, savedir: Path, stage: int) -> list[dict[str, Any]]:
    from trainer.launch.run import run
    from trainer.runtime import distributed
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    distributed.init()
    options = Options(
        savedir, data_path=folder, cache_dir=folder / "cache", deepspeed=f"zero{stage}"
    )
    planned = plan(values, options, world=1, rank=0)
    assert run(planned, options, Preemption()) == 0
    return untimed(planned.folder / "metrics.jsonl")


@pytest.mark.parametrize("task", ["causal_lm", "cross_attention"])
@pytest.mark.parametrize(
    ("precision", "stage"), [("fp32", 0), ("fp32", 3), ("bf16", 0), ("bf16", 2), ("fp16", 2)]
)
def test_golden_losses_hold_on_cuda(task: str, precision: str, stage: int, tmp_path: Path) -> None:
    folder = write_facts(tmp_path / "facts")
    values = experiment(task, folder, train={"steps": 10, "precision": precision})
    found = [
        line["loss"] for line in train(values, folder, tmp_path / "out", stage) if "loss" in line
    ]
    golden = golden_files.read(task)["losses"]
    assert found == pytest.approx(golden, rel=1e-4 if precision == "fp32" else 3e-2)


def test_peak_memory_is_reported_from_the_allocator(tmp_path: Path) -> None:
    folder = write_facts(tmp_path / "facts")
    train(experiment("causal_lm", folder), folder, tmp_path / "out", 2)
    (path,) = (tmp_path / "out").glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(0 < line["peak_gib"] < 2 for line in lines if "loss" in line)
