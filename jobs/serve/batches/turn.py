"""One batch for a while: its lines are answered, until it is done or gives way to others."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool

from jobs.serve.batches.asking import TOGETHER, Asking, LineAnswer
from jobs.serve.batches.folder import Batch, BatchCounts, BatchFolder, ids_of_lines
from jobs.serve.batches.lines import Values, requests_of
from trainer.files.atomic import refusals

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAUSES_S = (1.0, 5.0, 20.0, 60.0)  # before a busy server, or one with a fault, is asked again
WRITE_S = 1.0  # between two writings of progress.json


@dataclass
class BatchTurn:
    """The work on one batch, by one process at a time. gives_way: whether another batch is next."""

    batch: Batch
    folder: BatchFolder
    asking: Asking
    gives_way: Callable[[], bool]
    counts: BatchCounts = field(default_factory=BatchCounts)
    _ids: set[str] = field(default_factory=set[str])
    _told_at: float = 0.0

    async def is_done(self) -> bool:
        """Answer lines that have no answer yet; returns whether all of them have one. StorageError.

        A line whose answer ended the model's process is asked again alone, so that the lines that
        were asked with it have their own answers.
        """
        await run_in_threadpool(self.read)
        requests = requests_of(self.folder.input, self.asking.keeper.config)
        left = (one for one in requests if one["custom_id"] not in self._ids)
        alone: list[Values] = []
        tasks: dict[asyncio.Task[LineAnswer], Values] = {}
        try:
            while not self._is_over():
                if not self.gives_way():
                    self._start(left, tasks)
                if not tasks:
                    break
                done, _ = await asyncio.wait(
                    tasks, timeout=WRITE_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    request, answer = tasks.pop(task), task.result()
                    if answer.has_ended_worker:
                        alone.append(request)
                    else:
                        await run_in_threadpool(self._write, request, answer)
            is_at_end = not tasks and next(left, None) is None
            for request in alone:
                if self._is_over():
                    return False
                await run_in_threadpool(self._write, request, await self._answer(request))
            return is_at_end and not self._is_over()
        finally:
            await _end(tasks)
            await run_in_threadpool(self._tell)

    def read(self) -> None:
        """Read which lines have an answer. StorageError."""
        answered = ids_of_lines(self.folder.output)
        refused = ids_of_lines(self.folder.errors)
        self.counts = BatchCounts(completed=len(answered), failed=len(refused))
        self._ids = {*answered, *refused}

    def is_answered(self, custom_id: str) -> bool:
        """Whether a line has an answer."""
        return custom_id in self._ids

    def _is_over(self) -> bool:
        """Whether nobody waits for its answers any more."""
        return self.folder.is_cancelled() or self.batch.has_expired

    def _start(self, left: Iterator[Values], tasks: dict[asyncio.Task[LineAnswer], Values]) -> None:
        """Ask as many lines as are asked together."""
        while len(tasks) < TOGETHER and (request := next(left, None)) is not None:
            tasks[asyncio.create_task(self._answer(request))] = request

    async def _answer(self, request: Values) -> LineAnswer:
        """The answer to a line; a busy server is asked again."""
        for pause_s in PAUSES_S:
            answer = await self.asking.ask(self.batch, request["body"])
            if not answer.may_pass:
                return answer
            await asyncio.sleep(pause_s)
        return await self.asking.ask(self.batch, request["body"])

    def _write(self, request: Values, answer: LineAnswer) -> None:
        """Add a line to the answers, or to the errors. StorageError, and no line is added."""
        path = self.folder.output if answer.is_good else self.folder.errors
        append(path, answer.line(request["custom_id"]))
        self._ids.add(request["custom_id"])
        name = "completed" if answer.is_good else "failed"
        self.counts = self.counts.model_copy(update={name: getattr(self.counts, name) + 1})
        if time.monotonic() - self._told_at > WRITE_S:
            self._tell()

    def _tell(self) -> None:
        self._told_at = time.monotonic()
        self.folder.write_counts(self.counts)


def append(path: Path, line: dict[str, Any]) -> None:
    """Add one line to a file, or nothing. StorageError."""
    # without a buffer, which would hold on to what a full disk refused and write it later
    with refusals(path), path.open("ab", buffering=0) as file:
        start, rest = file.seek(0, 2), memoryview(json.dumps(line).encode() + b"\n")
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(start)
            raise


async def _end(tasks: dict[asyncio.Task[LineAnswer], Values]) -> None:
    """End what is in progress: its lines have no answer, and are asked again later."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
