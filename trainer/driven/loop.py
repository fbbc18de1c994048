"""The loop of a driven run: follow the log, run each operation, write its result down."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.driven.model import loaded
from trainer.driven.turns import OperationTurns
from trainer.errors import CheckpointError, StorageError, UserError
from trainer.operations.operation_log import FOLDER, OperationReader
from trainer.operations.results import OperationResult, ResultWriter, work_of
from trainer.runtime import distributed
from trainer.runtime.distributed import on_main

if TYPE_CHECKING:
    from trainer.driven.model import DrivenModel
    from trainer.operations.operation_log import Operation
    from trainer.runtime.preemption import Preemption
    from trainer.training.run import End

logger = logging.getLogger(__name__)

BEAT_S = 15.0  # between two status.json of an idle run
MOST_BYTES = 64 << 20  # of operations that a run may have to run again


@dataclass
class DrivenLoop:
    """The loop of one run. Every method is a collective."""

    model: DrivenModel
    folder: Path  # of the run
    after: int  # the last operation that is in the weights; -1: none
    preemption: Preemption
    every: int  # optim_steps between two states
    put_aside_s: float | None  # idle seconds after which the run is put aside
    beat: Callable[[], None]  # writes status.json

    def __post_init__(self) -> None:
        self._results = ResultWriter(self.folder / FOLDER) if distributed.is_main() else None
        on_main(self._complete)
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

    def follow(self) -> End:
        """Run operations until the run ends, is put aside, or is asked to stop."""
        turns = OperationTurns(self.folder / FOLDER, after=self.after, preemption=self.preemption)
        beaten_at = time.monotonic()
        try:
            while True:
                turn = turns.next()
                if turn.is_stopping:
                    self._keep()
                    return "preempted"
                if turn.operation is not None:
                    self._run(turn.operation)
                    turns.worked()
                elif self.model.has_ended:
                    return "succeeded"
                elif self.put_aside_s is not None and turn.idle_s > self.put_aside_s:
                    self._keep()
                    return "paused"
                if time.monotonic() - beaten_at > BEAT_S:
                    beaten_at = time.monotonic()
                    self.beat()
        finally:
            if self._results is not None:
                self._results.close()

    def _run(self, operation: Operation) -> None:
        if on_main(lambda: self._is_over(operation)):
            logger.info("operation %d (%s) is done", operation.seq, operation.kind)
            self.after = operation.seq
        else:
            began = time.time()
            fields, payload = self._outcome(operation)
            self.after = operation.seq
            if operation.kind == "load_state" and "error" not in fields:
                # what was loaded may be deleted later: from here on it is in a state of the run
                self._keep()
                self.model.states.saves.wait()
            on_main(lambda: self._write(operation, began, fields, payload))
        self._bytes += len(operation.payload)
        steps = self.model.progress.step - self._kept_step
        is_due = steps >= self.every or self._bytes > MOST_BYTES
        if is_due or operation.kind in ("save_state", "end"):
            self._keep()

    def _is_over(self, operation: Operation) -> bool:
        """Whether a replay leaves an operation out: one that only writes files, which may be
        replaced or deleted by now, or that failed where a disk may not refuse any more.
        """
        old = self._stored(operation.seq)
        if old is None:
            return False
        is_of_disk = operation.kind in ("save_state", "save_for_sampler")
        return is_of_disk or (operation.kind == "load_state" and old.error is not None)

    def _outcome(self, operation: Operation) -> tuple[dict[str, object], bytes]:
        try:
            return self.model.do(operation)
        except StorageError as error:
            return {"error": str(error), "category": "server"}, b""
        except (UserError, CheckpointError) as error:
            return {"error": str(error), "category": "user"}, b""

    def _stored(self, seq: int) -> OperationResult | None:
        assert self._results is not None, "rank 0 has them"
        return self._results.get(seq)

    def _write(
        self, operation: Operation, began: float, fields: dict[str, object], payload: bytes
    ) -> None:
        """ReplayDiffers when the operation had another result."""
        old = self._stored(operation.seq)
        if old is not None and old.error is not None and "error" in fields:
            return  # refused then and now, perhaps in other words
        assert self._results is not None, "rank 0 has them"
        self._results.append(operation.seq, fields, payload, work=work_of(operation, began))

    def _keep(self) -> None:
        """Write a state behind the last operation, unless a gradient is pending: then the state
        before it is the one to go on from.
        """
        if self.model.has_gradient or self.after == self._kept:
            self.model.states.saves.wait()
            return
        self.model.states.keep(self.model.progress, self.after)
        self._kept, self._kept_step, self._bytes = self.after, self.model.progress.step, 0
