"""What a person sees of a run or other work: plain lines in a log, a live bar on a terminal.

There is one console. Log lines go through it too, for a bar that does not know of a line is drawn
over it.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import time
from collections.abc import Mapping
from datetime import datetime

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

Number = int | float


@functools.cache
def screen() -> Console:
    """The console of this process, on whatever standard output is at the moment. In a notebook it
    writes lines of text: a cell is no terminal, although its kernel sets FORCE_COLOR.
    """
    is_notebook = "ipykernel" in sys.modules
    return Console(force_jupyter=False, force_terminal=False if is_notebook else None)


class ConsoleHandler(logging.Handler):
    """Log records as lines of a console, each with the time of day."""

    def __init__(self, console: Console | None = None) -> None:
        """console: None for the one of this process, on standard output."""
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        try:
            _print(self._console or screen(), f"{clock()}  {self.format(record)}")
        except RecursionError:  # as logging.StreamHandler does (CPython issue 36272)
            raise
        except Exception:  # any: a line that cannot be shown must not end a run
            self.handleError(record)


def clock() -> str:
    """The time of day here, to the second."""
    return datetime.now().strftime("%H:%M:%S")


def _print(console: Console, line: str) -> None:
    """One line: on a terminal broken between words, in a file as long as it is."""
    if console.is_terminal:
        console.print(line, markup=False, highlight=False, emoji=False)
    else:
        console.out(line, highlight=False)


class Lines:
    """One line an entry, for a log file: `12:00:05  step 20/200  loss 5.1234  eta 0:01:30`."""

    def __init__(self, console: Console, total: int, *, unit: str = "step") -> None:
        self._console, self._total, self._unit = console, total, unit

    def log(self, step: int, scalars: Mapping[str, Number]) -> None:
        """Print one entry."""
        words = [
            f"{clock()}  {self._unit} {step}/{self._total}",
            *(f"{name} {format_number(value)}" for name, value in scalars.items()),
        ]
        eta = _eta(step, self._total, scalars)
        _print(self._console, "  ".join([*words, *([f"eta {eta}"] if eta else [])]))

    def show(self, step: int, scalars: Mapping[str, Number]) -> None:
        """Print the progress."""
        self.log(step, scalars)

    def move(self, step: int) -> None:
        """Does nothing, because a log file has no line for every step."""

    def close(self, exit_code: int) -> None:
        """Does nothing, because no file is open."""


_IN_BAR = ("loss", "step_s")  # of a log line; the second for the time that is left


class Bar:
    """A live progress bar for a terminal, below the printed lines."""

    def __init__(self, console: Console, total: int, *, unit: str = "step") -> None:
        self._lines, self._total = Lines(console, total, unit=unit), total
        columns = (
            TextColumn(unit),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),  # what the words leave
            TextColumn("{task.fields[words]}", table_column=Column(no_wrap=True)),
        )
        self._progress = Progress(*columns, console=console, expand=True)
        self._bar = self._progress.add_task(unit, total=total, words="")
        self._progress.start()

    def log(self, step: int, scalars: Mapping[str, Number]) -> None:
        """Print the entry above the bar, and show its loss and the time left in it."""
        self._lines.log(step, scalars)
        if not any("/" in name for name in scalars):
            self.show(step, {name: scalars[name] for name in _IN_BAR if name in scalars})

    def show(self, step: int, scalars: Mapping[str, Number]) -> None:
        """Move the bar and show these numbers and the remaining time in it."""
        names = [name for name in scalars if name != "step_s"]
        words = [f"{name} {format_number(scalars[name])}" for name in names]
        words += [f"eta {eta}"] if (eta := _eta(step, self._total, scalars)) else []
        self._progress.update(self._bar, completed=step, words="  ".join(words), refresh=True)

    def move(self, step: int) -> None:
        """Move the bar to `step`; the terminal draws it ten times a second."""
        self._progress.update(self._bar, completed=step)

    def close(self, exit_code: int) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()


# How long long work stays silent, at most.
_EVERY_S = {Bar: 0.2, Lines: 10.0}


class WorkProgress:
    """Shows the progress of a count towards a total, its speed and the remaining time."""

    def __init__(self, total: int, unit: str, console: Console | None = None) -> None:
        own = console or screen()
        self._sink = (Bar if own.is_terminal else Lines)(own, total, unit=unit)
        self._total, self._unit, self._done = total, unit, 0
        self._began = self._told = time.monotonic()

    def add(self, count: int) -> None:
        """Add `count` finished items."""
        self._done += count
        now = time.monotonic()
        if self._done >= self._total or now - self._told >= _EVERY_S[type(self._sink)]:
            self._told = now
            each_s = (now - self._began) / self._done
            self._sink.show(
                self._done, {f"{self._unit}s_per_s": 1 / max(each_s, 1e-9), "step_s": each_s}
            )

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._sink.close(0)


def format_number(value: Number) -> str:
    """A number as a person reads it: 5.1234, 12345.6, 3.0e-4, 12."""
    if isinstance(value, int) or value == 0:
        return str(int(value))
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.4f}" if abs(value) < 1e3 else f"{value:.1f}"
    return re.sub(r"e([+-])0*", lambda match: "e" + match[1].strip("+"), f"{value:.1e}")


def _eta(step: int, total: int, scalars: Mapping[str, Number]) -> str:
    """h:mm:ss that the remaining steps take at the speed of this entry.

    Empty when the entry states none.
    """
    if "step_s" not in scalars or step >= total:
        return ""
    minutes, seconds = divmod(round((total - step) * scalars["step_s"]), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
