"""What a run has written down of its operations: their results, and the states to go on from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import CheckpointError, StorageError, UserError
from trainer.operations.operation_log import FOLDER
from trainer.operations.results import OperationResult, ResultWriter
from trainer.runtime import distributed
from trainer.runtime.distributed import on_main

if TYPE_CHECKING:
    from trainer.driven.model import DrivenModel, Outcome
    from trainer.operations.operation_log import Operation

logger = logging.getLogger(__name__)

# What needs the disk: a disk that refused then may not refuse now.
_OF_DISK = ("save_state", "save_for_sampler", "load_state")
MOST_BYTES = 64 << 20  # of operations that a run may have to run again


@dataclass
class Account:
    """The results and states of one run. Every method is a collective."""

    model: DrivenModel
    folder: Path  # of the run
    after: int  # the last operation that is in the weights; -1: none
    every: int  # optim_steps between two states

    def __post_init__(self) -> None:
        self._results = ResultWriter(self.folder / FOLDER) if distributed.is_main() else None
        self._kept = self.after  # the last operation before the newest state
        self._kept_step = self.model.progress.step
        self._bytes = 0  # of the operations since then

    def skips(self, operation: Operation) -> bool:
        """Whether an operation that needs the disk failed before: then it changed nothing."""
        if operation.kind not in _OF_DISK:
            return False
        is_failure = on_main(lambda: self._is_failure(operation.seq))
        if is_failure:
            logger.info("operation %d failed before, and changed nothing", operation.seq)
        return is_failure

    def layout_of(self, operation: Operation) -> Any:
        """How the rows of an operation were packed that has its result already; None for another
        one, and for one whose run computed alone.
        """

        def look() -> Any:
            old = self._stored(operation.seq)
            return None if old is None else old.layout

        return on_main(look)

    def book(
        self,
        operation: Operation,
        outcome: Outcome | None,
        layout: Mapping[str, Any] | None = None,
    ) -> None:
        """Write down what an operation gave, and a state where one is due. ReplayDiffers when it
        had another result.

        outcome: None, it was left out. layout: how its rows were packed with those of other runs.
        """
        if outcome is not None:
            on_main(lambda: self._write(operation.seq, outcome, layout))
        self.after = operation.seq
        self._bytes += len(operation.payload)
        steps = self.model.progress.step - self._kept_step
        is_due = steps >= self.every or self._bytes > MOST_BYTES
        if is_due or operation.kind in ("save_state", "end"):
            self.keep()

    def keep(self) -> None:
        """Write a state behind the last operation, unless a gradient is pending: then the state
        before it is the one to go on from.
        """
        if self.model.has_gradient or self.after == self._kept:
            self.model.states.saves.wait()
            return
        self.model.states.keep(self.model.progress, self.after)
        self._kept, self._kept_step, self._bytes = self.after, self.model.progress.step, 0

    def close(self) -> None:
        """Let another process write the results."""
        if self._results is not None:
            self._results.close()

    def _is_failure(self, seq: int) -> bool:
        old = self._stored(seq)
        return old is not None and old.error is not None

    def _stored(self, seq: int) -> OperationResult | None:
        assert self._results is not None, "rank 0 has them"
        return self._results.get(seq)

    def _write(self, seq: int, outcome: Outcome, layout: Mapping[str, Any] | None) -> None:
        fields, payload = outcome
        old = self._stored(seq)
        if old is not None and old.error is not None and "error" in fields:
            return  # refused then and now, perhaps in other words
        assert self._results is not None, "rank 0 has them"
        self._results.append(seq, fields, payload, layout)


def outcome_of(action: Callable[[], Outcome]) -> Outcome:
    """What an operation gives: the error of a refused one is its result."""
    try:
        return action()
    except StorageError as error:
        return {"error": str(error), "category": "server"}, b""
    except (UserError, CheckpointError) as error:
        return {"error": str(error), "category": "user"}, b""
