"""How far a long piece of work is: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import time

from rich.console import Console

from trainer.telemetry.console import Bar, Lines

_EVERY_S = {Bar: 0.2, Lines: 10.0}


class Progress:
    """Counts things done out of a total, and tells their number a second and how long the rest
    takes.
    """

    def __init__(self, total: int, unit: str, console: Console | None = None) -> None:
        screen = console or Console()
        self._sink = (Bar if screen.is_terminal else Lines)(screen, total, unit=unit)
        self._total, self._unit, self._done = total, unit, 0
        self._began = self._told = time.monotonic()

    def add(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        now = time.monotonic()
        if self._done >= self._total or now - self._told >= _EVERY_S[type(self._sink)]:
            self._told = now
            each_s = (now - self._began) / self._done
            self._sink.log(
                self._done, {f"{self._unit}s_per_s": 1 / max(each_s, 1e-9), "step_s": each_s}
            )

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._sink.close(0)
