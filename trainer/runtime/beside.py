"""Work beside the run: one piece at a time, on every rank, in a thread whose exchanges between
ranks have a group of their own; and the memory that a save copies the training state to meanwhile.
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

NAME = "beside"  # of the thread
NICE = 10  # what is left to do with a copy takes the cores that the run leaves free
GIVEN_UP_S = 5.0  # how long somebody who leaves at once waits for it all the same


class Beside:
    """At most one piece of work that is under way while the run goes on.

    Writing files and hashing them leave the interpreter to the run. The ranks' exchanges go over
    gloo, whatever the run computes with: a collective of the run may be on its way at any moment.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begin `work` once the piece before is done. A collective: every rank calls it, and what
        the piece before failed with is raised, the same on all ranks.
        """
        self.wait()
        distributed.make_side_group()
        self._thread = threading.Thread(target=self._run, args=(work,), name=NAME, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when nothing is under way, or after so many seconds.

        Raises what the work failed with.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def leave(self, error: BaseException) -> None:
        """Wait, for a run that ends by `error`: only a little when somebody wants to leave at once.
        What the work failed with is told and not raised, for `error` is.
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
    """Host memory for the tensors that a checkpoint takes from this rank: the same for every save,
    for the first use of memory costs more than the copy.

    Weights and moments change in the engine's step alone. So the step that follows a save waits for
    the copy, and what comes before it (a forward, a backward, an evaluation) runs beside it.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._live: dict[str, Tensor] = {}
        self._is_made = threading.Event()
        self._is_made.set()
        self._after: Any = None  # of the device: what is to be done before the copy

    def of(self, live: Mapping[str, Tensor]) -> None:
        """From now on until copy() has run, nobody may change these tensors: wait() says when."""
        self.wait()  # a step that was left out has not waited for the copy before
        self._live = dict(live)
        self._is_made.clear()
        if distributed.is_gpu():
            self._after = torch.cuda.current_stream().record_event()

    def copy(self) -> dict[str, Tensor]:
        """The copies by name. Runs in a thread of its own, which gives way to the run from then on:
        the next update waits for the copy, and nothing for what is done with it.
        """
        try:
            with torch.cuda.stream(self._stream()):
                return {name: self._copy(name, live) for name, live in self._live.items()}
        finally:
            self._live = {}
            self._is_made.set()
            _give_way()

    def wait(self) -> None:
        """Return when the tensors may change."""
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
    """Lower the priority of this thread, and of those that it starts; Linux has one for each."""
    if threading.current_thread() is not threading.main_thread():
        this = os.PRIO_PROCESS, threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(*this, max(os.getpriority(*this), NICE))


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
