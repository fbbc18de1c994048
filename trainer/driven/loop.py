"""The loop of a driven run: follow the log, run each operation, write its result down."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.driven.account import Account, outcome_of
from trainer.driven.turns import OperationTurns
from trainer.operations.operation_log import FOLDER

if TYPE_CHECKING:
    from trainer.operations.operation_log import Operation
    from trainer.runtime.preemption import Preemption
    from trainer.training.run import End

BEAT_S = 15.0  # between two status.json of an idle run


@dataclass
class DrivenLoop:
    """The loop of one run. Every method is a collective."""

    account: Account
    preemption: Preemption
    put_aside_s: float | None  # idle seconds after which the run is put aside
    beat: Callable[[], None]  # writes status.json

    def follow(self) -> End:
        """Run operations until the run ends, is put aside, or is asked to stop."""
        account = self.account
        turns = OperationTurns(
            account.folder / FOLDER, after=account.after, preemption=self.preemption
        )
        beaten_at = time.monotonic()
        try:
            while True:
                turn = turns.next()
                if turn.is_stopping:
                    account.keep()
                    return "preempted"
                if turn.operation is not None:
                    self._run(turn.operation)
                    turns.worked()
                elif account.model.has_ended:
                    return "succeeded"
                elif self.put_aside_s is not None and turn.idle_s > self.put_aside_s:
                    account.keep()
                    return "paused"
                if time.monotonic() - beaten_at > BEAT_S:
                    beaten_at = time.monotonic()
                    self.beat()
        finally:
            account.close()

    def _run(self, operation: Operation) -> None:
        if self.account.skips(operation):
            return self.account.book(operation, None)
        began, do = time.time(), functools.partial(self.account.model.do, operation)
        self.account.book(operation, outcome_of(do), began=began)
