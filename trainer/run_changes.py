"""Which runs of a savedir_base have just changed: a short log, to which whoever changes a run adds
its name.

A server over thousands of finished runs reads this log instead of looking at all of them. The log
is a hint, and no truth: the files of a run say what it is. So a name may be missing (a process was
killed before it wrote it, an earlier version wrote none, a person edited a file), and whoever reads
the log also looks at every run now and then. Imports no torch.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FILE = ".changes"  # of a savedir_base: a name a line
MOST_BYTES = 1 << 18  # then a new log begins: its readers look at everything once
_ABSENT = (0, 0)  # in the place of a device and an inode
_NAME = re.compile(rb"(?:[0-9a-f]{32}|ftjob-[0-9a-f]{24})\n")


def note_change(base: Path, name: str) -> None:
    """Add a run, or a job of the service, to the log of its savedir_base. Call it when the change
    is on the disk. A folder with another name is none of them, and a log that cannot be written is
    no error.
    """
    line = f"{name}\n".encode(errors="replace")
    if not _NAME.fullmatch(line):
        return
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(base / FILE, flags, 0o666)
        try:
            os.write(descriptor, line)
            is_full = os.fstat(descriptor).st_size > MOST_BYTES
        finally:
            os.close(descriptor)
        if is_full:
            _begin_again(base / FILE)


def _begin_again(path: Path) -> None:
    """Put an empty log in the place of a full one, which tells its readers to look at everything.
    OSError.
    """
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    new.touch()
    os.replace(new, path)


@dataclass
class ChangeLog:
    """Reads the log of a savedir_base from where it was read last."""

    base: Path
    _log: tuple[int, int] | None = None  # device and inode
    _end: int = 0

    def new(self) -> set[str] | None:
        """The names that were added since the last call; None when all may have changed, as at the
        first call, or when another log began. OSError.
        """
        try:
            descriptor = os.open(self.base / FILE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            was_absent, self._log, self._end = self._log == _ABSENT, _ABSENT, 0
            return set() if was_absent else None
        try:
            facts = os.fstat(descriptor)
            log = (facts.st_dev, facts.st_ino)
            is_same = self._log in (log, _ABSENT) and facts.st_size >= self._end
            if is_same and facts.st_size == self._end:
                self._log = log
                return set()
            self._log = log
            if not is_same:
                self._end = facts.st_size
                return None
            content = os.pread(descriptor, facts.st_size - self._end, self._end)
        finally:
            os.close(descriptor)
        whole = content[: content.rfind(b"\n") + 1]
        self._end += len(whole)
        return {match[0][:-1].decode() for match in _NAME.finditer(whole)}
