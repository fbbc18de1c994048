"""A folder examined before runs are saved in it: what its file system promises, how fast it is, and
whether the clocks of the ranks and of the disk agree.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from trainer.files.atomic import BLOCK, refusals, replace_file, sync
from trainer.runtime import distributed

MIB = 64  # written and read for the bandwidth
SKEW_S = 2.0  # most seconds between clocks of ranks and disk: both judge a heartbeat of 30 s


@dataclass(frozen=True)
class Fact:
    """Something about a folder, and whether a run can live with it."""

    name: str
    text: str
    is_sound: bool = True


def examine(folder: Path) -> Iterator[Fact]:
    """The facts about the folder, on rank 0; no fact on the others. A collective; StorageError when
    the disk refuses.
    """
    name = distributed.broadcast(f".doctor-{secrets.token_hex(4)}")
    # runs will make the folder, on the disk of the folder above it
    place = next(up for up in (folder, *folder.absolute().parents) if up.is_dir()) / name
    try:
        with refusals(place):
            if distributed.is_main():
                place.mkdir(parents=True)
            distributed.barrier()
            for fact in (*_semantics(place), *_clocks(place), *_bandwidth(place)):
                if distributed.is_main():
                    yield fact
    finally:
        distributed.barrier()
        if distributed.is_main():
            shutil.rmtree(place, ignore_errors=True)


def _semantics(place: Path) -> Iterator[Fact]:
    path, lock = place / "file", FileLock(place / "lock", timeout=0)
    if distributed.is_main():
        replace_file(path, b"old")
        replace_file(path, b"new")
        lock.acquire()
    distributed.barrier()
    contents = distributed.gather(path.read_bytes().decode())
    yield Fact("rename", "is seen whole by every rank", is_sound=set(contents) == {"new"})
    has_lock = False
    if not distributed.is_main():
        with suppress(Timeout):
            lock.acquire()
            has_lock = True
    yield Fact("locks", "exclude other ranks", is_sound=not any(distributed.gather(has_lock)))
    distributed.barrier()
    lock.release(force=True)
    if distributed.is_main():
        os.link(path, place / "second name")
        sync(place)
    yield Fact("fsync and second names", "of files and folders work")


def _clocks(place: Path) -> Iterator[Fact]:
    distributed.barrier()
    now = time.time()
    path = place / f"clock-{distributed.rank()}"
    path.write_bytes(b"")
    written = path.stat().st_mtime
    times: list[list[float]] = distributed.gather([now, written])
    ranks = max(own for own, _ in times) - min(own for own, _ in times)
    disk = max(abs(at - own) for own, at in times)
    yield Fact("clocks of the ranks", f"{ranks:.2f} s apart", is_sound=ranks <= SKEW_S)
    yield Fact("clock of the disk", f"{disk:.2f} s from the ranks'", is_sound=disk <= SKEW_S)


def _bandwidth(place: Path) -> Iterator[Fact]:
    path, block = place / f"data-{distributed.rank()}", os.urandom(BLOCK)
    distributed.barrier()
    start = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for _ in range(MIB * 2**20 // BLOCK):
            file.write(block)
        os.fsync(file.fileno())
    slowest = max(distributed.gather(time.monotonic() - start))
    rate = MIB * distributed.world() / max(slowest, 1e-9)
    yield Fact("disk", f"{rate:.0f} MiB/s written by {distributed.world()} ranks at once, on it")
