"""The signals that ask a run to stop."""

from __future__ import annotations

import signal
from typing import Any


class Preemption:
    """Whether this process was asked to stop.

    SIGTERM and SIGUSR1 set a flag, and do nothing else, however often they come.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before = {
            number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGUSR1)
        }

    def _ask(self, number: int, frame: Any) -> None:
        self.requested = True

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}
