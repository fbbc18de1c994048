"""A lock file that one process holds, and that notices when somebody removed it by hand."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from filelock import FileLock, Timeout

from trainer.errors import HeldError


class HeldLock:
    """A lock for what only one process at a time may do.

    The operating system locks the file itself, not its name. Once the file is removed by hand, the
    next process makes another one of the same name, locks that, and nothing on the disk tells it
    that the first still runs. So the holder looks, before it writes anything that lasts, whether
    the name still leads to its own file; when it does not, the holder is the one that gives way.
    If the folder itself is locked too, the next process is refused at once.
    """

    def __init__(
        self, path: Path, *, what: str, held: str = "another process is training this experiment"
    ) -> None:
        """For messages: what is locked, such as a run folder, and what is said of its holder."""
        self._lock, self._path, self._what = FileLock(path, timeout=0), path, what
        self._held = held
        self._identity: tuple[int, int] | None = None
        self._folder: int | None = None

    def acquire(self) -> None:
        """Take the lock. HeldError at once when another process has it."""
        try:
            self._lock.acquire()
        except Timeout:
            raise self._is_held(self._path) from None
        self._identity = self._at_the_path()

    def hold(self, folder: Path) -> None:
        """Lock a folder itself too. HeldError when another process has it, whatever became of
        the file. Where a file system cannot lock folders, the file alone counts.
        """
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise self._is_held(folder) from None
            return  # NFS asks for a file that is open for writing, which no folder can be
        self._folder = descriptor

    def _is_held(self, path: Path) -> HeldError:
        return HeldError(f"{self._what}: {self._held} (it holds {path}). Wait for it, or stop it.")

    def check(self) -> None:
        """HeldError when the name does not lead to the locked file any more."""
        if self._identity is None or self._at_the_path() != self._identity:
            raise HeldError(
                f"{self._what}: {self._path} was removed while this process held it, so that "
                "another one may be training this experiment by now. Nothing more is saved here. "
                "See that one process at a time uses the folder, and run this again: it resumes."
            )

    def release(self) -> None:
        """Give the lock back, if this process has it."""
        self._identity = None
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None
        self._lock.release()

    def _at_the_path(self) -> tuple[int, int] | None:
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            return None
        return stat.st_dev, stat.st_ino
