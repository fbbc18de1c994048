"""`python -m trainer doctor`: an engine that is sound, and one that is not."""

from __future__ import annotations

import functools
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.forked import TRAINER, run_ranks
from tests.ranks import run_on_ranks
from trainer.errors import ProofError
from trainer.launch import doctor
from trainer.proof import place
from trainer.runtime import distributed
from trainer.switches import EXAMINE


def _lose_a_micro_batch() -> None:
    """From now on the second backward of a step adds nothing."""
    from trainer.training.engine import Engine

    backward, step, calls = Engine.backward, Engine.step, []

    def losing(self: Any, loss: Any) -> None:
        calls.append(1)
        backward(self, loss * 0.0 if len(calls) == 2 else loss)

    def stepping(self: Any, *args: Any) -> None:
        calls.clear()
        step(self, *args)

    Engine.backward, Engine.step = losing, stepping


def test_the_engine_that_is_installed_is_sound_and_so_is_the_disk(tmp_path: Path) -> None:
    ranks = run_ranks(2, *TRAINER, "doctor", "-sb", str(tmp_path / "new"))
    for done in ranks:
        assert done.returncode == 0, done.stdout + done.stderr
    for name in ("rename", "locks", "fsync", "clocks of the ranks", "clock of the disk", "disk"):
        assert re.search(rf"^{name} .*[a-z]", ranks[0].stdout, re.MULTILINE), ranks[0].stdout
    assert list(tmp_path.iterdir()) == []


def _examined(folder: Path) -> list[tuple[str, bool]]:
    """On a disk whose files are an hour ahead, and whose locks exclude nobody."""
    distributed.init()
    place.time = SimpleNamespace(time=lambda: time.time() - 3600, monotonic=time.monotonic)
    place.FileLock = lambda *_, **__: SimpleNamespace(
        acquire=lambda: None, release=lambda force: None
    )
    return [(fact.name, fact.is_sound) for fact in place.examine(folder)]


def test_a_disk_whose_locks_exclude_nobody_and_whose_clock_is_off_is_noticed(
    tmp_path: Path,
) -> None:
    found, nothing = run_on_ranks(2, _examined, tmp_path)
    assert nothing == []
    assert {name for name, is_sound in found if not is_sound} == {"locks", "clock of the disk"}


def _first_use(folder: Path, *, is_broken: bool) -> tuple[str, bool]:
    """What a first use says, and whether random state is as it was."""
    os.environ.pop(EXAMINE, None)
    if is_broken:
        _lose_a_micro_batch()
    torch.manual_seed(3)
    told, before = "", torch.get_rng_state()
    try:
        doctor.before_first_use(2, folder)
    except ProofError as error:
        told = str(error)
    return told, torch.equal(before, torch.get_rng_state())


def _two_uses(folder: Path) -> list[tuple[str, bool]]:
    return [_first_use(folder, is_broken=False), _first_use(folder, is_broken=True)]


def test_the_first_run_with_new_versions_examines_them_and_later_ones_do_not(
    tmp_path: Path,
) -> None:
    assert run_on_ranks(2, _two_uses, tmp_path) == [[("", True)] * 2] * 2
    assert len(list((tmp_path / "examined").iterdir())) == 1


def test_a_run_is_refused_by_an_engine_that_is_wrong(tmp_path: Path) -> None:
    for told, is_as_it_was in run_on_ranks(
        2, functools.partial(_first_use, is_broken=True), tmp_path
    ):
        assert "accumulation, weights " in told
        assert "LATHE_EXAMINE=off" in told
        assert is_as_it_was
    assert not (tmp_path / "examined").exists()


def test_a_micro_batch_that_is_lost_is_noticed_where_there_are_several() -> None:
    first = functools.partial(_lose_a_micro_batch)
    done = run_ranks(2, *TRAINER, "doctor", first=first)[0]
    assert done.returncode == 1
    (told,) = [line for line in done.stderr.splitlines() if "does not do what plain torch" in line]
    for case in ("accumulation", "GradCache", "uneven ranks"):
        assert f"{case}, weights " in told
    assert "plain, " not in told
    assert "clipping, " not in told
    for stage in range(4):
        assert f"ZeRO-{stage}" in told
