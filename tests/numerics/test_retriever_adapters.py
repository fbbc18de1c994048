"""Adapters in a frozen decoder: the same losses at every ZeRO stage and on two ranks; only they
train and are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.runs import from_folder, losses, train
from tests.facts import experiment, write_facts
from tests.ranks import run_on_ranks
from tests.tolerance import assert_close, depth_of
from tests.unit.test_retriever_task import DECODER
from trainer import tasks
from trainer.protocol.task import Places

pytest.importorskip("peft", reason="the optional package peft is not installed")

STEPS = 4
LOSSES = {"what": "losses", "margin": 0.5}  # as tests/tolerance.py means it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def _runs(
    values: dict[str, Any], folder: Path, savedir: Path, stages: tuple[int, ...]
) -> dict[int, list[Any]]:
    return {stage: train(values, folder, savedir / f"zero{stage}", stage)[1] for stage in stages}


@pytest.mark.long
def test_adapters_train_alike_at_every_stage_and_are_exported(folder: Path, tmp_path: Path) -> None:
    values = experiment(
        "retriever", folder, **DECODER, lora={"r": 4, "dropout": 0.0}, train={"steps": STEPS}
    )
    values = from_folder(values, tmp_path / "bases")
    (wanted,) = run_on_ranks(1, _runs, values, folder, tmp_path / "one", (0,))
    found = run_on_ranks(2, _runs, values, folder, tmp_path / "two", (0, 2, 3))[0]
    first = losses(wanted[0])
    assert first[2] != first[1], "something trains"
    task: Any = tasks.load(tasks.parse(values), Places(folder, folder / "cache", tmp_path))
    depth = STEPS * 2 * depth_of(task.model())  # there and back at every step
    for stage, lines in found.items():
        assert_close(losses(lines), first, of=f"ZeRO {stage}", depth=depth, **LOSSES)
    for final in tmp_path.glob("*/zero*/*/final"):
        names = {path.name for path in final.iterdir()}
        assert {
            "adapter_config.json",
            "adapter_model.safetensors",
            "retriever_config.json",
            "pooler.pt",
        } <= names
        assert "model.safetensors" not in names, "the base is named, not copied"
