"""Measures seconds of calls on a device: the fastest of several passes over all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_TURN_S = 0.02  # that one measurement takes at least
_TOGETHER = 5  # calls of a collective in one measurement: as many on every rank


class Stopwatch:
    """Measures calls several times, some seconds apart, and keeps the fastest time of each, to
    ignore other users of the machine.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._best: dict[str, float] = {}
        self._calls: dict[str, int] = {}

    def seconds(self, name: str, run: Callable[[], Any]) -> float:
        """Of one call of `run`, the quickest measured under this name so far."""
        run()
        calls = self._calls.get(name, 1)
        while (spent := self._spent(run, calls)) < _TURN_S and name not in self._calls:
            calls *= max(2, min(16, int(_TURN_S / max(spent, 1e-6))))
        self._calls[name] = calls
        return self.quickest(name, spent / calls)

    def together(self, name: str, run: Callable[[], Any]) -> float:
        """Of one collective: every rank has to call this."""
        run()
        torch.distributed.barrier()
        start = time.perf_counter()
        for _ in range(_TOGETHER):
            run()
        self._wait()
        return self.quickest(name, (time.perf_counter() - start) / _TOGETHER)

    def quickest(self, name: str, seconds: float) -> float:
        """`seconds`, or what was quicker before."""
        self._best[name] = min(seconds, self._best.get(name, seconds))
        return self._best[name]

    def _spent(self, run: Callable[[], Any], calls: int) -> float:
        # on one thread of a processor, what others do on it meanwhile is not counted
        is_alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        clock = time.process_time if is_alone else time.perf_counter
        self._wait()
        start = clock()
        for _ in range(calls):
            run()
        self._wait()
        return clock() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
