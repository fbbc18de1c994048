"""Sets how malloc returns freed memory to the system (man mallopt; glibc only)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer.devices import KEPT
from trainer.switches import keeps_memory

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_AT_ONCE = 128 * 1024  # bytes; the initial value of glibc
_LATE = 32 * 2**20  # the value that glibc itself reaches after it has freed blocks of that size
_NEVER = 2**30  # beyond the tensors of a step on a processor

_is_kept = False
_is_empty = True  # the heap has nothing that a step before has freed
_needed = 0  # the most bytes that the process held after a step that found the heap so


def keep(environment: Mapping[str, str]) -> bool:
    """Make malloc keep freed memory for the next step, instead of giving it back and taking it
    anew, page by page; returns whether it does from now on. The process then holds more than is
    alive (devices.KEPT, which give_back_excess() sees to).

    environment: LATHE_KEEP_MEMORY=0 leaves malloc as it is, and so does a setting of malloc there,
    and another malloc than glibc's. Bits do not depend on it. ConfigError for a wrong word.
    """
    global _is_empty, _is_kept, _needed
    if not keeps_memory(environment):
        return _is_kept
    _is_kept = _set(mmap=_NEVER, trim=2**31 - 1)
    _is_empty, _needed = True, 0
    return _is_kept


def give_back_excess() -> bool:
    """After a step: return what is free to the system, if the process holds more than KEPT above
    the most that a step needed which found nothing kept. Returns whether it did.

    Steps of many lengths leave holes of many sizes, into which the next ones do not fit: twelve
    blocks of 16 to 38 MiB, each freed before the next, had the process grow by 306 MiB.
    """
    global _is_empty, _needed
    if not _is_kept:
        return False
    held = _held()
    if _is_empty:
        _is_empty, _needed = False, max(_needed, held)
        return False
    if held <= (1 + KEPT) * _needed:
        return False
    _is_empty = True
    _return_free()
    return True


def let_go() -> None:
    """Undo `keep`, and return what is free to the system: a run in somebody's process is over."""
    global _is_kept
    if not _is_kept:
        return
    _is_kept = False
    _set(mmap=_LATE, trim=2 * _LATE)
    _return_free()


@contextlib.contextmanager
def returned_at_once() -> Iterator[None]:
    """Inside, every freed block of 128 KiB or more is returned to the system.

    Otherwise weights that are loaded layer by layer leave holes in the heap: reading 208 MiB under
    ZeRO-3 on two ranks took 283 MiB per rank instead of 123 (half of the weights and one layer).
    """
    _set(mmap=_AT_ONCE, trim=_AT_ONCE)
    try:
        yield
    finally:
        if _is_kept:
            _set(mmap=_NEVER, trim=2**31 - 1)
        else:
            _set(mmap=_LATE, trim=2 * _LATE)


def _set(*, mmap: int, trim: int) -> bool:
    """Set both thresholds, in bytes; returns whether malloc has taken them."""
    try:
        libc = ctypes.CDLL(None)
        return bool(libc.mallopt(_M_MMAP_THRESHOLD, mmap) and libc.mallopt(_M_TRIM_THRESHOLD, trim))
    except (OSError, AttributeError):
        return False


def _return_free() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _held() -> int:
    """Bytes of this process that lie in memory (man proc_pid_statm)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
