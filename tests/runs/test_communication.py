"""What ranks send each other: gradients of trained weights, and never one of a frozen weight."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.contract.runs import untimed
from tests.counted_collectives import install, sent
from tests.facts import experiment, write_facts
from tests.forked import TRAINVAL, run_ranks
from trainer import tasks
from trainer.config.deepspeed_config import read
from trainer.protocol.task import Places

_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_MICRO_BATCHES, _SMALL = 4, 512  # bytes of counts and norms
# else weights as small as these stay whole on every rank
_GATHERS_ALL = {"stage3_param_persistence_threshold": 0}


def step_of(
    task: str, stage: int, world: int, folder: Path, frozen: str = "shard", **zero: int
) -> tuple[Counter[str], int]:
    """Bytes of the third step of a run in bf16, and how many weights it trains.

    zero: keys of the DeepSpeed file's zero_optimization that are to be others.
    """
    facts = write_facts(folder / "facts")
    train = {"steps": 4, "precision": "bf16", "micro_batch": 1, "log_every": 4, "frozen": frozen}
    values = experiment(task, facts, train={**train, "eval_every": 4, "save_every": 4})
    file = read(f"zero{stage}")
    file["zero_optimization"] |= zero
    (folder / "deepspeed.json").write_text(json.dumps(file))
    values["deepspeed"] = str(folder / "deepspeed.json")
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


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.long), 3])
def test_frozen_weights_are_never_reduced(stage: int, tmp_path: Path) -> None:
    """A micro-batch reduces two bytes a trained weight, and nothing of the frozen base."""
    found, weights = step_of("cross_attention", stage, 2, tmp_path)
    reduced = sum(found[name] for name in _REDUCING)
    assert weights > 0
    assert 0 <= reduced - _MICRO_BATCHES * 2 * weights < _SMALL, (found, weights)
    if stage == 3:
        assert _gathers(tmp_path, 2) == _weights_of(tmp_path), "what stays whole, one by one"


def _gathers(folder: Path, step: int) -> int:
    lines = map(json.loads, (folder / "collectives.jsonl").read_text().splitlines())
    return sum(line["step"] == step and line["call"].startswith("all_gather") for line in lines)


def _weights_of(folder: Path) -> int:
    """Of the run's model; all of them are small enough to stay whole on every rank."""
    (values,) = (folder / "out").glob("*/exp_dict.json")
    cfg = tasks.parse(json.loads(values.read_text()))
    task = tasks.load(cfg, Places(folder / "facts", folder / "cache", folder / "out"))
    return len(list(task.skeleton().parameters()))


def test_at_zero_3_a_frozen_base_that_every_rank_keeps_is_not_gathered_again(
    tmp_path: Path,
) -> None:
    """The numbers are the same; what is left are the trained weights, once a step."""
    found: dict[str, int] = {}
    logged: dict[str, list[dict[str, Any]]] = {}
    weights = 0
    for frozen in ("shard", "replicate"):
        folder = tmp_path / frozen
        folder.mkdir()
        counted, weights = step_of("cross_attention", 3, 2, folder, frozen, **_GATHERS_ALL)
        (metrics,) = (folder / "out").glob("*/metrics.jsonl")
        found[frozen], logged[frozen] = counted["all_gather_into"], untimed(metrics)
    print(found, weights)
    assert logged["replicate"] == logged["shard"]
    # a rank's half of the trained weights, in forward and in backward
    assert 0 < found["replicate"] <= _MICRO_BATCHES * 2 * weights + _SMALL
    assert found["shard"] > 2 * found["replicate"]


def test_gradcache_gathers_every_weight_once_a_micro_batch_at_zero_3(tmp_path: Path) -> None:
    """Forwards without gradients keep what the next one needs; what deepspeed 0.19.8 remembers of
    the first forward, which had none, gathered all of it again in every backward, one by one.
    """
    found, weights = step_of("vera", 3, 2, tmp_path, **_GATHERS_ALL)
    whole = weights  # a rank's half, of two bytes each
    assert 0 <= found["all_gather_into"] - _MICRO_BATCHES * whole < 0.02 * whole, (found, weights)
    assert _gathers(tmp_path, 2) <= 2 * _MICRO_BATCHES
