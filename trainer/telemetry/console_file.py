"""What a run by hand says on its console, kept as lines of text in its folder: console.log.

The wrapper of a job keeps what the job prints. A run that somebody starts in a terminal would
otherwise leave nothing to read once the terminal is closed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from trainer.files.atomic import refusals
from trainer.telemetry.console import ConsoleHandler, Lines

if TYPE_CHECKING:
    from trainer.telemetry.console import Number

CONSOLE = "console.log"
JOB_RECORD = "job.jsonl"  # there if the run was ever submitted (jobs/record/paths.py)
WIDTH = 10_000  # letters: a line is kept whole


class ConsoleFile:
    """A sink that appends a run's scalars, and all log records, to console.log in its folder."""

    def __init__(self, folder: Path, total: int) -> None:
        """total: steps of the run. StorageError."""
        with refusals(folder / CONSOLE):
            self._file = (folder / CONSOLE).open(
                "a", encoding="utf-8", errors="backslashreplace", buffering=1
            )
        console = Console(file=self._file, force_terminal=False, force_jupyter=False, width=WIDTH)
        self._lines, self._handler = Lines(console, total), ConsoleHandler(console)
        logging.getLogger().addHandler(self._handler)

    def log(self, step: int, scalars: Mapping[str, Number]) -> None:
        """Append one entry."""
        with contextlib.suppress(OSError):  # a full disk must not end the run because of this file
            self._lines.log(step, scalars)

    def tell(self, error: BaseException) -> None:
        """Append the error that ends the run."""
        record = logging.makeLogRecord({"msg": f"{type(error).__name__}: {error}"})
        self._handler.emit(record)

    def close(self, exit_code: int) -> None:
        """Keep no more."""
        logging.getLogger().removeHandler(self._handler)
        with contextlib.suppress(OSError):
            self._file.close()


def kept_console(folder: Path, total: int) -> list[ConsoleFile]:
    """The file of a run that was never submitted; none for a job, whose wrapper keeps its lines."""
    return [] if (folder / JOB_RECORD).exists() else [ConsoleFile(folder, total)]
