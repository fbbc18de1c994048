"""Encodes rows with several processes, in order, with the same result as one process."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from trainer.data.formats.normal_form import row_hash
from trainer.errors import LatheError

if TYPE_CHECKING:
    from trainer.data.control_tokens import ControlTokens
    from trainer.protocol.task import Encoded, Row

log = logging.getLogger(__name__)

SMALL = 10_000  # one process encodes so many rows before several could start
_CHUNK = 200  # rows that a process gets at a time: about 0.1 s of work
_AHEAD = 4  # chunks per process that are queued or finished, which bounds the memory
_REPORT_EVERY_S = 10.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

EncodeRows = Callable[[Sequence["Row"]], list["Encoded"]]

# The encoder of the forked processes. It is set before the fork, so it is not pickled.
_encode: EncodeRows | None = None


def usable_processes(num_rows: int) -> int:
    """The default number of processes that encode: one for few rows, else the cores that this
    process may use, divided by the ranks of the machine.
    """
    if num_rows < SMALL or not sys.platform.startswith("linux"):
        return 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def processes_beside(ranks: int) -> int:
    """The default number of processes of a rank that encode while `ranks` ranks of this machine
    train: the cores beside those of the ranks, divided by them.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else 2
    return max(1, cores // ranks - 1)


def encoded_rows(
    rows: Iterable[Row], encode: EncodeRows, *, num_proc: int, at_once: int = 1
) -> Iterator[Encoded]:
    """The encoding of every row, in order; at most a few hundred rows per process are in memory.

    at_once: the most rows of one call of `encode`, where one process encodes.
    The first row is encoded here, before any process starts, so that the processes share what
    encoding builds once (for example a corpus). An error of a row is raised as one process would
    raise it. LatheError when a process is killed. With several processes, this process forks: call
    it before CUDA or threads start.
    """
    global _encode
    rows = iter(rows)
    if num_proc == 1:
        while chunk := list(itertools.islice(rows, at_once)):
            yield from encode(chunk)
        return
    yield from encode(list(itertools.islice(rows, 1)))
    _encode = encode
    waiting: deque[Future[list[Encoded]]] = deque()
    pool = ProcessPoolExecutor(
        num_proc,
        mp_context=multiprocessing.get_context("fork"),
        initializer=begin_process,
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


def encode_noting(
    encode: EncodeRows, controls: ControlTokens | None, rows: Sequence[Row]
) -> list[Encoded]:
    """The encoded rows, each with its hash and the control tokens in its texts."""
    encoded = encode(rows)
    for one, row in zip(encoded, rows, strict=True):
        one.row_hash = row_hash(row)
        one.controls = controls.in_row(row) if controls else ()
    return encoded


def with_progress(
    rows: Iterable[Encoded], split: str, num_rows: int, processes: int
) -> Iterator[Encoded]:
    """The same rows. Logs the progress every ten seconds, and the time at the end."""
    began = reported = time.monotonic()
    count = 0
    for count, row in enumerate(rows, start=1):
        yield row
        now = time.monotonic()
        if now - reported >= _REPORT_EVERY_S:
            reported = now
            log.info(
                "encoding %s: %s of %s rows, %.0f rows/s, %d processes",
                *(split, f"{count:,}", f"{num_rows:,}", count / (now - began), processes),
            )
    log.info("encoded %s: %d rows in %.1f s", split, count, time.monotonic() - began)


def begin_process(parent: int) -> None:
    """Set up a new process: it ends with its parent, ignores signals of the terminal, which the
    parent handles, and uses one thread.
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
    """The encoded rows as arrays, which a process can send faster than lists. A value that is no
    flat list stays as it is; the writer of the store refuses it by name.
    """
    assert _encode is not None
    encoded_chunk = _encode(chunk)
    for encoded in encoded_chunk:
        fields = cast("dict[str, Any]", encoded)
        for name, values in fields.items():
            with contextlib.suppress(TypeError, ValueError):
                fields[name] = np.asarray(values, dtype=None if len(values) else np.int64)
    return encoded_chunk
