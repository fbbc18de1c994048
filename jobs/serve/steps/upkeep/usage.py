"""What a token has used of driven runs: tokens, and bytes of operations and saved weights.

_service/steps/usage-<token's name>.json counts the tokens of rows that were acknowledged.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from jobs.serve.limits.quotas import quota_lock
from jobs.serve.requests import Refusal, client_of
from jobs.serve.steps.context import Steps, steps_of
from trainer.files.atomic import read_json, write_json

if TYPE_CHECKING:
    from jobs.serve.steps.sessions import RunFacts

MEASURED_S = 30.0  # how old the bytes of an owner may be


@dataclass(frozen=True)
class Demand:
    """What a request would use. seq: the number in the log of the operation that it sends, to tell
    a repeat, which uses nothing; None: it sends none.
    """

    tokens: int = 0
    bytes: int = 0
    seq: int | None = None


@dataclass
class QuotaRoom:
    """What a request was given. is_needed: False for one that was sent before."""

    is_needed: bool = True


@dataclass
class TokenUsage:
    """The tokens and bytes of owners. root: where the counts are."""

    root: Path
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _bytes: dict[str, tuple[float, int]] = field(default_factory=dict[str, tuple[float, int]])

    def tokens(self, owner: str) -> int:
        """The tokens of rows that an owner has sent."""
        values = read_json(self._file(owner)) or {}
        return int(values.get("tokens", 0))

    def add_tokens(self, owner: str, count: int) -> None:
        """Count tokens of an owner. The caller holds the lock of the owner's quota."""
        write_json(self._file(owner), {"tokens": self.tokens(owner) + count}, is_durable=False)

    def bytes(self, owner: str, steps: Steps, *, more: int) -> int:
        """The bytes of an owner's operations, samples and saved weights, as they were a moment ago.
        more: that are about to be added, and count from then on.
        """
        with self._guard:
            at, size = self._bytes.get(owner, (-MEASURED_S, 0))
            if time.monotonic() - at >= MEASURED_S:
                at, size = time.monotonic(), _bytes_of_all(_folders(owner, steps))
            self._bytes[owner] = (at, size + more)
        return size

    def _file(self, owner: str) -> Path:
        return self.root / f"usage-{owner}.json"


def _folders(owner: str, steps: Steps) -> Iterator[Path]:
    """The folders whose bytes an owner keeps: of its runs, its samplers and its copies."""
    sessions = steps.sessions
    for session in sessions.ids_of(owner):
        yield sessions.folder(session) / "copies"
        yield from (sessions.sampler_folder(one) for one in sessions.samplers(session))
        for run in sessions.runs(session):
            if run.exp_id is not None:
                folder = steps.runs.folder(run)
                yield from (folder / name for name in ("operations", "saved", "sampler"))


def _bytes_of_all(folders: Iterable[Path]) -> int:
    """The bytes of all files below some folders; a file with several names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for folder in folders:
        for place, _, files in os.walk(folder):
            for name in files:
                with suppress(OSError):  # it was deleted meanwhile
                    facts = os.lstat(os.path.join(place, name))
                    sizes[facts.st_dev, facts.st_ino] = facts.st_size
    return sum(sizes.values())


@asynccontextmanager
async def room_for(
    request: Request, demand: Demand, facts: RunFacts | None = None
) -> AsyncGenerator[QuotaRoom]:
    """Inside, the client may send so many tokens and bytes more, which count unless an error is
    raised inside, or the room is not needed. Refusal (403: it does not pass by itself, so the SDK
    is not to ask again).
    """
    quota = client_of(request).quota
    is_counted = False
    if quota.tokens is not None or quota.bytes is not None:
        is_counted = await run_in_threadpool(_take, request, demand, facts)
    room = QuotaRoom()
    try:
        yield room
    except BaseException:
        room.is_needed = False
        raise
    finally:
        if is_counted and not room.is_needed:
            await run_in_threadpool(_give_back, request, demand.tokens)


def _take(request: Request, demand: Demand, facts: RunFacts | None) -> bool:
    """Count what a request uses; whether tokens were counted. Refusal."""
    client, steps = client_of(request), steps_of(request)
    seq = demand.seq
    if facts is not None and seq is not None and steps.runs.is_repeat(facts, seq):
        return False
    quota, usage = client.quota, steps.usage
    with quota_lock(steps.keeper, client):
        if quota.tokens is not None and demand.tokens:
            used = usage.tokens(client.name)
            if used + demand.tokens > quota.tokens:
                text = f"{client.name} has sent {used} of {quota.tokens} tokens, and these are "
                raise Refusal(403, f"{text}{demand.tokens} more.", code="insufficient_quota")
        if quota.bytes is not None:
            size = usage.bytes(client.name, steps, more=demand.bytes)
            if size + demand.bytes > quota.bytes:
                text = (
                    f"{client.name} keeps {size} bytes of runs, and {demand.bytes} more are above "
                    f"the quota of {quota.bytes}. Delete checkpoints or runs."
                )
                raise Refusal(403, text, code="insufficient_quota")
        if quota.tokens is not None and demand.tokens:
            usage.add_tokens(client.name, demand.tokens)
            return True
    return False


def _give_back(request: Request, tokens: int) -> None:
    client, steps = client_of(request), steps_of(request)
    with quota_lock(steps.keeper, client):
        steps.usage.add_tokens(client.name, -tokens)
