"""How long a start took until its first step was done, and where that went."""

from __future__ import annotations

import logging
import time

import psutil

log = logging.getLogger(__name__)


class Startup:
    """Seconds of this process since it began, by what was done in them, up to the first step."""

    def __init__(self) -> None:
        self._last: float | None = psutil.Process().create_time()  # None: the first step is done
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """What was done since the lap before was this; nothing once the first step is done."""
        if self._last is not None:
            now = time.time()
            self.seconds[name] = self.seconds.get(name, 0.0) + max(now - self._last, 0.0)
            self._last = now

    def end(self) -> None:
        """The first step is done: it is told, once."""
        if self._last is None:
            return
        self.lap("first step")
        self._last = None
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        log.info("started in %.1f s: %s", sum(self.seconds.values()), parts)
