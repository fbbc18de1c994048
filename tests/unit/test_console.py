"""Long work tells how far it is."""

from __future__ import annotations

import io
import sys
from types import ModuleType

import pytest
from rich.console import Console

from trainer.telemetry import console as console_module
from trainer.telemetry.console import Bar, Lines, WorkProgress


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
