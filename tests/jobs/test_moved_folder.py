"""A run folder that is moved away while its training lives: nothing starts it a second time."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs.record.by_hand import training_now
from jobs.record.paths import BaseFolder, RunFolder
from jobs.submit.group import preview, submit
from tests.jobs.test_sending import Memory, request
from tests.wording import refused
from trainer.files.held_lock import HeldLock

ROOT = Path(__file__).resolve().parents[2]
# What trainval.py does with a run folder before its first step (trainer/launch/run_folder.py).
TRAINING = """
import json, pathlib, sys, time
from trainer.files.held_lock import HeldLock
folder = pathlib.Path(sys.argv[1])
lock = HeldLock(folder.with_name(f".{folder.name}.lock"), what=str(folder))
folder.parent.mkdir(parents=True, exist_ok=True)
lock.acquire()
folder.mkdir(exist_ok=True)
lock.hold(folder)
(folder / "exp_dict.json").write_text(sys.argv[2])
(folder / "status.json").write_text(json.dumps({"state": "running", "step": 3, "total": 9}))
print("runs", flush=True)
time.sleep(600)
"""


@pytest.fixture
def base(tmp_path: Path) -> BaseFolder:
    return BaseFolder(tmp_path / "base")


@contextmanager
def training(folder: RunFolder, values: object) -> Iterator[int]:
    """A process that trains in `folder`, until the block ends; its id."""
    words = [sys.executable, "-c", TRAINING, str(folder.path), json.dumps(values)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_live_folder_that_was_moved_away_is_not_started_twice(
    base: BaseFolder, tmp_path: Path
) -> None:
    scheduler = Memory()
    asked = request(base, scheduler)
    [(name, values)] = asked.by_id.items()
    folder = base.run(name)
    with training(folder, values) as pid:
        shutil.move(folder.path, tmp_path / "moved")
        for use_array in (False, True):
            both = request(base, scheduler, use_array=use_array)
            for [result] in (preview(both), submit(both)):
                assert result.action == "skip"
                assert (
                    result.text == f"its training runs here: process {pid}. Wait for it, or stop it"
                )
        assert not folder.path.exists()
        # nor by hand: the lock stands beside the folder, and stays there
        again = HeldLock(folder.path.with_name(f".{name}.lock"), what=str(folder.path))
        with refused("lock_held"):
            again.acquire()
    assert scheduler.sent == []
    [result] = submit(asked)
    assert (result.action, len(scheduler.sent)) == ("send", 1)


def test_a_submitted_run_that_was_moved_away_is_not_sent_again_while_it_lives(
    base: BaseFolder, tmp_path: Path
) -> None:
    scheduler = Memory()
    asked = request(base, scheduler)
    submit(asked)
    [(name, values)] = asked.by_id.items()
    with training(base.run(name), values):
        shutil.move(base.run(name).path, tmp_path / "moved")
        [result] = submit(asked)
        assert result.action == "skip"
        # put back, it is the job that it was
        shutil.move(tmp_path / "moved", base.run(name).path)
        [result] = submit(asked)
        assert result.action == "skip"
    assert len(scheduler.sent) == 1


def test_to_look_whether_a_training_runs_keeps_none_out(base: BaseFolder) -> None:
    folder = base.run("0" * 32)
    base.path.mkdir()
    lock = HeldLock(folder.path.with_name(f".{folder.path.name}.lock"), what="it")
    assert training_now(folder, was_sent=False) is None
    lock.acquire()
    assert training_now(folder, was_sent=False) is not None
    lock.release()
    assert training_now(folder, was_sent=False) is None
