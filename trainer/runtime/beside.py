"""Work beside the run: one piece at a time, on every rank, in a thread whose exchanges between
ranks have a group of their own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from trainer.runtime import distributed

log = logging.getLogger(__name__)

NAME = "beside"  # of the thread
GIVEN_UP_S = 5.0  # how long somebody who leaves at once waits for it all the same


class Beside:
    """At most one piece of work that is under way while the run goes on.

    Writing files and hashing them leave the interpreter to the run. The ranks' exchanges go over
    gloo, whatever the run computes with: a collective of the run may be on its way at any moment.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begin `work` once the piece before is done. A collective: every rank calls it, and what
        the piece before failed with is raised, the same on all ranks.
        """
        self.wait()
        distributed.make_side_group()
        self._thread = threading.Thread(target=self._run, args=(work,), name=NAME, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when nothing is under way, or after so many seconds.

        Raises what the work failed with.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def leave(self, error: BaseException) -> None:
        """Wait, for a run that ends by `error`: only a little when somebody wants to leave at once.
        What the work failed with is told and not raised, for `error` is.
        """
        try:
            self.wait(GIVEN_UP_S if isinstance(error, KeyboardInterrupt) else None)
        except Exception as failure:
            log.warning("%s", failure)

    def _run(self, work: Callable[[], object]) -> None:
        try:
            with distributed.on_side_group():
                work()
        except BaseException as error:
            self._error = error  # the next start() or wait() raises it
