"""A folder on disk that is built once by whichever process comes first: whole or invisible."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from trainer.errors import StorageError
from trainer.files.atomic import disk_error, sync

log = logging.getLogger(__name__)

# The errors with which a disk refuses. Any other OSError while building may come from the data that
# is read.
_REFUSALS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
}
_NO_FOLDER = {errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG}


def build_once(
    folder: Path, build: Callable[[Path], None], *, is_whole: Callable[[Path], bool]
) -> Path:
    """`folder`, whole: built in a temporary folder beside it and renamed into place, unless that
    was done before.

    Any number of processes may call it at the same time: one builds, the others wait. A folder that
    is there but not whole is replaced with a warning. Raises StorageError when the disk refuses;
    nothing half-written is left behind.
    """
    if is_whole(folder):
        return folder  # without the lock, so a cache on a read-only disk still serves
    with _storage_errors(folder, _REFUSALS | _NO_FOLDER):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        _storage_errors(folder, _REFUSALS),
        waiting_lock(folder.with_name(f"{folder.name}.lock"), waiting_for=folder),
    ):
        if not is_whole(folder):
            _build(folder, build)
    return folder


@contextmanager
def _storage_errors(folder: Path, numbers: set[int]) -> Iterator[None]:
    """Inside, a disk that refuses with one of these numbers becomes a StorageError that names
    `folder`."""
    try:
        yield
    except (
        Exception
    ) as error:  # any error: libraries in Rust have no error of their own for the disk
        number = disk_error(error)
        if number is None or number not in numbers:
            raise
        raise StorageError(
            f"{folder} cannot be written: {os.strerror(number)}. {_advice(folder, number)}"
        ) from error


def _advice(folder: Path, number: int) -> str:
    """What a user can do when the disk of a cache refuses."""
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free space there, or choose another cache folder."
    files = [path for path in folder.parents if path.exists() and not path.is_dir()]
    if files:
        return f"{files[0]} is a file: choose another cache folder (--cache_dir)."
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "This user may not write there: choose another cache folder (--cache_dir)."
    return "Choose another cache folder (--cache_dir)."


@contextmanager
def waiting_lock(lock_file: Path, *, waiting_for: Path) -> Iterator[None]:
    """Inside, no other process holds the lock; whoever comes later waits, and logs for what."""
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process, which writes %s", waiting_for)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    """Build and rename; the caller holds the lock, so a temporary folder found here was left by a
    killed process.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    if folder.exists():
        log.warning(
            "%s is torn (a file is missing or has the wrong size); building it again", folder
        )
        shutil.rmtree(folder)
    try:
        temporary.mkdir()
        build(temporary)
        for path in sorted(temporary.iterdir()):
            sync(path)
        os.replace(temporary, folder)
        sync(folder.parent)  # if the rename survives a power cut, so does the content
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
