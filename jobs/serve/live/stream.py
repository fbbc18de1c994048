"""Server-sent events: the lines of runs and jobs that changed, and metrics of the watched runs."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
from starlette.concurrency import run_in_threadpool

from jobs.serve.live.series import lines_since

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.report.curves import Place
    from jobs.serve.keeper import Keeper

EVERY_S = 1.0
BEAT_S = 15.0  # a proxy may end what says nothing for longer
LONGEST_S = 3600.0  # then the page asks anew, and its token is looked at again


@dataclass
class Watch:
    """What one page is told, and how far it has been told."""

    keeper: Keeper
    owner: str | None
    since: int
    runs: dict[Path, Place]  # metrics.jsonl -> how far

    async def events(self) -> AsyncGenerator[str]:
        """Events until the server stops, or the page goes."""
        began = spoken = time.monotonic()
        while not self.keeper.is_stopped and time.monotonic() - began < LONGEST_S:
            found = await run_in_threadpool(self.news)
            if not found and time.monotonic() - spoken > BEAT_S:
                found = [": still here\n\n"]
            for text in found:
                spoken = time.monotonic()
                yield text
            await anyio.sleep(EVERY_S)

    def news(self) -> list[str]:
        """What has changed since it was asked last."""
        found: list[str] = []
        tick = self.keeper.index.tick()
        if tick != self.since:
            # an index that was made anew counts from the start
            since = self.since if tick > self.since else -1
            found.append(f"event: board\ndata: {self.keeper.index.board(since, self.owner)}\n\n")
            self.since = tick
        for path, place in self.runs.items():
            lines, self.runs[path] = lines_since(path, place)
            if lines is None or lines:
                told = {"id": path.parent.name, "lines": lines}
                found.append(f"event: metrics\ndata: {json.dumps(told)}\n\n")
        return found
