"""The signals that ask a run to stop."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)

# Ctrl-C, a closed terminal, and what schedulers send.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asked this process to stop, either where there is nothing to save or during an
    evaluation. It is no Exception, because code that catches Exception means errors.
    """


class Preemption:
    """Whether this process was asked to stop.

    A signal sets a flag, however often it comes; the loop looks at it between steps and saves.
    Inside `nothing_to_save` the first one raises Stopped at once. A second Ctrl-C leaves without
    saving. A signal that is ignored (nohup) stays so.
    """

    def __init__(self) -> None:
        self.requested = False
        self.number: int | None = None  # of the signal that came first
        self._has_nothing_to_save = False
        self._teller: threading.Thread | None = None
        self._before = {
            number: signal.signal(number, self._ask)
            for number in SIGNALS
            if signal.getsignal(number) != signal.SIG_IGN
        }

    def _ask(self, number: int, frame: Any) -> None:
        if self.requested:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.requested, self.number = True, number
        # In another thread: this one may be writing a log line, and hold the lock for that.
        self._teller = threading.Thread(target=_say, args=(number, self._has_nothing_to_save))
        self._teller.start()
        if self._has_nothing_to_save:
            raise Stopped

    @contextmanager
    def nothing_to_save(self) -> Iterator[None]:
        """Inside, before the first step, a signal ends the block by Stopped."""
        if self.requested:
            raise Stopped
        self._has_nothing_to_save = True
        try:
            yield
        finally:
            self._has_nothing_to_save = False

    def close(self) -> None:
        """Restore the earlier signal handlers, after the log line about a signal is written."""
        if self._teller is not None:
            self._teller.join()
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}


def _say(number: int, has_nothing_to_save: bool) -> None:
    name = signal.Signals(number).name
    if has_nothing_to_save:
        log.warning("%s: stopping before the first step; the same command goes on", name)
    else:
        again = "; again to leave without" if number == signal.SIGINT else ""
        log.warning("%s: saving%s", name, again)
