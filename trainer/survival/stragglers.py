"""Which rank makes the others wait: by the time that each computes in a step."""

from __future__ import annotations

import socket
import statistics
from collections import deque
from dataclasses import dataclass, field

SAMPLES = 100  # of a rank, before it is judged
SLOWER = 1.5  # times the median of the others


@dataclass
class _Window:
    busy: int = 0  # samples that found it computing, not waiting for the others
    of: int = 0


@dataclass
class Stragglers:
    """Samples of what ranks do, and how long their steps take."""

    _ranks: dict[int, _Window] = field(default_factory=dict[int, _Window])
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    _named: set[int] = field(default_factory=set[int])

    def begin(self) -> None:
        """Ranks have new places; how long their steps take is still known."""
        self._ranks, self._named = {}, set()

    def step(self, rank: int, seconds: float) -> None:
        """A rank has done a step."""
        if rank == 0:
            self._steps.append(seconds)

    def step_s(self) -> float:
        """The median of the latest steps; 0 before the first one."""
        return statistics.median(self._steps) if self._steps else 0.0

    def add(self, rank: int, busy: int, of: int) -> None:
        """Of `of` samples within steps, `busy` found the rank computing."""
        window = self._ranks.setdefault(rank, _Window())
        window.busy, window.of = window.busy + busy, window.of + of

    def lines(self) -> list[str]:
        """What is to be said of ranks that compute SLOWER times as long as the others, each once;
        a look at them begins a new window.
        """
        windows = self._ranks
        if len(windows) < 2 or min(one.of for one in windows.values()) < SAMPLES:
            return []
        shares = {rank: one.busy / one.of for rank, one in windows.items()}
        self._ranks, lines = {}, list[str]()
        for rank, share in shares.items():
            others = statistics.median(shares[one] for one in shares if one != rank)
            if share > SLOWER * others and rank not in self._named:
                self._named.add(rank)
                step_s = self.step_s()
                lines.append(
                    f"rank {rank} on {socket.gethostname()} is a straggler: it computes "
                    f"{share * step_s:.3f} s of a step, the others {others * step_s:.3f} s"
                    + (f" ({share / others:.1f} times)" if others else "")
                )
        return lines
