"""A run whose numbers go wrong at a step, as a person starts it: skipped, or rolled back, killed and
gone on with.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.facts import experiment, write_facts
from tests.forked import TRAINVAL, start
from tests.runs.test_commands import lines, status
from tests.runs.test_features import Launcher
from trainer import tasks
from trainer.errors import ConfigError

BAD = 6  # the step whose loss is not a number


def _spoil(bad: int, die_at: int | None) -> None:
    """From now on the loss of step `bad` is not a number; this process kills itself as it begins
    its `die_at`-th step.
    """
    from trainer.training import loop

    step, begun = loop.train_step, []

    def spoilt(session: Any, window: Any, **how: Any) -> Any:
        begun.append(1)
        if len(begun) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if window.step + 1 != bad:
            return step(session, window, **how)

        def losses(model: Any, batches: Any) -> Iterator[Any]:
            return (loss * float("nan") for loss in session.task.losses(model, batches))

        return step(replace(session, task=SimpleNamespace(losses=losses)), window, **how)

    loop.train_step = spoilt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def ended(
    folder: Path, root: Path, what: str, *, bad: int = BAD, die_at: int | None = None, runs: int = 1
) -> Path:
    """The savedir of a run of 8 steps, saved after every second, started so many times."""
    train = {"steps": 8, "log_every": 1, "eval_every": 4, "save_every": 2, "on_bad_step": what}
    root.mkdir()
    launcher = Launcher(
        folder, root, mine=[experiment("causal_lm", folder, train=train, deepspeed="zero1")]
    )
    flags = [*TRAINVAL, *launcher._flags, "-sb", str(launcher.savedir), "-e", "mine"]
    for attempt in range(runs):
        spoil = functools.partial(_spoil, bad, die_at if attempt == 0 else None)
        done = start(*flags, first=spoil).finish()
        is_killed = attempt == 0 and die_at is not None
        assert done.returncode == (-signal.SIGKILL if is_killed else 0), done.stderr
    return launcher.savedir


def weights(savedir: Path) -> bytes:
    (path,) = savedir.glob("[0-9a-f]*/final/model.safetensors")
    return path.read_bytes()


def test_a_rollback_leaves_the_window_out_and_a_kill_behind_it_changes_nothing(
    folder: Path, tmp_path: Path
) -> None:
    rolled = ended(folder, tmp_path / "rolled", "rollback")
    events = [line for line in lines(rolled) if "bad_step" in line]
    assert events == [{"step": BAD, "bad_step": "loss", "bad_steps": 1}]
    assert [line["step"] for line in lines(rolled) if "lr" in line] == list(range(1, 9))
    assert (status(rolled)["state"], status(rolled)["bad_steps"]) == ("succeeded", [BAD])
    # steps 1 to 6, back to 4: the eighth to begin is the second try at the sixth
    for die_at in (7, 8, 9):
        killed = ended(folder, tmp_path / f"killed {die_at}", "rollback", die_at=die_at, runs=2)
        assert lines(killed) == lines(rolled), die_at
        assert weights(killed) == weights(rolled), die_at
    skipped = ended(folder, tmp_path / "skipped", "skip")
    assert weights(skipped) == weights(rolled), "without dropout, both leave out one update"


def test_a_rollback_before_the_first_checkpoint_begins_anew(folder: Path, tmp_path: Path) -> None:
    rolled = ended(folder, tmp_path / "rolled", "rollback", bad=1)
    assert weights(rolled) == weights(ended(folder, tmp_path / "skipped", "skip", bad=1))
    assert status(rolled)["bad_steps"] == [1]


def test_settings_of_bad_steps_that_contradict_each_other_are_refused(folder: Path) -> None:
    wrong = {
        "bad_steps_allowed with on_bad_step": {"bad_steps_allowed": 3},
        "spike_window without spike_z": {"on_bad_step": "skip", "spike_window": 50},
        "spike_window=100 with steps=8: no step would be judged": {"spike_z": 10},
        "should be 'stop', 'skip' or 'rollback'": {"on_bad_step": "roll_back"},
    }
    for text, keys in wrong.items():
        values = experiment("causal_lm", folder, train={"steps": 8, **keys})
        with pytest.raises(ConfigError) as error:
            tasks.parse(values)
        assert text in str(error.value), str(error.value)
