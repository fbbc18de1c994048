"""Run a function on several gloo ranks for real, quickly: children fork from a server that has
imported everything.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from queue import Empty
from typing import Any

import torch

SERVED = multiprocessing.get_context(
    "forkserver"
)  # its processes fork from one that has imported everything
SERVED.set_forkserver_preload(["tests.preloaded"])


def run_on_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 900
) -> list[Any]:
    """What `function(*args)` returned on each of `world` ranks, by rank. It must be a module-level
    function.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _results(world, os.path.join(folder, "store"), function, args, timeout_s)


def run_alone(function: Callable[..., Any], *args: Any, timeout_s: float = 900) -> Any:
    """What `function(*args)` returned in a process of its own, in which it joins what group it
    likes.
    """
    return _results(1, None, function, args, timeout_s)[0]


def _results(
    world: int,
    store: str | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout_s: float,
) -> list[Any]:
    queue: Any = SERVED.Queue()
    # As bytes: of each tensor torch would send a file descriptor, and the kernel takes 253 at most.
    # From more, the server ends.
    sent = _as_bytes(args)
    children = [
        SERVED.Process(target=_child, args=(rank, world, store, queue, function, sent))
        for rank in range(world)
    ]
    for child in children:
        child.start()
    results: dict[int, Any] = {}
    try:
        for _ in children:
            rank, good, value = _next(queue, children, results, timeout_s)
            if not good:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = _of_bytes(value)
    finally:
        for child in children:
            child.join(timeout=10 if len(results) == world else 0.1)
            if child.is_alive():
                child.kill()
                child.join()
    return [results[rank] for rank in range(world)]


def _as_bytes(value: Any) -> bytes:
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def _of_bytes(written: bytes) -> Any:
    return torch.load(io.BytesIO(written), weights_only=False)


def _next(
    queue: Any, children: list[Any], results: dict[int, Any], timeout_s: float
) -> tuple[int, bool, Any]:
    """The next result. AssertionError for a rank that ended without one: a signal leaves no word."""
    given_up = time.monotonic() + timeout_s
    while True:
        # looked at before the queue is: what they put there, they put before they ended
        ended = {
            rank: child.exitcode
            for rank, child in enumerate(children)
            if rank not in results and child.exitcode is not None
        }
        try:
            return queue.get(timeout=1.0)
        except Empty:
            if ended:
                raise AssertionError(f"ranks ended without a result: {ended}") from None
            if time.monotonic() > given_up:
                raise AssertionError(f"no result within {timeout_s:.0f} s") from None


def _child(
    rank: int,
    world: int,
    store: str | None,
    queue: Any,
    function: Callable[..., Any],
    sent: bytes,
) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if store is not None:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=600),
            )
        value = function(*_of_bytes(sent))
        if store is not None:
            dist.barrier()
        # as bytes: shared memory would die with this process
        queue.put((rank, True, _as_bytes(value)))
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
    queue.close()
    queue.join_thread()
    os._exit(0)  # gloo's threads can abort a finished rank in the interpreter's own way out
