"""Records which files Python opens to read, and finds out later whether they have changed.

A file counts as unchanged if its size, its times, its inode and a sample of its content are the
same. (The time of the inode cannot be set back.) The folder of an opened file, and the folder
above it, count as unchanged if their names are the same, because a reader may look there for files
that do not exist yet.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# blocks of a file that are compared, including the first and the last
SAMPLES, SAMPLE_BYTES = 16, 1 << 16
# A file that changed so recently may change again within one tick of the clock of its file system
# (a second on some network disks). Such a file is not remembered; the next read remembers it.
SETTLED_S = 2.0
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

_local = threading.local()
_hook_lock = threading.Lock()
_is_hooked = False


@dataclass
class OpenedFiles:
    """The files that this thread opens to read inside a block, with their facts at that time."""

    files: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    is_whole: bool = True  # False: something was read that is not in `files`
    began: float = field(default_factory=time.time)

    def note(self, path: str) -> None:
        """Add a file. Of an imported module only the source counts, not the .pyc file."""
        path = os.path.abspath(path)
        if path not in self.files and not path.endswith(".pyc") and os.path.isfile(path):
            self.files[path] = _facts(path)

    def record(self, *, with_folders: bool) -> dict[str, Any] | None:
        """The record for is_same(); None if later changes could not be detected."""
        facts = list(self.files.values())
        if not self.is_whole or not facts:
            return None
        newest_ns = max(max(mtime, ctime) for _, mtime, ctime, _ in facts)
        if newest_ns / 1e9 > self.began - SETTLED_S:
            return None
        try:
            if any(_facts(path) != was for path, was in self.files.items()):
                return None
            files = {path: [*was, _sample(path, was[0])] for path, was in self.files.items()}
            above = {up for path in files for up in (Path(path).parent, Path(path).parent.parent)}
            folders = {str(folder): _names(folder) for folder in above if with_folders}
        except OSError:
            return None
        return {"files": files, "folders": folders}


@contextmanager
def reading() -> Iterator[OpenedFiles]:
    """Inside, the files that this thread opens to read through Python are recorded. Files that a
    library opens by itself are not: code that calls such a library calls unseen().
    """
    global _is_hooked
    with _hook_lock:
        if not _is_hooked:
            sys.addaudithook(_note_opening)
            _is_hooked = True
    outer: OpenedFiles | None = getattr(_local, "reading", None)
    _local.reading = noted = OpenedFiles()
    try:
        yield noted
    finally:
        _local.reading = outer
        if outer is not None:
            outer.files.update(noted.files)
            outer.is_whole &= noted.is_whole


def unseen() -> None:
    """Mark the current reading() as incomplete, so that its value is not remembered."""
    noted: OpenedFiles | None = getattr(_local, "reading", None)
    if noted is not None:
        noted.is_whole = False


def is_same(record: Mapping[str, Any]) -> bool:
    """Whether nothing in a record has changed. OSError, KeyError, TypeError for no record."""
    files: dict[str, list[Any]] = record["files"]
    for path, facts in files.items():
        if _facts(path) != facts[:4] or _sample(path, facts[0]) != facts[4]:
            return False
    if any(_names(Path(folder)) != names for folder, names in record["folders"].items()):
        return False
    outer: OpenedFiles | None = getattr(_local, "reading", None)
    if outer is not None:  # the outer reading() depends on the files of this record, too
        outer.files |= {path: facts[:4] for path, facts in files.items()}
    return True


def _facts(path: str) -> list[int]:
    """Size, times of change of content and inode in ns, and inode."""
    about = os.stat(path)
    return [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]


def _sample(path: str, size: int) -> str:
    """A digest of blocks spread evenly over a file; of a small file the whole content."""
    digest = hashlib.sha256()
    last = max(size - SAMPLE_BYTES, 0)
    with open(path, "rb", buffering=0) as file:
        for start in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, start))
    return digest.hexdigest()[:32]


def _names(folder: Path) -> str:
    """A digest of the names in a folder, without hidden ones, which are temporary files."""
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    return hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()[:32]


def _note_opening(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open":
        return
    noted: OpenedFiles | None = getattr(_local, "reading", None)
    if noted is None:
        return
    path, mode, flags = arguments
    if not isinstance(path, (str, bytes)) or flags & _WRITES or (mode and set(mode) & set("wax+")):
        return
    with suppress(OSError):
        noted.note(os.fsdecode(path))
