"""Rows encoded by several processes, in their order: the same rows as by one."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from trainer.errors import LatheError

if TYPE_CHECKING:
    from trainer.protocol.task import Encoded, Row

SMALL = 10_000  # rows that one process encodes before several have begun
_CHUNK = 200  # rows that a process gets at a time: some 0.1 s of work
_AHEAD = 4  # chunks a process that wait or are done: memory stays bounded
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Encode = Callable[["Row"], "Encoded"]

# What a process that was forked encodes with: set before the fork, so that nothing is pickled.
_encode: Encode | None = None


def usable_processes(num_rows: int) -> int:
    """How many processes encode so many rows where nobody says: one for few, else the cores that
    this process may use, shared with the other ranks of its machine.
    """
    if num_rows < SMALL or not sys.platform.startswith("linux"):
        return 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def encoded_rows(rows: Iterable[Row], encode: Encode, *, num_proc: int) -> Iterator[Encoded]:
    """encode(row) of every row, in their order; at most a few hundred a process are in memory.

    The first row is encoded here, before any process starts: what encoding builds once (a corpus,
    say) is then shared. An error of a row is raised as it would be by one process. LatheError when
    a process is killed. With several, this process forks: call it before CUDA or threads are up.
    """
    rows = iter(rows)
    if num_proc == 1:
        yield from map(encode, rows)
        return
    yield from map(encode, itertools.islice(rows, 1))
    yield from _by_processes(rows, encode, num_proc)


def _by_processes(rows: Iterator[Row], encode: Encode, num_proc: int) -> Iterator[Encoded]:
    global _encode
    _encode = encode
    waiting: deque[Future[list[Encoded]]] = deque()
    pool = ProcessPoolExecutor(
        num_proc,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_begin,
        initargs=(os.getpid(),),
    )
    try:
        while chunk := list(itertools.islice(rows, _CHUNK)):
            waiting.append(pool.submit(_encode_chunk, chunk))
            if len(waiting) >= _AHEAD * num_proc:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        raise LatheError(
            f"one of {num_proc} processes that encode rows was killed, perhaps for memory. Start "
            "again with fewer: --num_proc 1."
        ) from error
    finally:
        _encode = None
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(parent: int) -> None:
    """In a new process: end when the parent does, leave signals of the terminal to it, one thread
    each.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encode_chunk(chunk: list[Row]) -> list[Encoded]:
    assert _encode is not None
    return [_light(_encode(row)) for row in chunk]


def _light(encoded: Encoded) -> Encoded:
    """The same row as arrays, of which a process hands over far more in a second; what is no flat
    list stays, to be refused by name.
    """
    fields = cast("dict[str, Any]", encoded)
    for name, values in fields.items():
        with contextlib.suppress(TypeError, ValueError):
            fields[name] = np.asarray(values, dtype=None if len(values) else np.int64)
    return encoded
