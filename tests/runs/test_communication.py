"""What ranks send each other: gradients of trained weights, and never one of a frozen weight."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.counted_collectives import install, sent
from tests.facts import experiment, write_facts
from tests.forked import TRAINVAL, run_ranks

_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_MICRO_BATCHES, _SMALL = 4, 512  # bytes of counts and norms


def step_of(task: str, stage: int, world: int, folder: Path) -> tuple[Counter[str], int]:
    """Bytes of the third step of a run in bf16, and how many weights it trains."""
    facts = write_facts(folder / "facts")
    train = {"steps": 4, "precision": "bf16", "micro_batch": 1, "log_every": 4}
    values = experiment(task, facts, train={**train, "eval_every": 4, "save_every": 4})
    values["deepspeed"] = f"zero{stage}"
    (folder / "groups.py").write_text(f"EXP_GROUPS = {{'one': [{values!r}]}}\n")
    how = ["-e", "one", "--exp_configs", str(folder / "groups.py"), "-sb", str(folder / "out")]
    how += ["--data_path", str(facts), "--cache_dir", str(folder / "cache")]
    ranks = run_ranks(world, *TRAINVAL, *how, first=functools.partial(install, folder))
    assert [rank.returncode for rank in ranks] == [0] * world, ranks[0].stderr[-2000:]
    weights = 0
    for file in (folder / "out").glob("*/final/*.safetensors"):
        with safe_open(file, "pt") as tensors:
            weights += sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118
    return sent(folder, 2), weights


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_weights_are_never_reduced(stage: int, tmp_path: Path) -> None:
    """A micro-batch reduces two bytes a trained weight, and nothing of the frozen base."""
    found, weights = step_of("cross_attention", stage, 2, tmp_path)
    reduced = sum(found[name] for name in _REDUCING)
    assert weights > 0
    assert 0 <= reduced - _MICRO_BATCHES * 2 * weights < _SMALL, (found, weights)
