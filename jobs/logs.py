"""What a job printed, as lines that are safe to show: nothing in a log can drive the terminal that shows it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from jobs import record
from jobs.errors import NothingMatched, Unreachable
from jobs.layout import Attempt, RunFolder
from jobs.record import Job
from jobs.spec import ACTIVE, Backend, Observed
from jobs.states import Witnesses, settle

POLL_S = 0.2
ASK_S = 15.0  # between two questions to the scheduler while a log stands still
LONGEST_LINE = 64 << 10  # bytes; a longer line comes in pieces
BLOCK = 64 << 10
# colours and weights only; not 8, which hides the text
COLOUR = re.compile(r"\x1b\[(?:(?:0?[0-79]|[1-9]\d|1\d\d|2[0-4]\d|25[0-5])[;:]?)*m")
# C0 but tab, DEL, C1, and the marks that reorder or hide letters (CVE-2021-42574)
HIDDEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
LINE_END = re.compile(rb"\r\n|\n|\r(?!\n)")


def visible(text: str, *, keep_colours: bool = False) -> str:
    """`text` with every control character but the tab made visible: ESC as ␛, others as \\x9b or \\u202e.

    keep_colours: ANSI colours stay, and end where the text ends.
    """
    if not HIDDEN.search(text):
        return text
    if not keep_colours:
        return HIDDEN.sub(_picture, COLOUR.sub("", text))
    parts = COLOUR.split(text)
    codes = COLOUR.findall(text)
    shown = "".join(HIDDEN.sub(_picture, part) + code for part, code in zip(parts, [*codes, ""], strict=True))
    return shown + "\x1b[0m" if codes and codes[-1] not in ("\x1b[m", "\x1b[0m") else shown


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # the control pictures of Unicode
    if code == 0x7F:
        return "␡"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def show(
    run: RunFolder,
    backend: Backend | None,
    *,
    attempt: int | None = None,
    err: bool = False,
    tail: int | None = None,
    follow: bool = False,
) -> Iterator[str]:
    """Lines of what an attempt printed (the last attempt unless given), without line ends and safe to print.

    err: what it printed to stderr. tail: only so many lines of what is there now. follow: go on until the attempt has
    ended and everything is read. Where no file is, the scheduler's own log. NothingMatched when there is no such attempt.
    """
    job = record.read(run)
    number = attempt if attempt is not None else (job.last.number if job is not None and job.last else None)
    if number is None:
        raise NothingMatched(
            f"{run.path.name} was never sent out, so it has no log. `plan` says what `submit` would do."
        )
    files = run.attempt(number)
    if not files.folder.is_dir():
        known = ", ".join(str(sent.number) for sent in job.attempts) if job is not None else "none"
        raise NothingMatched(f"{run.path.name} has no attempt {number}. Its attempts: {known}.")
    path = files.err if err else files.logs
    watch = _Watch(run, files, backend)
    if not path.exists() and (not follow or not watch.wait_for(path)):
        return watch.of_scheduler(tail=tail, follow=follow)
    return _lines(path, watch, tail=tail, follow=follow)


def last_lines(path: Path, count: int, *, most: int = 256 << 10) -> list[str]:
    """The last `count` lines of a log, looking at no more than its last `most` bytes, safe to show; [] without one."""
    try:
        with path.open("rb") as file:
            begin = _start_of_tail(file, count, most)
            file.seek(begin)
            content = file.read(most)
    except (FileNotFoundError, NotADirectoryError):
        return []
    lines = LINE_END.split(content)
    return [_text(line) for line in (lines if lines[-1] else lines[:-1])][-count:]


def _text(line: bytes) -> str:
    return visible(line.decode(errors="backslashreplace"), keep_colours=True)


@dataclass
class _Watch:
    """Whether an attempt goes on: its exit file says, or else its scheduler, asked now and then."""

    run: RunFolder
    files: Attempt
    backend: Backend | None
    _asked_at: float = field(default_factory=time.monotonic)
    _is_over: bool = False

    def is_over(self) -> bool:
        """Whether nothing more will be printed."""
        if self.files.exit.exists() or self._is_over:
            return True
        if time.monotonic() - self._asked_at > ASK_S:
            self._asked_at = time.monotonic()
            self._is_over = not self._is_active()
        return self._is_over

    def wait_for(self, path: Path) -> bool:
        """Wait until a file exists: False when the job runs where this folder is not seen, or ends without it."""
        self._is_over = not self._is_active()
        while not path.exists():
            if self.is_over() or self._runs_unseen():
                return path.exists()
            time.sleep(POLL_S)
        return True

    def of_scheduler(self, *, tail: int | None, follow: bool) -> Iterator[str]:
        """Lines of the scheduler's own log of this job."""
        job = record.read(self.run)
        job_id = next((sent.id for sent in job.attempts if sent.number == self.files.number), None) if job else None
        if self.backend is None or job_id is None:
            return
        lines = self.backend.logs(job_id, follow=follow and tail is None)
        if tail is None:
            yield from (visible(line.rstrip("\r\n"), keep_colours=True) for line in lines)
            return
        yield from [visible(line.rstrip("\r\n"), keep_colours=True) for line in lines][-tail or len(lines_of_none) :]

    def _runs_unseen(self) -> bool:
        return False

    def _is_active(self) -> bool:
        return True
