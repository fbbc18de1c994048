"""Measures seconds of calls on a device: the fastest of several passes over all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_TURN_S = 0.02  # one measurement takes at least this long
_TOGETHER = 5  # how often a measurement calls a collective: the same on every rank


class Stopwatch:
    """Measures calls several times, some seconds apart, and keeps the fastest time of each, to
    ignore other users of the machine.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._best: dict[str, float] = {}
        self._calls: dict[str, int] = {}

    def seconds(self, name: str, run: Callable[[], Any]) -> float:
        """Measure one call of `run`. Returns the fastest time so far under this name."""
        run()
        calls = self._calls.get(name, 1)
        while (spent := self._spent(run, calls)) < _TURN_S and name not in self._calls:
            calls *= max(2, min(16, int(_TURN_S / max(spent, 1e-6))))
        self._calls[name] = calls
        return self.quickest(name, spent / calls)

    def together(self, name: str, run: Callable[[], Any]) -> float:
        """Measure one call of a collective. Every rank calls this."""
        run()
        torch.distributed.barrier()
        start = time.perf_counter()
        for _ in range(_TOGETHER):
            run()
        self._wait()
        return self.quickest(name, (time.perf_counter() - start) / _TOGETHER)

    def quickest(self, name: str, seconds: float) -> float:
        """The fastest time so far under this name, `seconds` included."""
        self._best[name] = min(seconds, self._best.get(name, seconds))
        return self._best[name]

    def _spent(self, run: Callable[[], Any], calls: int) -> float:
        # with one CPU thread, CPU time leaves out what other processes do meanwhile
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
