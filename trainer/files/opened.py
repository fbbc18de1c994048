"""Which files Python opens to read, and whether they are later as they were then.

A file is the same while its size, its times (of its content and of its inode, which nobody can put
back), its inode and a sample of its content are. A folder that files were opened in is the same
while its names are, and so is the one above it: a reader looks there for files that are missing.
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

# blocks of a file that are looked at, the first and the last among them
SAMPLES, SAMPLE_BYTES = 16, 1 << 16
# A file that changed this short a time ago may change again within one tick of its file system's
# clock (a second on some network disks): it is read anew, and remembered the next time.
SETTLED_S = 2.0
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

_local = threading.local()
_hook_lock = threading.Lock()
_is_hooked = False


@dataclass
class OpenedFiles:
    """The files that this thread opens to read while a block lasts, each as it was then."""

    files: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    is_whole: bool = True  # False: something was read that was not seen
    began: float = field(default_factory=time.time)

    def note(self, path: str) -> None:
        """One more. Modules that are imported on the way count by their source alone."""
        path = os.path.abspath(path)
        if path not in self.files and not path.endswith(".pyc") and os.path.isfile(path):
            self.files[path] = _facts(path)

    def record(self, *, with_folders: bool) -> dict[str, Any] | None:
        """What tells later whether all this is as it was; None when nothing could."""
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
    """Inside, what Python opens to read in this thread is noted. What a library opens by itself is
    not: whoever calls one says unseen().
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
    """What is being read comes out of files that are not noted: it is not remembered."""
    noted: OpenedFiles | None = getattr(_local, "reading", None)
    if noted is not None:
        noted.is_whole = False


def is_same(record: Mapping[str, Any]) -> bool:
    """Whether all that a record names is as it was. OSError, KeyError, TypeError for no record."""
    files: dict[str, list[Any]] = record["files"]
    for path, facts in files.items():
        if _facts(path) != facts[:4] or _sample(path, facts[0]) != facts[4]:
            return False
    if any(_names(Path(folder)) != names for folder, names in record["folders"].items()):
        return False
    outer: OpenedFiles | None = getattr(_local, "reading", None)
    if outer is not None:  # what follows from this record follows from its files
        outer.files |= {path: facts[:4] for path, facts in files.items()}
    return True


def _facts(path: str) -> list[int]:
    """Size, times of change of content and inode in ns, and inode."""
    about = os.stat(path)
    return [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]


def _sample(path: str, size: int) -> str:
    """A digest of blocks spread evenly over a file; of the whole of a small one."""
    digest = hashlib.sha256()
    last = max(size - SAMPLE_BYTES, 0)
    with open(path, "rb", buffering=0) as file:
        for start in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, start))
    return digest.hexdigest()[:32]


def _names(folder: Path) -> str:
    """A digest of the names in a folder; hidden ones are somebody's temporary files."""
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
