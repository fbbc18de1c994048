"""How fast a run is and how much memory it takes, between two log lines."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from trainer.runtime import distributed
from trainer.runtime.gpus import peak_flops
from trainer.telemetry.flops import StepFlops
from trainer.telemetry.goodput import KEY, Goodput


class Meter:
    """Speed and memory between two log lines. Evaluating and saving do not count: wrap them in
    `paused()`.
    """

    def __init__(self, goodput: Goodput | None = None, *, counts_flops: bool = True) -> None:
        """counts_flops: mfu is told. torch 2.13 counts no compiled block: that step would run as if
        none was, and differ in its last bits.
        """
        self._goodput = goodput
        self._peak_flops = peak_flops() if counts_flops else None
        self._counted_flops, self._flops_per_unit = 0, 0.0
        self._start, self._units, self._steps = time.monotonic(), 0, 0
        self._memory = _Memory()
        # seconds of steps as the host sees them, but for the first; a GPU may still compute
        self.parts = dict.fromkeys(("input", "forward and backward", "update"), 0.0)
        self.timed_steps = 0
        self.prediction: Mapping[str, Any] | None = None  # of this run (launch/late.py)
        self._ended: float | None = None  # the last step did

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A step inside; what passed since the last one and was not paused was input."""
        start, updated = time.monotonic(), self.parts["update"]
        with self._counting_flops():
            yield
        end = time.monotonic()
        if self._ended is None:  # the first step warms up
            self.parts["update"] = 0.0
        else:
            self.timed_steps += 1
            update = self.parts["update"] - updated
            self.parts["input"] += max(0.0, start - self._ended)
            self.parts["forward and backward"] += end - start - update
        self._ended = end

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The optimizer's part of a step inside."""
        start = time.monotonic()
        yield
        self.parts["update"] += time.monotonic() - start

    @contextmanager
    def _counting_flops(self) -> Iterator[None]:
        """Count the FLOPs of the first step inside, where the device's peak is known, for mfu."""
        if self._peak_flops is None or self._flops_per_unit:
            yield
            return
        with StepFlops() as counter:
            yield
        self._counted_flops = counter.total
        if not self._counted_flops:  # it will not be known in a later step either
            self._peak_flops = None

    def add(self, units: int) -> None:
        """Count one step of `units`, those of all ranks."""
        if self._counted_flops and units:
            # every rank's share is alike, and `units` are those of all ranks
            self._flops_per_unit, self._counted_flops = (
                self._counted_flops * distributed.world() / units,
                0,
            )
        self._units += units
        self._steps += 1

    @contextmanager
    def pause(self, kind: str = "evaluation") -> Iterator[None]:
        """Leave the time of a block out of the speed; goodput.py counts it as `kind`."""
        start = time.monotonic()
        try:
            with self._goodput.spending(kind) if self._goodput else nullcontext():
                yield
        finally:
            spent = time.monotonic() - start
            self._start += spent
            if self._ended is not None:
                self._ended += spent

    def read(self, unit: str) -> dict[str, float]:
        """`<unit>_per_s` over all ranks, `step_s`, `peak_gib` of this rank since the start, `mfu`
        and `predicted_step_s` if known, `goodput` of a run.

        Counted since the last read. mfu: achieved over peak bf16 FLOP/s; left out on a CPU and on
        an unknown GPU.
        """
        elapsed = max(time.monotonic() - self._start, 1e-9)
        rate = self._units / elapsed
        scalars = {
            f"{unit}_per_s": rate,
            "step_s": elapsed / max(self._steps, 1),
            "peak_gib": self._memory.peak_gib(),
        }
        if self._flops_per_unit and self._peak_flops is not None:
            scalars["mfu"] = rate * self._flops_per_unit / (self._peak_flops * distributed.world())
        if self.prediction is not None:
            scalars["predicted_step_s"] = self.prediction["step_s"]
        if self._goodput is not None:
            scalars[KEY] = self._goodput.now()["share"]
        self._start, self._units, self._steps = time.monotonic(), 0, 0
        return scalars


@dataclass
class _Memory:
    """The most memory in use since it was made: what torch allocated on the GPU, or else this
    process's RSS.
    """

    _sampled: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            # lets VmHWM start anew: a process may run several experiments (Linux 4.0, man proc)
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def peak_gib(self) -> float:
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() / 2**30
        # not ru_maxrss, which a process inherits from the one that started it
        if sys.platform == "linux":
            match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
            if match:
                return int(match[1]) / 2**20
        self._sampled = max(self._sampled, psutil.Process().memory_info().rss)
        return self._sampled / 2**30
