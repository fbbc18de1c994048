"""What a token has used of driven runs: tokens, and bytes of operations and saved weights.

_service/steps/usage-<token's name>.json counts the tokens of rows that were acknowledged.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from jobs.serve.requests import Refusal, client_of
from jobs.serve.steps.context import Steps, steps_of
from trainer.files.atomic import read_json, write_json

if TYPE_CHECKING:
    from jobs.serve.access import Client

MEASURED_S = 30.0  # how old the bytes of an owner may be


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
        """Count tokens of an owner."""
        with self._guard:
            values = {"tokens": self.tokens(owner) + count}
            write_json(self._file(owner), values, is_durable=False)

    def bytes(self, owner: str, steps: Steps) -> int:
        """The bytes of an owner's operations and saved weights, as they were a moment ago."""
        at, size = self._bytes.get(owner, (-MEASURED_S, 0))
        if time.monotonic() - at < MEASURED_S:
            return size
        size = sum(_bytes_of(folder) for folder in _folders(owner, steps))
        self._bytes[owner] = (time.monotonic(), size)
        return size

    def _file(self, owner: str) -> Path:
        return self.root / f"usage-{owner}.json"


def _folders(owner: str, steps: Steps) -> list[Path]:
    folders: list[Path] = []
    for session in steps.sessions.ids():
        for run in steps.sessions.runs(session):
            if run.owner == owner and run.exp_id is not None:
                folder = steps.runs.folder(run)
                folders += [folder / name for name in ("operations", "saved", "sampler")]
    return folders


def _bytes_of(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):  # it was deleted meanwhile
                total += os.lstat(os.path.join(place, name)).st_size
    return total


async def refuse_above_quota(request: Request, *, num_tokens: int, num_bytes: int) -> None:
    """Return if the client may send so many tokens and bytes more, which count from now on; else
    Refusal (403: it does not pass by itself, so the SDK is not to ask again).
    """
    client, steps = client_of(request), steps_of(request)
    await run_in_threadpool(_refuse, client, steps, num_tokens, num_bytes)


def _refuse(client: Client, steps: Steps, num_tokens: int, num_bytes: int) -> None:
    quota, usage = client.quota, steps.usage
    if quota.tokens is not None:
        used = usage.tokens(client.name)
        if used + num_tokens > quota.tokens:
            text = f"{client.name} has sent {used} of {quota.tokens} tokens, and these are "
            raise Refusal(403, f"{text}{num_tokens} more.", code="insufficient_quota")
        usage.add_tokens(client.name, num_tokens)
    if quota.bytes is not None:
        size = usage.bytes(client.name, steps)
        if size + num_bytes > quota.bytes:
            text = (
                f"{client.name} keeps {size} bytes of runs, and {num_bytes} more are above the "
                f"quota of {quota.bytes}. Delete checkpoints."
            )
            raise Refusal(403, text, code="insufficient_quota")
