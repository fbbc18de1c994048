"""Finds the rank that makes the others wait, by how long each rank computes in a step."""

from __future__ import annotations

import socket
import statistics
from collections import deque
from dataclasses import dataclass, field

SAMPLES = 100  # how many samples of a rank are needed to judge it
SLOWER = 1.5  # a straggler computes so many times as long as the median of the others


@dataclass
class _Window:
    busy: int = 0  # samples in which the rank computed, rather than waited for the others
    of: int = 0  # all samples


@dataclass
class Stragglers:
    """Counts samples of what ranks do, and keeps how long their steps take."""

    _ranks: dict[int, _Window] = field(default_factory=dict[int, _Window])
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    _reported: set[int] = field(default_factory=set[int])

    def begin(self) -> None:
        """Forget the samples, because ranks have new places; the lengths of steps are kept."""
        self._ranks, self._reported = {}, set()

    def step(self, rank: int, seconds: float) -> None:
        """A rank has completed a step."""
        if rank == 0:
            self._steps.append(seconds)

    def step_s(self) -> float:
        """The median of the latest steps; 0 before the first one."""
        return statistics.median(self._steps) if self._steps else 0.0

    def add(self, rank: int, busy: int, of: int) -> None:
        """Add `of` samples that were taken within steps; in `busy` of them the rank computed."""
        window = self._ranks.setdefault(rank, _Window())
        window.busy, window.of = window.busy + busy, window.of + of

    def lines(self) -> list[str]:
        """A line for each rank that computes SLOWER times as long as the others, each rank once.

        When every rank has SAMPLES samples they are judged, and counting starts again.
        """
        windows = self._ranks
        if len(windows) < 2 or min(one.of for one in windows.values()) < SAMPLES:
            return []
        shares = {rank: one.busy / one.of for rank, one in windows.items()}
        self._ranks, lines = {}, list[str]()
        for rank, share in shares.items():
            others = statistics.median(shares[one] for one in shares if one != rank)
            if share > SLOWER * others and rank not in self._reported:
                self._reported.add(rank)
                step_s = self.step_s()
                lines.append(
                    f"rank {rank} on {socket.gethostname()} is a straggler: it computes "
                    f"{share * step_s:.3f} s of a step, the others {others * step_s:.3f} s"
                    + (f" ({share / others:.1f} times)" if others else "")
                )
        return lines
