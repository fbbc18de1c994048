"""Ctrl-C, a closed terminal and a scheduler's signal, at any moment of a run: what there is to save is
saved, the state is `preempted`, and the same command ends with the files of an undisturbed run.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.facts import experiment, with_dropout, write_facts
from tests.forked import ROOT
from tests.runs.test_commands import lines, status
from tests.runs.test_features import Launcher
from tests.runs.test_terminal import Terminal

# Where a signal comes: a function, and which of its calls.
MOMENTS = {
    "encoding": ("trainer.data.token_store:_Writer.add", 40),
    "compiling": ("trainer.files.compilation:_remove_stale", 1),
    "step": ("trainer.training.loop:train_step", 5),
    "evaluation": ("trainer.training.scoring:to_device", 3),
    "the last evaluation": ("trainer.training.scoring:to_device", 9),
    "saving": ("trainer.training.checkpoint:_write_shards", 2),
}
IN_MAKE_TEST = [("evaluation", signal.SIGINT), ("encoding", signal.SIGHUP)]


def _signal_in(place: str, call: int, number: signal.Signals, times: int) -> None:
    """From now on this process gets a signal (so many times) as it begins that call of a function."""
    if signal.getsignal(number) is signal.SIG_IGN:  # tests under nohup: a run would ignore it, too
        signal.signal(number, signal.SIG_DFL)
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    function, seen = getattr(owner, name), []

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        if len(seen) == call:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    setattr(owner, name, disturbed)


def signal_at(moment: str, number: signal.Signals, *, times: int = 1) -> Callable[[], None]:
    return functools.partial(_signal_in, *MOMENTS[moment], number, times)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def launcher(folder: Path, root: Path, deepspeed: str = "zero0") -> Launcher:
    """Of a run of 8 steps with dropout: evaluated in 6 batches after steps 4 and 8, saved after 3,
    6 and 8; the best is kept, and the rate follows the evaluations.
    """
    train = {"steps": 8, "log_every": 1, "eval_every": 4, "save_every": 3}
    schedule = {"shape": "reduce_on_plateau", "patience": 0, "warmup_steps": 1}
    values = with_dropout(
        experiment("causal_lm", folder, train=train, schedule=schedule, deepspeed=deepspeed)
    )
    return Launcher(folder, root, mine=[values])


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The savedir of a run that nothing disturbed."""
    undisturbed = launcher(folder, tmp_path_factory.mktemp("straight"))
    undisturbed.run("-e", "mine")
    return undisturbed.savedir


def stopped_and_resumed(moment: str, number: signal.Signals, folder: Path, root: Path) -> Path:
    """The savedir of a run that a signal stopped at that moment, and the same command ended."""
    disturbed = launcher(folder, root, _stage_of(moment))
    kernels = {"TORCH_EXTENSIONS_DIR": str(ROOT / ".venv" / "torch_extensions")}
    # a cache of its own: rows that are encoded already are not encoded again
    flags = ["-e", "mine", "--cache_dir", str(root / "cache")]
    command = functools.partial(_start, disturbed, flags, kernels)
    stopped = command(signal_at(moment, number)).finish()
    assert stopped.returncode == 75, stopped.stdout + stopped.stderr
    assert status(disturbed.savedir)["state"] == "preempted"
    is_early = moment in ("encoding", "compiling")
    said = "stopping before the first step" if is_early else f"{number.name}: saving"
    assert said in stopped.stdout, stopped.stdout + stopped.stderr
    assert "Traceback" not in stopped.stdout + stopped.stderr
    resumed = command(None).finish()
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert ("resumed from" in resumed.stdout) == (not is_early)
    return disturbed.savedir


def _stage_of(moment: str) -> str:
    """The configuration in which that moment comes: only offloading compiles."""
    return "zero2_offload" if moment == "compiling" else "zero0"


def results(savedir: Path) -> tuple[list[dict[str, Any]], str, str]:
    """What a run leaves: its metrics, the digest of its weights, its state."""
    (weights,) = savedir.glob("[0-9a-f]*/final/model.safetensors")
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    return lines(savedir), digest, status(savedir)["state"]


def _start(disturbed: Launcher, flags: list[str], variables: dict[str, str], first: Any) -> Any:
    from tests.forked import TRAINVAL, start

    own = ["-sb", str(disturbed.savedir), *disturbed._flags, *flags]
    return start(*TRAINVAL, *own, first=first, variables=variables)


@pytest.mark.parametrize(("moment", "number"), IN_MAKE_TEST)
def test_a_signal_at_an_evaluation_or_an_encoding_changes_nothing_of_the_result(
    moment: str, number: signal.Signals, folder: Path, tmp_path: Path, straight: Path
) -> None:
    assert results(stopped_and_resumed(moment, number, folder, tmp_path)) == results(straight)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_changes_nothing_of_the_result(
    moment: str, number: signal.Signals, folder: Path, tmp_path: Path, straight: Path
) -> None:
    undisturbed = straight
    if moment == "compiling":
        (tmp_path / "twin").mkdir()
        twin = launcher(folder, tmp_path / "twin", _stage_of(moment))
        twin.run("-e", "mine")
        undisturbed = twin.savedir
    savedir = stopped_and_resumed(moment, number, folder, tmp_path)
    assert results(savedir) == results(undisturbed)


def test_ctrl_c_at_a_terminal_saves_and_a_second_one_leaves_without(
    folder: Path, tmp_path: Path
) -> None:
    twice = launcher(folder, tmp_path)
    flags = ["-sb", str(twice.savedir), *twice._flags, "-e", "mine"]
    from tests.forked import TRAINVAL

    first = signal_at("step", signal.SIGINT, times=2)
    terminal = Terminal(100, *TRAINVAL, *flags, first=first)
    assert terminal.finish() == 130, "\n".join(terminal.lines())
    shown = "\n".join(terminal.lines())
    assert "SIGINT: saving; again to leave without" in shown
    assert "left without saving" in shown
    assert status(twice.savedir)["state"] == "failed"
    kept = sorted(path.name for path in twice.savedir.glob("*/checkpoints/step-*"))
    assert kept == ["step-3", "step-4"], "those before it"
