"""The driven runs of a server: their logs of operations, written here, and their results, which the
ranks write.

A log has one writer at a time, over all servers of a folder. What is in memory of a run is a copy
of its files: a server that was killed goes on from them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from starlette.concurrency import run_in_threadpool

from jobs.serve.job_view import FINAL
from jobs.serve.requests import Refusal
from jobs.serve.steps.names import ClientId, absent
from jobs.serve.steps.sessions import RunFacts, Sessions
from jobs.serve.steps.upkeep.driven_jobs import last_operation
from trainer.errors import HeldError
from trainer.files.atomic import refusals
from trainer.operations.operation_log import (
    FOLDER,
    Kind,
    Operation,
    OperationConflict,
    OperationLog,
)
from trainer.operations.results import OperationResult, OperationResults

if TYPE_CHECKING:
    from jobs.serve.keeper import Keeper

GAP_S = 20.0  # an operation waits so long for the one before it, which may be on its way
POLL_S, IDLE_POLL_S = 0.003, 0.05  # between two looks at the results of a run that somebody awaits
ENDS_S = 2.0  # between two looks at whether the job of an awaited result has ended
MOST_OPEN = 256  # logs that stay open
COMPACT_EVERY = 64  # operations
COMPACT_BYTES = 64 << 20

log = logging.getLogger(__name__)


@dataclass(eq=False)
class OpenRun:
    """A run whose log this server writes, or whose results it reads."""

    facts: RunFacts
    folder: Path  # of the operations
    results: OperationResults
    log: OperationLog | None = None
    turn: asyncio.Condition = field(default_factory=asyncio.Condition)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    follower: asyncio.Task[None] | None = None
    num_waiting: int = 0
    users: int = 0
    since_compaction: int = 0
    guard: threading.Lock = field(default_factory=threading.Lock)

    def follow(self) -> int:
        """Read the results that are new; the number of the last one."""
        with self.guard:
            self.results.follow()
            return self.results.last_seq

    def result(self, seq: int) -> OperationResult | None:
        """The result of an operation, if it is there."""
        with self.guard:
            if seq > self.results.last_seq:
                self.results.follow()
            return self.results.get(seq)

    def writer(self) -> OperationLog:
        """The log, opened for writing. Refusal (503) while another server writes it."""
        with self.guard:
            if self.log is None:
                with refusals(self.folder):
                    self.folder.mkdir(parents=True, exist_ok=True)
                try:
                    self.log = OperationLog(self.folder)
                except HeldError:
                    text = f"Another server writes the operations of {self.facts.id}. Ask again."
                    raise Refusal(503, text, code="overloaded", retry_after_s=2) from None
            return self.log

    def compact(self) -> None:
        """Drop the operations that no state of the run needs any more."""
        if self.log is not None:
            self.since_compaction = 0
            freed = self.log.compact()
            if freed:
                log.info("%s: %d bytes of old operations dropped", self.facts.id, freed)

    def close(self) -> None:
        """Let another server write the log."""
        with self.guard:
            if self.log is not None:
                self.log.close()
                self.log = None


@dataclass
class DrivenRuns:
    """The driven runs that requests of this server use."""

    keeper: Keeper
    sessions: Sessions
    _open: OrderedDict[ClientId, OpenRun] = field(default_factory=OrderedDict[ClientId, OpenRun])
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def folder(self, facts: RunFacts) -> Path:
        """The run folder. Refusal (400) for a copy, which has none."""
        if facts.exp_id is None:
            text = f"{facts.id} holds copied weights and is not trained. Begin a run with them."
            raise Refusal(400, text)
        return self.keeper.folder.base.run(facts.exp_id).path

    def of(self, facts: RunFacts) -> OpenRun:
        """A run as this server has it open. Any thread may call this."""
        folder = self.folder(facts) / FOLDER
        with self._guard:
            run = self._open.pop(facts.id, None)
            if run is None:
                run = OpenRun(facts, folder, OperationResults(folder))
            self._open[facts.id] = run
            surplus = max(len(self._open) - MOST_OPEN, 0)
            every = [*self._open.items()][:-1]
            idle = [name for name, one in every if not one.users and not one.num_waiting]
            for name in idle[:surplus]:
                self._open.pop(name).close()
        return run

    def forget(self, facts: RunFacts) -> None:
        """Close a run that is being deleted."""
        with self._guard:
            run = self._open.pop(facts.id, None)
        if run is not None:
            run.close()

    def close(self) -> None:
        """Close all logs."""
        for run in self._open.values():
            run.close()
            if run.follower is not None:
                run.follower.cancel()
        self._open.clear()

    async def append(
        self,
        facts: RunFacts,
        seq: int,
        kind: Kind,
        fields: Mapping[str, Any],
        payload: bytes = b"",
        *,
        most_bytes: int,
    ) -> tuple[Operation, bool]:
        """Write an operation durably, after the one before it; whether it was sent for the first
        time. Refusal: 409 for another content under a number that was used, or when the operation
        before did not come; 507 when the log has no room.

        seq: the number in the log. most_bytes: of the log.
        """
        run = self.of(facts)
        run.users += 1
        try:
            writer = await run_in_threadpool(run.writer)
            async with run.turn:
                await self._await_turn(run, writer, seq)
                is_first = seq > writer.last_seq
                if is_first:
                    await run_in_threadpool(_make_room, run, writer, len(payload), most_bytes)
                try:
                    operation = await run_in_threadpool(writer.append, kind, seq, fields, payload)
                except OperationConflict as error:
                    raise Refusal(409, f"{facts.id}: {error}", code="operation_conflict") from None
                run.since_compaction += 1
                run.turn.notify_all()
        finally:
            run.users -= 1
        await run_in_threadpool(self._wake, facts)
        return operation, is_first

    def _wake(self, facts: RunFacts) -> None:
        """Let the keeper look at a run at once that does not run now."""
        job = None if facts.job is None else self.keeper.index.job(facts.job)
        if job is None or job["lathe"]["state"] != "running":
            self.keeper.poke()

    async def _await_turn(self, run: OpenRun, writer: OperationLog, seq: int) -> None:
        """Wait until an operation follows the last one. Refusal (409) after GAP_S."""
        try:
            with anyio.fail_after(GAP_S):
                while seq > writer.last_seq + 1:
                    await run.turn.wait()
        except TimeoutError:
            shift = run.facts.shift
            text = (
                f"Operation {seq - shift} of {run.facts.id} does not follow the last one, "
                f"{writer.last_seq - shift}. Send operation {writer.last_seq + 1 - shift} first."
            )
            raise Refusal(409, text, code="operation_gap", retry_after_s=1) from None

    def is_repeat(self, facts: RunFacts, seq: int) -> bool:
        """Whether an operation was acknowledged before."""
        return seq <= self.of(facts).writer().last_seq

    def refusal_of(self, facts: RunFacts, seq: int) -> str | None:
        """What an operation was refused for that was acknowledged before; None for any other."""
        run = self.of(facts)
        if seq > run.writer().last_seq:
            return None
        result = run.result(seq)
        if result is not None:
            return result.error if result.work.get("kind") == "refused" else None
        operation = next(run.writer().read(seq - 1), None)  # without a result it was not dropped
        if operation is None or operation.kind != "refused":
            return None
        return str(operation.fields["error"])

    async def end(self, facts: RunFacts, *, most_bytes: int) -> int:
        """Write the last operation of a run, if it has none yet; its number in the log."""
        run = self.of(facts)
        writer = await run_in_threadpool(run.writer)
        last = await run_in_threadpool(_last, writer)
        if last is not None and last.kind == "end":
            return last.seq
        seq = writer.last_seq + 1
        operation, _ = await self.append(facts, seq, "end", {}, most_bytes=most_bytes)
        return operation.seq

    async def result(self, facts: RunFacts, seq: int, *, within_s: float) -> OperationResult | None:
        """The result of an operation as soon as it is there; None when it is not within a time.
        Refusal (404) for an operation that was never sent.
        """
        run = self.of(facts)
        result = await run_in_threadpool(run.result, seq)
        if result is not None:
            return result
        if seq <= run.results.last_seq:  # the SDK takes it for lost
            text = f"The result of {facts.id}:{seq - facts.shift} is kept no more."
            raise Refusal(410, f"{text} Go on from a saved state.")
        await run_in_threadpool(self._check_sent, run, seq)
        run.num_waiting += 1
        if run.follower is None:
            run.follower = asyncio.create_task(self._follow(run))
        try:
            end, next_look = time.monotonic() + within_s, 0.0
            while True:
                result = await run_in_threadpool(run.result, seq)
                left_s = end - time.monotonic()
                if result is not None or left_s <= 0:
                    return result
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + ENDS_S
                    ended = await run_in_threadpool(self._end_of, facts, seq)
                    if ended is not None:
                        return ended
                async with run.news:
                    with anyio.move_on_after(min(left_s, ENDS_S)):
                        await run.news.wait_for(lambda: run.results.last_seq >= seq)
        finally:
            run.num_waiting -= 1

    def _check_sent(self, run: OpenRun, seq: int) -> None:
        """Return if an operation was acknowledged; else Refusal (404)."""
        last = last_operation(run.folder) if run.log is None else run.log.last_seq
        if seq > last:
            raise absent("request", f"{run.facts.id}:{seq - run.facts.shift}")

    def has_ended(self, facts: RunFacts) -> bool:
        """Whether the job of a run has ended for good."""
        job = None if facts.job is None else self.keeper.index.job(facts.job)
        return job is not None and job["status"] in FINAL

    def _end_of(self, facts: RunFacts, seq: int) -> OperationResult | None:
        """What an operation gives whose run has ended for good before it was its turn."""
        job = None if facts.job is None else self.keeper.index.job(facts.job)
        if job is None or job["status"] not in FINAL:
            return None
        result = self.of(facts).result(seq)
        if result is not None:
            return result
        trouble: dict[str, Any] = job["error"] or {}
        error = trouble.get("message") or f"it has {job['status']}"
        error = error.rstrip(".")
        text = f"The run has ended: {error}. Begin another one with weights that it has saved."
        fields = {"error": text, "category": "server"}
        return OperationResult(seq, fields, b"", time.time(), "")

    async def _follow(self, run: OpenRun) -> None:
        """Read the results of a run as they come, while somebody waits for one."""
        pause_s, last = POLL_S, run.results.last_seq
        try:
            while run.num_waiting:
                newest = await run_in_threadpool(run.follow)
                if newest != last:
                    pause_s, last = POLL_S, newest
                    async with run.news:
                        run.news.notify_all()
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 1.02, IDLE_POLL_S)  # a fiftieth of what was waited
        except Exception:
            log.exception("%s: its results cannot be read", run.facts.id)
        finally:
            run.follower = None


def _last(writer: OperationLog) -> Operation | None:
    """The last operation of a log; None of an empty one."""
    operations = [*writer.read(writer.last_seq - 1)]
    return operations[-1] if operations else None


def _make_room(run: OpenRun, writer: OperationLog, size: int, most_bytes: int) -> None:
    """Drop operations that are not needed where a log grows large. Refusal (507) where that is not
    enough.
    """
    is_due = run.since_compaction >= COMPACT_EVERY and writer.size_bytes() > COMPACT_BYTES
    if is_due or writer.size_bytes() + size > most_bytes:
        run.compact()
    if writer.size_bytes() + size > most_bytes:
        text = (
            f"The operations of {run.facts.id} since its last two states have {most_bytes} bytes, "
            "as many as may be kept to run them again. Save a state (save_state), or wait until "
            "the run has done what was sent, and send this again."
        )
        raise Refusal(507, text, code="insufficient_storage", retry_after_s=10)
