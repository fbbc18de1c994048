"""Server-sent events: cards of runs and jobs that changed, new metrics of watched runs, and which
folders cannot be read.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
from starlette.concurrency import run_in_threadpool

from jobs.errors import for_client
from jobs.report.text import plain
from jobs.serve.live.series import lines_since

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.report.curves import Place
    from jobs.serve.keeper import Keeper

EVERY_S = 1.0
BEAT_S = 15.0  # a proxy may close a connection that is silent for longer
LONGEST_S = 3600.0  # then the page connects again, and its token is checked again


@dataclass
class Watch:
    """The stream of one page: what it watches, and what it has received."""

    keeper: Keeper
    owner: str | None
    since: int
    runs: dict[Path, Place]  # metrics.jsonl -> how far
    _unreadable: dict[str, str] | None = None  # as the page was told

    async def events(self, turns: asyncio.Semaphore) -> AsyncGenerator[str]:
        """Events until the server stops or the page closes.

        turns: limits how many streams use a thread at a time; the other threads are left for the
        routes.
        """
        began = spoken = time.monotonic()
        while not self.keeper.is_stopped and time.monotonic() - began < LONGEST_S:
            async with turns:
                news = await run_in_threadpool(self.news)
            if not news and time.monotonic() - spoken > BEAT_S:
                news = [": still here\n\n"]
            for text in news:
                spoken = time.monotonic()
                yield text
            await anyio.sleep(EVERY_S)

    def news(self) -> list[str]:
        """The events since the last call."""
        events: list[str] = []
        tick = self.keeper.index.tick()
        if tick != self.since:
            # a new index counts from 0 again
            since = self.since if tick > self.since else -1
            events.append(f"event: board\ndata: {self.keeper.index.board(since, self.owner)}\n\n")
            self.since = tick
        unreadable = self._unreadable_now()
        if unreadable != self._unreadable:
            events.append(f"event: unreadable\ndata: {json.dumps(plain(unreadable))}\n\n")
            self._unreadable = unreadable
        for path, place in self.runs.items():
            lines, self.runs[path] = lines_since(path, place)
            if lines is None or lines:
                document = {"id": path.parent.name, "lines": lines}
                events.append(f"event: metrics\ndata: {json.dumps(document)}\n\n")
        return events

    def _unreadable_now(self) -> dict[str, str]:
        """The folders that cannot be read, by name, of those that the client sees."""
        reasons = self.keeper.unreadable.reasons
        if self.owner is None or not reasons:
            return reasons
        own, base = self.keeper.index.ids_of(self.owner), self.keeper.folder.base.path
        return {name: for_client(reason, base) for name, reason in reasons.items() if name in own}
