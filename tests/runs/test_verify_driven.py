"""`python -m trainer verify` of a driven run: a good one, and ones that were meddled with."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.driven_runs import (
    Step,
    create,
    drive,
    driven_values,
    folder_of,
    passed,
    rows_of_seed,
    step,
    write_log,
)
from tests.facts import write_facts
from tests.forked import TRAINER, run, run_ranks
from tests.ranks import run_on_ranks
from tests.unit.test_operation_proof import records, rewrite
from tests.wording import says
from trainer.config.identity import exp_id
from trainer.files.atomic import write_json
from trainer.operations.operation_log import LOG
from trainer.operations.results import RESULTS, result_digest
from trainer.switches import CPU_KERNELS

pytestmark = pytest.mark.long


def loop_of_two_saves(values: dict[str, object]) -> list[Step]:
    """Seven steps, a state that is loaded, weights for samplers, and what is refused."""
    steps = [create(values)]
    for number in range(7):
        steps += [passed(rows_of_seed(number)), step()]
        if number == 2:
            steps.append(("save_state", {"name": "a"}, b""))
            steps.append(("save_for_sampler", {"name": "a"}, b""))
            steps.append(step())  # refused: there is no gradient
        if number == 4:
            steps.append(("load_state", {"folder": "saved/a", "with_optimizer": True}, b""))
    return steps


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=13, valid=4)


@pytest.fixture(scope="module", params=[1, 2])
def driven(
    request: pytest.FixtureRequest, facts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int, int]:
    """The folder of a run that was driven to its end, its ranks, and its operations."""
    world, root = request.param, tmp_path_factory.mktemp("driven")
    values = driven_values(facts, world=world, lora={"dropout": 0.1}, train={"keep_last": 9})
    steps = [*loop_of_two_saves(values), ("end", {}, b"")]
    write_log(folder_of(values, root), steps)
    run_on_ranks(world, drive, values, facts, root, 2)
    assert folder_of(values, root).name == exp_id(values)
    return folder_of(values, root), world, len(steps)


def verify(run_folder: Path, data: Path, world: int, *flags: str) -> tuple[int, str]:
    """Exit code, and what was said, of the rank that ended first: its launcher kills the others."""
    own = ("--data_path", str(data), "--cache_dir", str(data / "cache"))
    argv = (*TRAINER, "verify", str(run_folder), *own, *flags)
    ends = run_ranks(world, *argv) if world > 1 else [run(*argv)]
    end = next((one for one in ends if one.returncode > 0), ends[0])
    return end.returncode, " ".join((end.stdout + end.stderr).split())


def test_a_good_run_verifies_and_its_operations_come_out_again(
    driven: tuple[Path, int, int], facts: Path
) -> None:
    folder, world, count = driven
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, said = verify(folder, facts, world)
    assert code == 0, said
    assert f"operations 0 to {count - 1}, chain " in said
    code, said = verify(folder, facts, world, "--replay", "99", "--from", "0")
    assert code == 0, said
    assert f"replayed operations 0 to {count - 1}: {count} result(s) agree" in said
    code, said = verify(folder, facts, world, "--replay", "3", "--from", "3")
    assert code == 0, said
    assert ": 3 result(s) agree" in said
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    code, said = verify(folder, facts, world, "--replay", "3", "--from", "77")
    assert code == 2
    says("replay_absent", said, world=world, step=77)


def _drive_without_kernels(values: dict[str, object], facts: Path, root: Path) -> None:
    os.environ[CPU_KERNELS] = "0"
    drive(values, facts, root, 2)


def test_operations_come_out_again_by_the_kernels_of_the_run(facts: Path, tmp_path: Path) -> None:
    values = driven_values(facts, world=1, lora={})
    steps = [create(values), passed(rows_of_seed(0)), step(), ("end", {}, b"")]
    folder = folder_of(values, tmp_path)
    write_log(folder, steps)
    run_on_ranks(1, _drive_without_kernels, values, facts, tmp_path)
    code, said = verify(folder, facts, 1, "--replay", "99", "--from", "0")
    assert code == 0, said
    assert f"{len(steps)} result(s) agree" in said


def test_a_replay_names_the_operation_that_comes_out_otherwise(
    driven: tuple[Path, int, int], facts: Path, tmp_path: Path
) -> None:
    """A result whose digests were made to fit, and weights for samplers that were replaced."""
    folder, world, _ = driven
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    every = records(copy, RESULTS)
    header = every[4].header
    header["fields"]["metrics"]["grad_norm"] += 1e-9
    header["digest"] = result_digest(4, header["fields"], every[4].payload)
    rewrite(copy, RESULTS, every)
    assert verify(copy, facts, world)[0] == 0
    code, said = verify(copy, facts, world, "--replay", "99", "--from", "0")
    assert code == 1
    assert "operation 4 (optim_step) comes out otherwise: metrics was" in said
    shutil.copytree(folder / "operations", copy / "operations", dirs_exist_ok=True)
    path = copy / "sampler" / "a" / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    code, said = verify(copy, facts, world, "--replay", "99", "--from", "0")
    assert code == 1
    assert "operation 8 (save_for_sampler) comes out otherwise: sampler/a/" in said


def test_what_was_altered_is_named_by_its_operation(
    driven: tuple[Path, int, int], facts: Path, tmp_path: Path
) -> None:
    folder, world, _ = driven
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    (state,) = (copy / "saved" / "a").glob("step-*")
    path = state / "state.json"
    write_json(path, {**json.loads(path.read_text()), "progress": {}})
    code, said = verify(copy, facts, world)
    assert (code, "the state behind operation 7 (saved/a/step-3): state.json: " in said) == (
        1,
        True,
    )
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    every = records(copy, LOG)
    every[5].header["fields"]["loss_fn"] = "ppo"
    rewrite(copy, LOG, every)
    code, said = verify(copy, facts, world)
    assert (code, "operation 5 (forward_backward): its content is not" in said) == (1, True)
