"""trainval.py as a person starts it, under python, torchrun and deepspeed, and what kills and
signals do to it.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.contract.runs import untimed
from tests.facts import experiment, with_dropout, write_facts
from tests.forked import TRAINVAL

ROOT = Path(__file__).parent.parent.parent
PYTHON = [sys.executable, *TRAINVAL]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    *TRAINVAL,
]


def deepspeed_launcher(port: int) -> list[str]:
    launcher = Path(sys.executable).parent / "deepspeed"
    return [str(launcher), "--num_accelerators", "2", "--master_port", str(port), *TRAINVAL]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


@pytest.fixture
def groups(folder: Path, tmp_path: Path) -> Path:
    """A file of experiment groups, as users keep theirs."""
    plain = experiment("cross_attention", folder)
    short, long = (
        with_dropout(
            experiment(
                "cross_attention", folder, train={"steps": steps, "save_every": 5, "eval_every": 4}
            )
        )
        for steps in (12, 60)
    )
    path = tmp_path / "my_groups.py"
    groups = {
        "plain": [plain],
        "short": [short],
        "long": [long],
        "two": [plain, {**plain, "optim": {"lr": 0.02}}],
    }
    path.write_text(f"EXP_GROUPS = {groups!r}\n")
    return path


def command(prefix: list[str], groups: Path, folder: Path, *flags: str) -> list[str]:
    return [
        *prefix,
        "--exp_configs",
        str(groups),
        "--data_path",
        str(folder),
        "--cache_dir",
        str(folder / "c"),
        *flags,
    ]


def environment() -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run(argv: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, env=environment(), capture_output=True, text=True, timeout=240, cwd=ROOT, **kwargs
    )


def lines(savedir: Path) -> list[dict[str, Any]]:
    (path,) = savedir.glob("[0-9a-f]*/metrics.jsonl")
    return untimed(path)


def status(savedir: Path) -> dict[str, Any]:
    (path,) = savedir.glob("[0-9a-f]*/status.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize(("launcher", "stage"), [("torchrun", 2), ("deepspeed", 3)])
@pytest.mark.long  # starts seven programs that import torch
def test_launchers_agree_with_python_and_a_finished_run_is_not_repeated(
    launcher: str, stage: int, groups: Path, folder: Path, tmp_path: Path
) -> None:
    port = forked.free_port()
    prefix = TORCHRUN if launcher == "torchrun" else deepspeed_launcher(port)
    found: list[list[float]] = []
    for name, own in (("python", PYTHON), (launcher, prefix)):
        flags = ["-e", "plain", "-sb", str(tmp_path / name)]
        flags += ["--deepspeed", f"zero{0 if name == 'python' else stage}"]
        argv = command(own, groups, folder, *flags)
        result = forked.run(*argv[1:]) if name == "python" else run(argv)
        assert result.returncode == 0, result.stdout + result.stderr
        found.append([line["loss"] for line in lines(tmp_path / name) if "loss" in line])
        assert status(tmp_path / name)["state"] == "succeeded"
    assert found[1] == pytest.approx(found[0], abs=1e-5)
    again = forked.run(
        *command(list(TRAINVAL), groups, folder, "-e", "plain", "-sb", str(tmp_path / "python"))
    )
    assert again.returncode == 0
    assert "is finished" in again.stdout


def test_every_dictionary_of_a_group_trains_in_its_own_folder(
    groups: Path, folder: Path, tmp_path: Path
) -> None:
    result = forked.run(
        *command(list(TRAINVAL), groups, folder, "-e", "two", "-sb", str(tmp_path / "out"))
    )
    assert result.returncode == 0, result.stdout + result.stderr
    paths = sorted((tmp_path / "out").glob("[0-9a-f]*/exp_dict.json"))
    assert sorted(json.loads(path.read_text())["optim"]["lr"] for path in paths) == [0.01, 0.02]
    first, second = (
        [line["lr"] for line in untimed(path.parent / "metrics.jsonl") if "lr" in line]
        for path in paths
    )
    assert first != second


def wait_for_step(savedir: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        for path in savedir.glob("[0-9a-f]*/metrics.jsonl"):
            if len(path.read_text().splitlines()) >= step:
                return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was never reached: {process.communicate()[0]}")


def ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    import psutil

    family = psutil.Process(launcher.pid).children(recursive=True)
    return [child.pid for child in family if TRAINVAL[0] in child.cmdline()]


def start(argv: list[str]) -> subprocess.Popen[str]:
    out = subprocess.PIPE
    return subprocess.Popen(
        argv,
        env=environment(),
        stdout=out,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def _train_step_that_first(action: Callable[[], None], step: int, rank: int) -> None:
    """From now on this process does `action` as it begins that step, if it is that rank."""
    from trainer.runtime import distributed
    from trainer.training import loop

    original, seen = loop.train_step, []

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        if len(seen) == step and distributed.rank() == rank:
            action()
        return original(*args, **kwargs)

    loop.train_step = disturbed


def _signal_oneself(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def at_step(step: int, number: signal.Signals, rank: int = 0) -> Callable[[], None]:
    """A fault for forked.start: that rank gets the signal just before that step."""
    return functools.partial(
        _train_step_that_first, functools.partial(_signal_oneself, number), step, rank
    )


def equal(one: Path, two: Path) -> None:
    """Two savedirs hold the same metrics and, to the bit, the same weights."""
    assert lines(one) == lines(two)
    first, second = (next(path.glob("[0-9a-f]*/final/model.safetensors")) for path in (one, two))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.long)])
def test_a_rank_killed_by_signal_9_then_the_same_command_equals_an_undisturbed_run(
    stage: int, groups: Path, folder: Path, tmp_path: Path
) -> None:
    def argv(name: str) -> list[str]:
        flags = ("-e", "short", "-sb", str(tmp_path / name), "--deepspeed", f"zero{stage}")
        return command(list(TRAINVAL), groups, folder, *flags)

    straight = forked.run_ranks(2, *argv("straight"))
    assert [done.returncode for done in straight] == [0, 0], straight[0].stdout + straight[0].stderr
    killed = forked.run_ranks(2, *argv("killed"), first=at_step(8, signal.SIGKILL, rank=1))
    assert killed[1].returncode == -signal.SIGKILL
    assert killed[0].returncode != 0
    assert status(tmp_path / "killed")["state"] in ("running", "failed")
    resumed = forked.run_ranks(2, *argv("killed"))
    assert [done.returncode for done in resumed] == [0, 0], resumed[0].stdout + resumed[0].stderr
    assert "resumed from" in resumed[0].stdout
    equal(tmp_path / "killed", tmp_path / "straight")


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 3])
def test_kill_9_of_a_rank_under_torchrun_then_the_same_command_equals_an_undisturbed_run(
    stage: int, groups: Path, folder: Path, tmp_path: Path
) -> None:
    def argv(name: str) -> list[str]:
        flags = ("-e", "long", "-sb", str(tmp_path / name), "--deepspeed", f"zero{stage}")
        return command(TORCHRUN, groups, folder, *flags)

    assert run(argv("straight")).returncode == 0
    process = start(argv("killed"))
    wait_for_step(tmp_path / "killed", 12, process)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    process.communicate(timeout=240)
    assert process.returncode != 0
    assert status(tmp_path / "killed")["state"] in ("running", "failed")
    resumed = run(argv("killed"))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed from" in resumed.stdout
    equal(tmp_path / "killed", tmp_path / "straight")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_exits_75_and_the_same_command_goes_on(
    number: signal.Signals, groups: Path, folder: Path, tmp_path: Path
) -> None:
    argv = command(list(TRAINVAL), groups, folder, "-e", "short", "-sb", str(tmp_path / "out"))
    stopped = forked.run(*argv, first=at_step(7, number))
    assert stopped.returncode == 75, stopped.stdout + stopped.stderr
    assert status(tmp_path / "out")["state"] == "preempted"
    before = lines(tmp_path / "out")
    assert before[-1]["step"] == 7, "the step in which the signal came is the last"
    result = forked.run(*argv)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resumed from" in result.stdout
    assert lines(tmp_path / "out")[: len(before)] == before
    assert status(tmp_path / "out")["state"] == "succeeded"
