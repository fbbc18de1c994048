"""Background work during training, and host memory that a save copies the training state to.

Every rank does one piece of work at a time, in a thread. The exchanges of these threads between
ranks have their own process group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.runtime import distributed

log = logging.getLogger(__name__)

NAME = "beside"  # the name of the thread
NICE = 10  # the thread writes and hashes on the cores that the run does not use
GIVEN_UP_S = 5.0  # how long a run that was interrupted still waits for the work


class Beside:
    """Runs at most one piece of work in the background while the run continues.

    Writing and hashing files release the interpreter lock. The ranks exchange over gloo, also on
    GPUs, because a collective of the run may be under way at any moment.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Start `work` after the previous piece has ended. A collective: every rank calls it. An
        error of the previous piece is raised, the same on all ranks.
        """
        self.wait()
        distributed.make_side_group()
        self._thread = threading.Thread(target=self._run, args=(work,), name=NAME, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the work has ended, at most timeout_s. Raises the error of the work."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def leave(self, error: BaseException) -> None:
        """Wait for the work when a run ends by `error`, only a short time after a Ctrl-C.

        An error of the work is logged and not raised, because `error` is raised.
        """
        try:
            self.wait(GIVEN_UP_S if isinstance(error, KeyboardInterrupt) else None)
        except Exception as failure:
            log.warning("%s", failure)

    def _run(self, work: Callable[[], object]) -> None:
        try:
            with distributed.on_side_group():
                work()
        except BaseException as error:
            self._error = error  # the next start() or wait() raises it


class StateCopy:
    """Host memory for the tensors of this rank that a checkpoint saves. Every save uses the same
    memory, because the first use of memory costs more than the copy.

    Weights and moments change only in the step of the engine. So only that step waits for the copy;
    a forward, a backward or an evaluation before it runs at the same time as the copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._live: dict[str, Tensor] = {}
        self._is_made = threading.Event()
        self._is_made.set()
        self._after: Any = None  # the event on the device that the copy waits for

    def of(self, live: Mapping[str, Tensor]) -> None:
        """Choose the tensors to copy. They must not change until copy() has run: call wait()."""
        self.wait()  # a skipped step has not waited for the previous copy
        self._live = dict(live)
        self._is_made.clear()
        if distributed.is_gpu():
            self._after = torch.cuda.current_stream().record_event()

    def copy(self) -> dict[str, Tensor]:
        """The copies by name. Runs in a thread of its own, and lowers its priority afterwards: the
        next update waits for the copy, but nothing waits for what the thread does with it.
        """
        try:
            with torch.cuda.stream(self._stream()):
                return {name: self._copy(name, live) for name, live in self._live.items()}
        finally:
            self._live = {}
            self._is_made.set()
            _give_way()

    def wait(self) -> None:
        """Wait until the tensors may change."""
        self._is_made.wait()

    def _stream(self) -> Any:
        if not distributed.is_gpu():
            return None
        stream = torch.cuda.Stream()
        stream.wait_event(self._after)
        return stream

    def _copy(self, name: str, live: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (live.shape, live.dtype):
            buffer = torch.empty(live.shape, dtype=live.dtype)
            self._buffers[name] = buffer = buffer.pin_memory() if distributed.is_gpu() else buffer
        if live.is_cpu and live.is_contiguous():
            # torch would copy with as many threads as the step computes with
            np.copyto(_bytes(buffer), _bytes(live))
        else:
            buffer.copy_(live)
        return buffer


def _give_way() -> None:
    """Lower the priority of this thread and of the threads that it starts (Linux)."""
    if threading.current_thread() is not threading.main_thread():
        this = os.PRIO_PROCESS, threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(*this, max(os.getpriority(*this), NICE))


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
