"""metrics.jsonl: one line per entry. No other process may change it while a run writes it."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.scores.direction import is_of_validation
from trainer.errors import StorageError
from trainer.files.atomic import refusals, replace_file
from trainer.telemetry.chain import DOUBLED, damage, seal_line, seal_of

if TYPE_CHECKING:
    from trainer.telemetry.console import Number

log = logging.getLogger(__name__)


LONGEST = 1 << 20  # bytes of a line: with the norm of every gradient
AT = "at"  # the key of the time when a line was written: UTC, ISO 8601


class MetricsFile:
    """The lines of one run; each line is one write.

    If the file is removed, it is restored, because the writing process still has its content. If it
    was cut or replaced, or holds lines of another process, the run stops, because its right content
    is unknown.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        with refusals(self._path):
            self._file: Any = self._path.open("a+b", buffering=0)
            self._size = os.fstat(self._file.fileno()).st_size
            end = os.pread(self._file.fileno(), LONGEST, max(self._size - LONGEST, 0))
            last_line = end[end[:-1].rfind(b"\n") + 1 :]
            self._seal = seal_of(last_line)

    def log(self, step: int, scalars: Mapping[str, Number | str]) -> None:
        """Write one line. StorageError when the disk refuses, or the file is not as it was left."""
        line, seal = seal_line({"step": step, **scalars, AT: _now()}, self._seal)
        with refusals(self._path):
            self._keep()
            written = self._file.write(line)
            self._size += written
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._seal = seal

    def cut(self, step: int) -> None:
        """Drop the lines after `step`, torn lines and repeated lines.

        The other lines stay byte for byte. A line that differs from what the run wrote is logged.
        """
        self._file.close()
        content = self._path.read_bytes()
        lines = content.splitlines(keepends=True)
        whole = lines if content.endswith(b"\n") else lines[:-1]
        doubled: set[int] = set()
        for number, problem in damage(whole):
            log.warning("%s: line %d %s", self._path, number, problem)
            if problem == DOUBLED:
                doubled.add(number)
        rest = b"".join(
            line
            for number, line in enumerate(lines, start=1)
            if number not in doubled and _belongs(line, step)
        )
        if rest != content:
            replace_file(self._path, rest)
        self._open()

    def evaluations(self) -> list[dict[str, Any]]:
        """{"step", "valid/...", "valid_NAME/..."} of every evaluation, the last of each step."""
        by_step: dict[int, dict[str, Any]] = {}
        for line in self._path.read_bytes().splitlines():
            entry = json.loads(line)
            scores = {key: entry[key] for key in entry if is_of_validation(key)}
            if scores:
                by_step.pop(entry["step"], None)
                by_step[entry["step"]] = {"step": entry["step"], **scores}
        return list(by_step.values())

    def close(self, exit_code: int) -> None:
        """Restore the file if it was removed since the last line, and close it."""
        if not self._file.closed and not self._path.exists():
            self._restore()
        self._file.close()

    def _keep(self) -> None:
        own = os.fstat(self._file.fileno())
        try:
            present = self._path.stat()
        except FileNotFoundError:
            self._restore()
            return
        is_own = (present.st_dev, present.st_ino) == (own.st_dev, own.st_ino)
        if not is_own or own.st_size != self._size:
            change = f"has {own.st_size} bytes, not {self._size}" if is_own else "is another file"
            raise StorageError(
                f"{self._path}: it was changed while this run was writing it (it {change}). "
                "See that one process at a time uses this folder, and run this again: it resumes."
            )

    def _restore(self) -> None:
        content = os.pread(self._file.fileno(), self._size, 0)
        log.warning("%s was removed while the run was writing it; it is put back", self._path)
        replace_file(self._path, content)
        self._file.close()
        self._open()


def has_line(path: Path, step: int, key: str) -> bool:
    """Whether a line of this step has the key: a start that was killed before it wrote down what it
    had computed has logged it.
    """
    if not path.is_file():
        return False
    content = path.read_bytes().splitlines(keepends=True)
    # a full disk may have torn the last line
    lines = [line for line in content if f'"{key}"'.encode() in line and line.endswith(b"\n")]
    return any(json.loads(line)["step"] == step for line in lines)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _belongs(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False
