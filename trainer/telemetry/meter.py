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
        """counts_flops: report mfu. Pass False for a compiled model: counting FLOPs disables
        compilation for that step (torch 2.13), so its numbers change in the last bits.
        """
        self._goodput = goodput
        self._peak_flops = peak_flops() if counts_flops else None
        self._counted_flops, self._flops_per_unit = 0, 0.0
        self._start, self._units, self._steps = time.monotonic(), 0, 0
        self._memory = _Memory()
        # seconds of all steps but the first, as the host sees them; a GPU may still compute
        self.parts = dict.fromkeys(("input", "forward and backward", "update"), 0.0)
        self.timed_steps = 0
        self.prediction: Mapping[str, Any] | None = None  # of this run (launch/late.py)
        self._ended: float | None = None  # when the last step ended

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Time one step. The time since the last step, less pauses, counts as input."""
        start, updated = time.monotonic(), self.parts["update"]
        counts_flops = self._peak_flops is not None and not self._flops_per_unit
        counter = StepFlops() if counts_flops else None  # for mfu, in the first step
        with counter or nullcontext():
            yield
        if counter is not None:
            self._counted_flops = counter.total
            if not self._counted_flops:  # it will not be known in a later step either
                self._peak_flops = None
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
        """Time the part of a step that updates the weights."""
        start = time.monotonic()
        yield
        self.parts["update"] += time.monotonic() - start

    def add(self, units: int) -> None:
        """Count one step of `units`, those of all ranks."""
        if self._counted_flops and units:
            # all ranks count about the same FLOPs, and `units` are those of all ranks
            self._flops_per_unit, self._counted_flops = (
                self._counted_flops * distributed.world() / units,
                0,
            )
        self._units += units
        self._steps += 1

    @contextmanager
    def pause(self, kind: str = "evaluation") -> Iterator[None]:
        """Exclude the time of a block from the speed; goodput.py counts it as `kind`."""
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
        """The scalars since the last read: `<unit>_per_s` over all ranks, `step_s`, `mfu`, `tflops`
        and `predicted_step_s` if known; and since the start: `peak_gib` of this rank, `goodput`.

        tflops: achieved by a device in a second, in 1e12. mfu: that over its peak in bf16. Both are
        left out on a CPU and on an unknown GPU.
        """
        elapsed = max(time.monotonic() - self._start, 1e-9)
        rate = self._units / elapsed
        scalars = {
            f"{unit}_per_s": rate,
            "step_s": elapsed / max(self._steps, 1),
            "peak_gib": self._memory.peak_gib(),
        }
        if self._flops_per_unit and self._peak_flops is not None:
            flops = rate * self._flops_per_unit / distributed.world()  # of one device, a second
            scalars |= {"tflops": flops / 1e12, "mfu": flops / self._peak_flops}
        if self.prediction is not None:
            scalars["predicted_step_s"] = self.prediction["step_s"]
        if self._goodput is not None:
            scalars[KEY] = self._goodput.now()["share"]
        self._start, self._units, self._steps = time.monotonic(), 0, 0
        return scalars


@dataclass
class _Memory:
    """The peak of memory use since this object was made: what torch allocated on the GPU, or, on
    a CPU, the RSS of this process.
    """

    _sampled: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            # resets VmHWM, because a process may run several experiments (Linux 4.0, man proc)
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
