"""How long a run took until the end of its first step, by phase."""

from __future__ import annotations

import logging
import time

import psutil

log = logging.getLogger(__name__)


class Startup:
    """Seconds of a run by phase, from its start to the end of the first step."""

    def __init__(self, began_at: float | None = None) -> None:
        """began_at: Unix time at which the run was asked for; None: when this process started."""
        # None: the first step is done
        self._last: float | None = began_at or psutil.Process().create_time()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Count the time since the previous lap as `name`; does nothing after the first step."""
        if self._last is not None:
            now = time.time()
            self.seconds[name] = self.seconds.get(name, 0.0) + max(now - self._last, 0.0)
            self._last = now

    def end(self) -> None:
        """The first step has ended: log the phases, once."""
        if self._last is None:
            return
        self.lap("first step")
        self._last = None
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        log.info("started in %.1f s: %s", sum(self.seconds.values()), parts)
