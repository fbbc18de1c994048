"""Which of thousands of folders a turn looks at: those that changed, and a few of the others.

What has ended hardly ever changes, so an idle server must not look at all of it every second. A
turn looks at what is open, at what is new or gone (the folder above tells, by its time), at what
the log of changes names (trainer/run_changes.py), and at LOOKS of the others, the next ones in
turn: a file that a person edits by hand is seen after `names / LOOKS` turns at the latest.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from trainer.run_changes import ChangeLog

LOOKS = 64  # a turn, beside what may have changed
SETTLED_S = 2.0  # a folder may change again within one tick of the clock of its file system


@dataclass
class FolderNames:
    """The names in a folder that are of one kind, with their inodes; read when it has changed."""

    path: Path
    is_of_kind: Callable[[str], bool]
    inodes: dict[str, int] = field(default_factory=dict[str, int])
    _facts: tuple[int, int, int, int] | None = None
    _is_settled: bool = False

    def read(self) -> bool:
        """Bring the names up to date; returns whether the folder may have changed since the last
        call. OSError.
        """
        try:
            about = os.stat(self.path)
        except FileNotFoundError:
            had_names, self.inodes, self._facts = bool(self.inodes), {}, None
            return had_names
        # the time of the inode as well: who may list it has changed, perhaps
        facts = (about.st_dev, about.st_ino, about.st_mtime_ns, about.st_ctime_ns)
        if facts == self._facts and self._is_settled:
            return False
        is_settled = time.time() - about.st_mtime > SETTLED_S
        with os.scandir(self.path) as entries:
            found = {one.name: one.inode() for one in entries if self.is_of_kind(one.name)}
        self._facts, self._is_settled = facts, is_settled
        is_same, self.inodes = found == self.inodes, found
        return not is_same


@dataclass(frozen=True)
class Look:
    """What a turn looks at. names: all that there are. due: those whose files are looked at.
    is_new: whether names came or went since the last look, or everything is looked at.
    """

    names: Collection[str]
    due: set[str]
    is_new: bool


@dataclass
class Watched:
    """Chooses the folders of one kind that a turn looks at. log: names those that have changed.
    Any thread may call it.
    """

    folder: FolderNames
    log: ChangeLog | None = None
    _order: list[str] = field(default_factory=list[str])
    _place: int = 0
    _epoch: str | None = None
    # was to be looked at, and that has not been done yet: the index could not be written, perhaps
    _left: set[str] = field(default_factory=set[str])
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def look(self, open_names: Collection[str], epoch: str) -> Look:
        """What to look at now. open_names: what has not ended. epoch: of the index; with another
        one than before everything is looked at. OSError.
        """
        with self._guard:
            before = self.folder.inodes
            is_new = self.folder.read()
            changed = set[str]() if self.log is None else self.log.new()
            names = self.folder.inodes
            is_all = changed is None or epoch != self._epoch
            self._epoch = epoch
            if is_new or is_all:
                self._order = sorted(names)
            if is_all:
                due = set(names)
            else:
                due = {*open_names, *(changed or ()), *self._left}.intersection(names)
                due |= self._next()
            if is_new:  # a folder that was moved into the place of another has another inode
                due |= {name for name, inode in names.items() if before.get(name) != inode}
            self._left = due
            return Look(names.keys(), due, is_new or is_all)

    def done(self, look: Look) -> None:
        """What was due has been looked at, and is in the index."""
        with self._guard:
            self._left = self._left - look.due

    def _next(self) -> set[str]:
        """The next LOOKS names, in turn."""
        if len(self._order) <= LOOKS:
            return set(self._order)
        self._place %= len(self._order)
        chosen = self._order[self._place : self._place + LOOKS]
        chosen += self._order[: LOOKS - len(chosen)]
        self._place += LOOKS
        return set(chosen)
