"""One of the runs that a worker computes together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainer.driven.account import Account, outcome_of
from trainer.driven.model import FORWARD, FORWARD_BACKWARD
from trainer.driven.together.adapter_set import AdapterSet
from trainer.driven.together.rounds import refuse_other_world
from trainer.driven.together.running_pass import RunningPass
from trainer.errors import CheckpointError, UserError
from trainer.operations.operation_log import FOLDER, OperationReader
from trainer.runtime import distributed
from trainer.runtime.beside import Beside

if TYPE_CHECKING:
    from trainer.driven.model import DrivenModel
    from trainer.errors import LatheError
    from trainer.operations.operation_log import Operation
    from trainer.training.run import End


@dataclass
class SharedRun:
    """A run with its adapters, its engine, its log and its record."""

    name: str
    account: Account
    adapters: AdapterSet
    put_aside_s: float | None  # idle seconds after which the run is put aside
    beat: Callable[[], None]  # writes status.json
    leave: Callable[[End | LatheError], None]  # closes all it has; a collective
    served: int = 0  # tokens
    current: RunningPass | None = None
    worked_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        folder = self.account.folder / FOLDER
        after = self.account.after
        self.reader = OperationReader(folder, after=after) if distributed.is_main() else None

    @property
    def model(self) -> DrivenModel:
        return self.account.model

    def is_idle(self, now: float) -> bool:
        """Whether it has waited for an operation too long."""
        if self.current is not None or self.put_aside_s is None:
            return False
        return now - self.worked_at > self.put_aside_s

    def begin(self, operation: Operation) -> None:
        """Run an operation; a pass over rows is only begun. A collective."""
        if self.account.skips(operation):
            return self._book(operation, None)
        if operation.kind not in (FORWARD, FORWARD_BACKWARD):
            return self._book(operation, lambda: self.model.do(operation))
        try:
            of = self.model.rows_pass(operation)
        except (UserError, CheckpointError) as error:
            refusal = error
            return self._book(operation, lambda: _raise(refusal))
        recorded = self.account.layout_of(operation)
        if recorded is not None:
            refuse_other_world(recorded, world=distributed.world(), seq=operation.seq)
        self.current = RunningPass(operation, of, recorded, time.time())
        return None

    def finish(self) -> None:
        """Write down what the pass gave whose rows are all done. A collective."""
        current, self.current = self.current, None
        assert current is not None, "the loop has looked"
        if current.of.with_backward:
            current.give_gradient(self.model.engine, self.adapters)
        result = current.of.result(current.ordered_logps())
        outcome = self.model.outcome_of_pass(current.of, result)
        layout = {"world": distributed.world(), "rounds": current.rounds}
        self.account.book(current.operation, outcome, began=current.began, layout=layout)
        self.worked_at = time.monotonic()

    def _book(self, operation: Operation, action: Callable[[], object] | None) -> None:
        began = time.time()
        outcome = None if action is None else outcome_of(action)  # pyright: ignore
        self.account.book(operation, outcome, began=began)
        self.worked_at = time.monotonic()


def _raise(error: Exception) -> object:
    raise error


class SharedSaves(Beside):
    """The saves of one run, in the one thread of all runs of a worker. An error is that of the run
    whose state was not saved.
    """

    def __init__(self, thread: Beside) -> None:
        super().__init__()
        self._shared = thread

    def start(self, work: Callable[[], object]) -> None:
        self.wait()

        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._shared.start(guarded)

    def wait(self, timeout_s: float | None = None) -> None:
        self._shared.wait(timeout_s)
        super().wait()
