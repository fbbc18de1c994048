"""Adapters in every task's run: any stage, any number of ranks, a kill, another number of ranks."""

from __future__ import annotations

import math
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.contract.runs import ADAPTERS, EVERY_ENTRY, Runs, untimed
from tests.contract.test_task_contract import _die_then_resume
from tests.contract.test_task_features import _go_on, _read_again
from tests.long import long_but
from tests.ranks import run_on_ranks
from trainer import tasks

if find_spec("peft") is None:
    pytest.skip("the optional package peft is not installed", allow_module_level=True)

TASKS = tasks.names()
PARTITIONED = (2, 3)  # ranks, stage: a rank has a part of each frozen weight only


def in_full(*usual: str) -> pytest.MarkDecorator:
    """Some tasks at once, all of them in `make test-long`."""
    return pytest.mark.parametrize("name", long_but(usual, TASKS))


@pytest.mark.long
@pytest.mark.parametrize(
    "entries",
    [[PARTITIONED], EVERY_ENTRY],
    ids=["partitioned", "every"],
)
@in_full("causal_lm")
def test_stages_and_ranks_agree_on_adapters(
    name: str, entries: list[tuple[int, int]], runs: Runs
) -> None:
    wanted = runs.of(name, f"{ADAPTERS}at once").losses
    # with weights that have not moved yet DPO has the loss log 2, whatever the rows
    moved = [loss for loss in wanted if not math.isclose(loss, math.log(2), rel_tol=1e-6)]
    assert len(set(moved)) == len(moved) >= len(wanted) - 2, ("something trains", wanted)
    for world, stage in entries:
        losses = runs.of(name, f"{ADAPTERS}plain", world, stage).losses
        assert losses == pytest.approx(wanted, abs=1e-5), f"ZeRO {stage} on {world} rank(s)"


def bytes_of(run_folder: Path) -> dict[str, bytes]:
    """What of an export are weights."""
    return {path.name: path.read_bytes() for path in run_folder.glob("final/*.safetensors")}


@pytest.mark.parametrize(
    "entries",
    [[(1, 0)], pytest.param(EVERY_ENTRY, marks=pytest.mark.long)],
    ids=["usual", "every"],
)
@in_full("vera")
def test_a_killed_run_with_adapters_resumes_bit_for_bit_with_dropout(
    name: str, entries: list[tuple[int, int]], runs: Runs, tmp_path: Path
) -> None:
    kind = f"{ADAPTERS}dropout"
    for world, stage in entries:
        straight = runs.of(name, kind, world, stage).folder
        savedir = tmp_path / f"{world}-{stage}"
        ranks = run_on_ranks(
            world, _die_then_resume, runs.values(name, kind), runs.folder, savedir, stage
        )
        outcome, killed = ranks[0]
        assert outcome == "killed"
        one, two = (untimed(path / "metrics.jsonl") for path in (straight, killed))
        assert two == one, f"ZeRO {stage} on {world} rank(s)"
        assert "adapter_model.safetensors" in bytes_of(straight)
        assert bytes_of(killed) == bytes_of(straight), f"ZeRO {stage} on {world} rank(s)"


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
@in_full()
def test_a_run_with_adapters_goes_on_on_another_number_of_ranks(
    name: str, first: int, then: int, runs: Runs, tmp_path: Path
) -> None:
    kind = f"{ADAPTERS}plain"
    straight = runs.of(name, kind, first, 2)
    copy = shutil.copytree(straight.folder, tmp_path / straight.folder.name)
    shutil.rmtree(copy / "checkpoints" / "step-4")  # back to its checkpoint of step 2, as by a kill
    resumed = run_on_ranks(then, _go_on, runs.values(name, kind), runs.folder, tmp_path)[0]
    assert resumed == pytest.approx(straight.losses, abs=1e-5)


@in_full("cross_attention", "vera")
def test_recomputing_blocks_with_adapters_changes_no_loss(name: str, runs: Runs) -> None:
    plain = runs.of(name, f"{ADAPTERS}dropout").losses
    assert runs.of(name, f"{ADAPTERS}recomputed").losses == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "export"),
    [
        pytest.param(name, export, marks=[] if name == "vera" else pytest.mark.long)
        for name in TASKS
        for export in ("adapter", "merged")
        if (name, export) != ("cross_attention", "merged")  # which is refused
    ],
)
def test_an_export_of_adapters_reads_back_with_the_metrics_of_its_run(
    name: str, export: str, runs: Runs, tmp_path: Path
) -> None:
    values = runs.values(name, f"{ADAPTERS}plain")
    values = {**values, "lora": values["lora"] | {"export": export}}
    _, metrics, again = run_on_ranks(1, _run_and_read, values, runs.folder, tmp_path)[0]
    assert again == pytest.approx(metrics, rel=1e-5)


def _run_and_read(
    values: dict, folder: Path, savedir: Path, stage: int = 0
) -> tuple[Path, dict, dict]:
    from tests.contract.runs import train

    run_folder, lines = train(values, folder, savedir, stage)
    last = {
        key.removeprefix("valid/"): value
        for key, value in lines[-1].items()
        if key.startswith("valid/")
    }
    return run_folder, last, _read_again(values, folder, run_folder)
