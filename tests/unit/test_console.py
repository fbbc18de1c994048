"""Long work tells how far it is."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from jobs.record.paths import RunFolder
from jobs.report import logs
from trainer.errors import DataError
from trainer.telemetry import console as console_module
from trainer.telemetry.console import Bar, Lines, WorkProgress
from trainer.telemetry.console_file import kept_console


def console(*, is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=120)


def shown(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_a_log_file_gets_a_line_now_and_then_and_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = console(is_terminal=False)
    told = WorkProgress(30, "context", screen)
    told.add(10)
    assert shown(screen) == ""
    monkeypatch.setitem(console_module._EVERY_S, Lines, 0.0)
    told.add(10)
    told.add(10)
    told.close()
    first, last = shown(screen).splitlines()
    assert "  context 20/30  contexts_per_s " in first
    assert " eta 0:00:0" in first
    assert "  context 30/30  contexts_per_s " in last
    assert "eta" not in last


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(console_module._EVERY_S, Bar, 0.0)
    screen = console(is_terminal=True)
    told = WorkProgress(30, "context", screen)
    told.add(12)
    told.close()
    assert "12/30" in shown(screen)
    assert "contexts_per_s" in shown(screen)


def test_a_notebook_is_no_terminal_although_its_kernel_wants_colours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    make = console_module.screen.__wrapped__
    assert make().is_terminal
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    assert not make().is_terminal
    assert not make().is_jupyter


def test_a_run_by_hand_keeps_what_it_says_and_a_job_leaves_that_to_its_wrapper(
    tmp_path: Path,
) -> None:
    (kept,) = kept_console(tmp_path, 20)
    logger = logging.getLogger("trainer.test_console")
    kept.log(10, {"loss": 5.1234})
    logger.warning("a %s\x1b[2J", "warning")
    kept.tell(DataError("line 7"))
    kept.close(1)
    logger.warning("after its end")
    written = [line.split("  ", 1)[1] for line in logs.show(RunFolder(tmp_path), None)]
    assert written == ["step 10/20  loss 5.1234", "a warning␛[2J", "DataError: line 7"]
    (last,) = logs.show(RunFolder(tmp_path), None, tail=1)
    assert last.endswith("DataError: line 7")
    assert list(logs.show(RunFolder(tmp_path), None, err=True)) == []
    (tmp_path / "job.jsonl").touch()
    assert kept_console(tmp_path, 20) == []
