"""What a run has written down of its operations: their results, and the states to go on from."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.driven.model import loaded
from trainer.errors import CheckpointError, StorageError, UserError
from trainer.files.atomic import read_json
from trainer.operations.operation_log import FOLDER, OperationReader
from trainer.operations.results import LAYOUTS, OperationResult, ResultWriter, work_of
from trainer.runtime import distributed
from trainer.runtime.distributed import on_main

if TYPE_CHECKING:
    from trainer.driven.model import DrivenModel, Outcome
    from trainer.operations.operation_log import Operation

logger = logging.getLogger(__name__)

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
        on_main(self._complete)
        self._layouts: dict[str, Any] = {}
        if distributed.is_main():
            self._layouts = read_json(self.folder / FOLDER / LAYOUTS) or {}
        self._kept = self.after  # the last operation before the newest state
        self._kept_step = self.model.progress.step
        self._bytes = 0  # of the operations since then

    def _complete(self) -> None:
        """Write the result of a load_state behind whose state the process was killed."""
        assert self._results is not None, "rank 0 has them"
        if self._results.last_seq == self.after - 1 and self.after >= 0:
            operation = OperationReader(self.folder / FOLDER, after=self.after - 1).next()
            assert operation is not None, "the log goes back to the state before the newest"
            work = work_of(operation, time.time())
            self._results.append(self.after, loaded(operation), work=work)

    def skips(self, operation: Operation) -> bool:
        """Whether a replay leaves an operation out: one that only wrote files, which may be
        replaced or deleted by now; or one that failed, and might not fail now (the disk was full).
        """

        def look() -> bool:
            old = self._stored(operation.seq)
            if old is None:
                return False
            if operation.kind in ("save_state", "save_for_sampler"):
                return True
            return operation.kind in ("load_state", "end") and old.error is not None

        is_over = on_main(look)
        if is_over:
            logger.info("operation %d (%s) is done", operation.seq, operation.kind)
        return is_over

    def layout_of(self, operation: Operation) -> Any:
        """How the rows of an operation were packed that has its result already; None for another
        one, and for one whose run computed alone.
        """

        def look() -> Any:
            old = self._stored(operation.seq)
            return self._layouts.get(str(operation.seq)) if old is None else old.layout

        return on_main(look)

    def book(
        self,
        operation: Operation,
        outcome: Outcome | None,
        *,
        began: float = 0.0,
        layout: Mapping[str, Any] | None = None,
    ) -> None:
        """Write down what an operation gave, and a state where one is due. ReplayDiffers when it
        had another result.

        outcome: None, it was left out. began: seconds since 1970. layout: how its rows were packed
        with those of other runs.
        """
        self.after = operation.seq
        if outcome is not None:
            if operation.kind == "load_state" and "error" not in outcome[0]:
                # what was loaded may be deleted later: from here on it is in a state of the run
                self.keep()
                self.model.states.saves.wait()
            work = work_of(operation, began)
            on_main(lambda: self._write(operation.seq, outcome, work=work, layout=layout))
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

    def _stored(self, seq: int) -> OperationResult | None:
        assert self._results is not None, "rank 0 has them"
        return self._results.get(seq)

    def _write(self, seq: int, outcome: Outcome, **more: Mapping[str, Any] | None) -> None:
        self.model.tell()
        fields, payload = outcome
        old = self._stored(seq)
        if old is not None and old.error is not None and "error" in fields:
            return  # refused then and now, perhaps in other words
        assert self._results is not None, "rank 0 has them"
        self._results.append(seq, fields, payload, **more)


def outcome_of(action: Callable[[], Outcome]) -> Outcome:
    """What an operation gives: the error of a refused one is its result."""
    try:
        return action()
    except StorageError as error:
        return {"error": str(error), "category": "server"}, b""
    except (UserError, CheckpointError) as error:
        return {"error": str(error), "category": "user"}, b""
