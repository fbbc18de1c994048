"""What all ranks do next: rank 0 follows the log, and tells the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.operations.operation_log import Operation, OperationReader
from trainer.runtime import distributed
from trainer.runtime.preemption import Preemption

BUSY_S, IDLE_S = 0.002, 0.02  # between two looks at the log
BUSY_FOR_S = 2.0  # after an operation
TURN_S = 0.25  # so long rank 0 looks before it tells the others that there is nothing


@dataclass(frozen=True)
class OperationTurn:
    """One turn of the loop. operation: None, there is none yet. idle_s: seconds since the last."""

    operation: Operation | None
    is_stopping: bool  # a signal asked some rank to stop
    idle_s: float


class OperationTurns:
    """The turns of a run, the same on all ranks."""

    def __init__(self, folder: Path, *, after: int, preemption: Preemption) -> None:
        """folder: the run's `operations/`; after: the last operation that is in the weights."""
        self._reader = OperationReader(folder, after=after) if distributed.is_main() else None
        self._preemption = preemption
        self._worked_at = time.monotonic()

    def next(self) -> OperationTurn:
        """The next operation, or nothing for a moment. A collective."""
        found: list[Operation] = []

        def look() -> dict[str, Any]:
            assert self._reader is not None, "rank 0 has one"
            operation = _wait(self._reader.next, self._worked_at, self._preemption)
            idle_s = time.monotonic() - self._worked_at
            if operation is None:
                return {"idle_s": idle_s}
            found.append(operation)
            self._worked_at = time.monotonic()
            header = {key: one for key, one in vars(operation).items() if key != "payload"}
            return {"idle_s": idle_s, "header": header}

        is_asked = torch.tensor(int(self._preemption.requested))
        is_stopping = int(distributed.total(is_asked)) > 0
        if is_stopping:
            return OperationTurn(None, True, 0.0)
        told = distributed.on_main(look)
        if "header" not in told:
            return OperationTurn(None, False, told["idle_s"])
        payload = distributed.broadcast_bytes(found[0].payload if found else b"")
        return OperationTurn(Operation(**told["header"], payload=payload), False, told["idle_s"])

    def worked(self) -> None:
        """Count idle time from now on."""
        self._worked_at = time.monotonic()


def _wait(
    look: Callable[[], Operation | None], worked_at: float, preemption: Preemption
) -> Operation | None:
    until = time.monotonic() + TURN_S
    while True:
        operation = look()
        now = time.monotonic()
        if operation is not None or now > until or preemption.requested:
            return operation
        time.sleep(BUSY_S if now - worked_at < BUSY_FOR_S else IDLE_S)
