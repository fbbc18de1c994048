"""Lets torch compile a kernel on first use: one process at a time, with a line in the log, and
without waiting for the lock of a dead process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from trainer.files.atomic import refusals

log = logging.getLogger(__name__)


@contextmanager
def compiling(name: str, what: str) -> Iterator[None]:
    """Inside, an extension may be compiled. name: of its folder; what: for people, with how long.

    torch 2.13 (utils/file_baton.py) locks a build by a file that stays when its process is killed;
    the next one then waits for ever, silently. While we hold our own lock no other process of ours
    compiles, so that such a file is stale unless a process works in its folder.
    """
    folder = _folder(name)
    with refusals(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f"{name}.lathe.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process that compiles %s (%s)", name, folder)
        lock.acquire()
    try:
        _remove_stale(folder)
        if not (folder / f"{name}.so").exists():
            log.info("compiling %s (in %s)", what, folder)
        yield
    finally:
        lock.release()


def _folder(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))


def _remove_stale(folder: Path) -> None:
    """Remove torch's lock of a build that nobody works on any more."""
    stale = folder / "lock"
    if not stale.exists() or _is_worked_in(folder):
        return
    log.warning("%s was left by a process that was killed while it compiled; removed", stale)
    stale.unlink(missing_ok=True)


def _is_worked_in(folder: Path) -> bool:
    """Whether another process of this machine is in the folder, as ninja and its compilers are."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is not ours to see
            if process.pid != os.getpid() and Path(process.cwd()) == folder.resolve():
                return True
    return False
