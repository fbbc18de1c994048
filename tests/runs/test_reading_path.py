"""The reading path at the top of docs/architecture.md is what really happens in a run."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests import forked, reading_path
from tests.facts import experiment, write_facts
from tests.forked import TRAINVAL

TASKS = sorted(path.parent.name for path in reading_path.ROOT.glob("trainer/tasks/*/task.py"))
TEXT = reading_path.PAGE.read_text()


def _trace_until_the_first_step(file: Path) -> None:
    """From here on every function of ours is noted; the process ends with the optimizer's step."""
    from trainer.training.engine import Engine

    root, calls = f"{reading_path.ROOT}/", set[tuple[str, int]]()
    step = Engine.step

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # not a module or a class that is read
        if (
            event == "call"
            and is_function
            and code.co_filename.startswith((f"{root}train", f"{root}jobs"))
        ):
            calls.add((code.co_filename.removeprefix(root), code.co_firstlineno))

    def last_step(self: Engine, *args: Any, **kwargs: Any) -> None:
        step(self, *args, **kwargs)
        sys.setprofile(None)
        threading.setprofile(None)
        file.write_text(json.dumps(sorted(calls)))
        os._exit(0)

    Engine.step = last_step
    threading.setprofile(note)
    sys.setprofile(note)


@pytest.mark.parametrize("task", TASKS)
def test_every_function_before_the_first_update_is_on_the_path_or_a_leaf(
    task: str, tmp_path: Path
) -> None:
    rows = write_facts(tmp_path / "facts")
    groups = tmp_path / "groups.py"
    groups.write_text(f"EXP_GROUPS = {{'one': [{experiment(task, rows)!r}]}}\n")
    argv = ["-e", "one", "--exp_configs", str(groups), "-sb", str(tmp_path / "out")]
    argv += ["--data_path", str(rows), "--cache_dir", str(tmp_path / "cache")]
    trace = tmp_path / "trace.json"
    done = forked.run(*TRAINVAL, *argv, first=functools.partial(_trace_until_the_first_step, trace))
    assert trace.is_file(), done.stdout + done.stderr
    calls = [(file, line) for file, line in json.loads(trace.read_text())]
    assert ("trainer/training/loop.py", _line("steps")) in calls
    assert reading_path.unexplained(iter(calls), TEXT) == []


def _line(name: str) -> int:
    return reading_path.definitions("trainer/training/loop.py")[name][0]


def test_the_path_is_short_and_its_line_numbers_are_those_of_today() -> None:
    path = reading_path.stops(TEXT)
    assert len(path) > 8
    assert reading_path.length(path) <= reading_path.MAX_LINES
    assert reading_path.renumbered(TEXT) == TEXT, "python -m tests.reading_path writes them"
    for place, _ in reading_path.leaves(TEXT):
        assert (reading_path.ROOT / place).exists(), place


def test_a_function_that_is_nowhere_on_the_page_is_found() -> None:
    calls = [("trainer/training/loop.py", 1), ("trainer/nowhere.py", 3)]
    assert reading_path.unexplained(iter(calls), TEXT) == [
        "trainer/nowhere.py:3",
        "trainer/training/loop.py:1",
    ]
