"""What a job printed, as lines that are safe to show: they cannot control the terminal."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from jobs.errors import NothingMatched, Unreachable
from jobs.job_state import ACTIVE, JobState
from jobs.record import events as record
from jobs.record.verdict import AttemptFiles, judge
from jobs.report.text import visible
from trainer.files.atomic import open_file

if TYPE_CHECKING:
    from jobs.protocol import Backend
    from jobs.record.paths import Attempt, RunFolder

POLL_S = 0.2
ASK_S = 15.0  # between two questions to the scheduler
ELSEWHERE_S = 60.0  # a job that ran so long without a file here writes to another file system
LONGEST_LINE = 64 << 10  # bytes; a longer line comes in pieces
BLOCK = 64 << 10
# a progress bar's returns too; the last "\r" may be half of "\r\n"
LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")


def show(
    run: RunFolder,
    backend: Backend | None,
    *,
    attempt: int | None = None,
    err: bool = False,
    tail: int | None = None,
    follow: bool = False,
) -> Iterator[str]:
    """The lines that an attempt printed, without line ends and safe to print. When there is no log
    file, the lines of the scheduler's own log. Of a run by hand: what it said until now.

    attempt: its number; None for the last one. err: read stderr instead of stdout. tail: only the
    last so many lines. follow: continue until the attempt has ended and everything is read.
    Raises NothingMatched, Unreachable.
    """
    job = record.read(run)
    numbers = [each.number for each in job.attempts] if job is not None else []
    if not numbers and run.console.is_file():
        return iter(()) if err else _written(run.console, tail)
    if not numbers:
        raise NothingMatched(f"{run.path.name} was never submitted, so it has no log.")
    number = numbers[-1] if attempt is None else attempt
    if number not in numbers:
        raise NothingMatched(
            f"{run.path.name} has no attempt {number}. It has {', '.join(map(str, numbers))}."
        )
    files = run.attempt(number)
    return _show(
        files.err if err else files.logs, _Watch(run, files, backend), tail=tail, follow=follow
    )


def last_lines(path: Path, count: int, *, most: int = 64 << 10) -> list[str]:
    """The last `count` lines within the last `most` bytes of a log, without colours; [] without a
    file that can be read.
    """
    try:
        with open_file(path) as file:
            begin = max(file.seek(0, os.SEEK_END) - most, 0)
            file.seek(begin)
            content = file.read(most)
    except OSError:
        return []
    lines = LINE_END.split(content.rstrip(b"\r\n"))[1 if begin else 0 :]
    return [visible(_text(line)) for line in lines[-count:]] if content else []


def _show(path: Path, watch: _Watch, *, tail: int | None, follow: bool) -> Iterator[str]:
    is_here = watch.appears(path) if follow else path.exists()
    lines = (
        _lines(path, watch, tail=tail, follow=follow)
        if is_here
        else watch.of_scheduler(tail=tail, follow=follow)
    )
    for line in lines:
        yield visible(line, keep_colours=True)


def _lines(path: Path, watch: _Watch, *, tail: int | None, follow: bool) -> Iterator[str]:
    reader = _Reader(path)
    try:
        if tail is not None:
            reader.skip_to_last(tail)
            there = list(reader.read())
            there += [] if follow else list(reader.rest())
            yield from there[max(len(there) - tail, 0) :]
        while follow:
            # Asked before reading, so that everything printed before the end is read below.
            is_over = watch.is_over()
            has_grown = False
            for line in reader.read():
                has_grown = True
                yield line
            if is_over and not has_grown:
                break
            time.sleep(0 if has_grown else POLL_S)
        yield from reader.read()
        yield from reader.rest()
    finally:
        reader.close()


def _written(path: Path, tail: int | None) -> Iterator[str]:
    """The lines that are in a file now, safe to print; `tail`: only the last so many."""
    reader = _Reader(path)
    try:
        if tail is not None:
            reader.skip_to_last(tail)
        lines = [*reader.read(), *reader.rest()]
    finally:
        reader.close()
    yield from (visible(line, keep_colours=True) for line in (lines[-tail:] if tail else lines))


def _text(line: bytes) -> str:
    return line.decode(errors="backslashreplace")


class _Reader:
    """The lines of a file that grows, and that may be truncated or replaced meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = open_file(path)
        self._pending = b""

    def read(self) -> Iterator[str]:
        """Every line that is complete by now."""
        try:
            facts = self._path.stat()
        except FileNotFoundError:
            facts = None  # it was moved away: the rest of the open file is still read
        if facts is not None:
            is_another = facts.st_ino != os.fstat(self._file.fileno()).st_ino
            if is_another or facts.st_size < self._file.tell():  # another file, or it was cut
                yield from self.rest()
                self._file.close()
                self._file = open_file(self._path)
        while block := self._file.read(BLOCK):
            *lines, self._pending = LINE_END.split(self._pending + block)
            yield from map(_text, lines)
            if len(self._pending) > LONGEST_LINE:
                yield from self.rest()

    def rest(self) -> Iterator[str]:
        """The last line, which has no line end yet."""
        pending, self._pending = self._pending, b""
        if pending:
            yield _text(pending.removesuffix(b"\r"))

    def skip_to_last(self, count: int) -> None:
        """Seek to a place that is followed by at least `count` lines."""
        position = self._file.seek(0, os.SEEK_END)
        ends = 0 if count else 1  # with the end of the last line itself: count + 1
        while position > 0 and count and ends <= count:
            size = min(BLOCK, position)
            position -= size
            self._file.seek(position)
            ends += self._file.read(size).count(b"\n")
        self._file.seek(position)

    def close(self) -> None:
        self._file.close()


class _Watch:
    """Tells whether an attempt still runs, by its exit file, or else by its scheduler, which is
    asked every ASK_S seconds.
    """

    def __init__(self, run: RunFolder, files: Attempt, backend: Backend | None) -> None:
        self._run, self._files, self._backend = run, files, backend
        self._asked_at = -float("inf")
        self._state: JobState = "submitted"

    def is_over(self) -> bool:
        """Whether the attempt has ended, so that nothing more is printed."""
        return self._files.exit.exists() or self._ask() not in ACTIVE

    def appears(self, path: Path) -> bool:
        """Wait until a file exists. False when its job ended without it, or runs on a machine that
        does not share this folder.
        """
        running_since: float | None = None
        while not path.exists():
            if self.is_over():
                return path.exists()
            if self._state == "running" and not self._files.starts():
                running_since = running_since or time.monotonic()
                if time.monotonic() - running_since > ELSEWHERE_S:
                    return False
            time.sleep(POLL_S)
        return True

    def of_scheduler(self, *, tail: int | None, follow: bool) -> Iterator[str]:
        """Lines of the scheduler's own log. `tail` counts only when the log is not followed."""
        job = record.read(self._run)
        ids = (
            [each.id for each in job.attempts if each.number == self._files.number]
            if job is not None
            else []
        )
        if self._backend is None or not ids or ids[0] is None:
            return
        lines: Iterable[str] = self._backend.logs(ids[0], follow=follow)
        if tail is not None and not follow:
            lines = deque(lines, maxlen=tail)
        yield from (line.rstrip("\r\n") for line in lines)

    def _ask(self) -> JobState:
        if time.monotonic() - self._asked_at <= ASK_S:
            return self._state
        job = record.read(self._run)
        attempt = job.last if job is not None else None
        if job is None or attempt is None or attempt.number != self._files.number:
            self._state = "lost"  # a later attempt has begun: this one prints no more
        else:
            observed, is_seen = None, False
            if self._backend is not None and attempt.id is not None:
                with suppress(Unreachable):
                    observed = self._backend.query([attempt.id]).get(attempt.id)
                    is_seen = True
            files = AttemptFiles.of(self._run, attempt)
            self._state = judge(job, files, observed, is_seen=is_seen).state
        self._asked_at = time.monotonic()
        return self._state
