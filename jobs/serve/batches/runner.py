"""The runner answers batches in the server's event loop, an owner after the other.

`batch_models` of them are worked on at a time, each for a while if others wait. Everything is
decided from files, and may be done again by another server, or by this one after it was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from jobs.errors import is_transient, kind_of, reason_for_client, reason_of
from jobs.record.paths import is_exp_id
from jobs.serve.access import Client
from jobs.serve.batches.asking import Asking
from jobs.serve.batches.ends import fail, finish
from jobs.serve.batches.folder import Batch, BatchCheck, BatchFolder, BatchFolders, EndStatus
from jobs.serve.batches.lines import LineCheck
from jobs.serve.batches.turn import BatchTurn
from jobs.serve.dialect.names import model_of

if TYPE_CHECKING:
    from jobs.serve.keeper import Keeper

SLICE_S = 30.0  # after which a batch gives way to another one
LOOK_S = 1.0
AGAIN_S = 15.0  # until a batch is tried again that a disk or another server held up
THE_BATCHES = "the batches"  # among the troubles of the server

log = logging.getLogger(__name__)


@dataclass
class BatchRunner:
    """Works on the batches of one server."""

    keeper: Keeper
    batches: BatchFolders
    asking: Asking
    _busy: set[str] = field(default_factory=set[str])  # ids of the batches that are worked on
    _turns: Counter[str] = field(default_factory=Counter[str])  # owner -> the number of his last
    _last: dict[str, float] = field(default_factory=dict[str, float])  # id -> when it had its turn
    _not_before: dict[str, float] = field(default_factory=dict[str, float])
    _poked: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Work on batches until the task is cancelled."""
        # without models, batches of before can still be cancelled, and expire
        slots = [self._serve() for _ in range(max(self.keeper.config.batch_models, 1))]
        try:
            await asyncio.gather(*slots)
        finally:
            await self.asking.workers.stop()

    def poke(self) -> None:
        """Look at the batches at once."""
        self._poked.set()

    async def _serve(self) -> None:
        failing = self.keeper.reader.failing
        while True:
            is_idle = True
            try:
                is_idle = not await self._take_turn()
            except Exception as error:  # of any kind: the next look may go better
                reason = reason_of(error, self.keeper.folder.batches)
                failing.note(THE_BATCHES, reason, kind=kind_of(error), is_transient=True)
            else:
                failing.end(THE_BATCHES)
            if is_idle:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._poked.wait(), LOOK_S)
                self._poked.clear()

    async def _take_turn(self) -> bool:
        """Work on the batch whose turn it is; returns whether there is one. OSError."""
        one = self._next(await run_in_threadpool(lambda: list(self.batches.open())))
        if one is None:
            if not self._busy:  # a model that nobody asks takes no memory
                await self.asking.workers.stop()
            return False
        batch, folder = one
        self._busy.add(batch.id)
        self._turns[batch.owner] = max(self._turns.values(), default=0) + 1
        self._last[batch.id] = time.monotonic()
        try:
            await self._advance(batch, folder)
            self.keeper.reader.failing.end(batch.id)
        except Exception as error:  # of any kind: the batches of others go on
            self._not_before[batch.id] = time.monotonic() + AGAIN_S
            await run_in_threadpool(self._note, batch, folder, error)
        finally:
            self._busy.discard(batch.id)
        return True

    def _note(self, batch: Batch, folder: BatchFolder, error: Exception) -> None:
        """Note why a batch cannot go on; it ends if that does not pass by itself. StorageError."""
        log.debug("%s", batch.id, exc_info=error)
        reason, may_pass = reason_of(error, folder.path), is_transient(error)
        failing = self.keeper.reader.failing
        if not failing.note(batch.id, reason, kind=kind_of(error), is_transient=may_pass):
            return
        with folder.alone() as is_ours:
            if is_ours and not folder.has_ended():
                reason = reason_for_client(error, folder.path, self.keeper.folder.base.path)
                fail(self.keeper, self._turn(batch, folder), reason)
        failing.end(batch.id)

    def _next(self, open_ones: list[tuple[Batch, BatchFolder]]) -> tuple[Batch, BatchFolder] | None:
        """The batch whose turn it is: of the owner whose last turn was the longest ago, the one
        that has waited the longest.
        """
        at = time.monotonic()
        free = [
            (batch, folder)
            for batch, folder in open_ones
            if batch.id not in self._busy and self._not_before.get(batch.id, at) <= at
        ]
        return min(
            free,
            key=lambda one: (
                self._turns[one[0].owner],
                self._last.get(one[0].id, 0.0),
                one[0].created_at,
            ),
            default=None,
        )

    async def _advance(self, batch: Batch, folder: BatchFolder) -> None:
        """Work on one batch for a while. StorageError."""
        with folder.alone() as is_ours:
            if not is_ours:
                self._not_before[batch.id] = time.monotonic() + AGAIN_S
                return
            if folder.has_ended():  # by another server, since it was looked at
                return
            turn, check = self._turn(batch, folder), folder.read_check()
            if check is None and not folder.is_cancelled():
                check = await run_in_threadpool(self._check, batch, folder)
            if check is not None and check.mistakes:
                await run_in_threadpool(fail, self.keeper, turn, None)
                return
            is_done = False
            if check is not None and not folder.is_cancelled() and not batch.has_expired:
                if not self.keeper.config.batch_models:
                    self._not_before[batch.id] = time.monotonic() + AGAIN_S
                    return
                is_done = await turn.is_done()
            status: EndStatus | None = "completed" if is_done else None
            if status is None and folder.is_cancelled():
                status = "cancelled"
            elif status is None and batch.has_expired:
                status = "expired"
            if status is not None:
                await run_in_threadpool(finish, self.keeper, turn, status)

    def _turn(self, batch: Batch, folder: BatchFolder) -> BatchTurn:
        """The work on a batch, which gives way when it has had its time and another one waits."""
        until = time.monotonic() + SLICE_S

        def is_over() -> bool:
            nonlocal until
            if time.monotonic() < until:
                return False
            until += LOOK_S  # it looks at the folders no more often
            return any(one.id not in self._busy for one, _ in self.batches.open())

        return BatchTurn(batch, folder, self.asking, is_over)

    def _check(self, batch: Batch, folder: BatchFolder) -> BatchCheck:
        """Check the lines of a batch, and write down what is wrong with them. StorageError."""
        client = Client(batch.owner, batch.role)

        def has_model(name: str) -> bool:
            return is_exp_id(name) or model_of(self.keeper, name, client.sees) is not None

        check = LineCheck(batch.endpoint, self.keeper.config, has_model).of(folder.input)
        folder.write_check(check)
        return check
