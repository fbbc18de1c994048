"""Shares: how much of the server one token, or one address without a token, may hold at a time.

The numbers stand in the service's configuration (offers.ServiceConfig). All of this belongs to the
event loop of the server: no other thread calls it.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from weakref import WeakValueDictionary

from starlette.types import Scope

from jobs.serve.requests import Refusal

if TYPE_CHECKING:
    from jobs.serve.access import Client
    from jobs.serve.offers import ServiceConfig

Kind = Literal["requests", "operations", "streams", "answers"]
NOUNS: dict[Kind, str] = {
    "requests": "requests in progress",
    "operations": "requests to /api/v1/ in progress",
    "streams": "open event streams",
    "answers": "questions to models in progress",
}
SOON_S, LATER_S = 1.0, 15.0  # Retry-After: a request ends soon, a stream when a page is closed
THREADS = 64  # for the routes that may wait for a disk: more than one holder's requests
STREAM_THREADS = 8  # of them, for the news of all streams
CHECKS = 3  # uploads whose rows are checked at the same time, one of a token


@dataclass
class Shares:
    """What each holder has in progress. A holder is the name of a token, or an address."""

    config: ServiceConfig
    arriving: Counter[str] = field(default_factory=Counter[str])  # bytes of uploads in progress
    checks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CHECKS))
    news: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(STREAM_THREADS))
    _held: Counter[tuple[Kind, str]] = field(default_factory=Counter[tuple[Kind, str]])
    _turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = field(
        default_factory=WeakValueDictionary[tuple[str, str], asyncio.Lock]
    )

    def num_held(self, kind: Kind, holder: str | None = None) -> int:
        """How many of a kind a holder has in progress; None: everybody."""
        if holder is not None:
            return self._held[kind, holder]
        return sum(count for (one, _), count in self._held.items() if one == kind)

    @contextmanager
    def hold(self, kind: Kind, holder: str) -> Generator[None]:
        """Inside, the holder has one more of a kind. Refusal (429) when that is above its share,
        Refusal (503) when the server has all that it allows.
        """
        limits: dict[Kind, tuple[str, int]] = {
            "requests": ("requests_at_once", self.config.requests_at_once),
            "operations": ("operations_at_once", self.config.operations_at_once),
            "streams": ("streams_at_once", self.config.streams_at_once),
            "answers": ("answers_at_once", self.config.answers_at_once),
        }
        name, most = limits[kind]
        wait_s = LATER_S if kind == "streams" else SOON_S
        if self._held[kind, holder] >= most:
            text = (
                f"{holder} has {most} {NOUNS[kind]}; at most {most} are allowed ({name}). "
                "Wait until one of them has ended."
            )
            raise Refusal(429, text, code="rate_limit_exceeded", retry_after_s=wait_s)
        total = sum(self.num_held(one) for one in NOUNS if one != "answers")
        most = self.config.all_at_once
        if kind != "answers" and total >= most:
            text = (
                f"The server has {total} requests and streams in progress; at most {most} are "
                "allowed (all_at_once). Ask again."
            )
            raise Refusal(503, text, code="overloaded", retry_after_s=wait_s)
        self._held[kind, holder] += 1
        try:
            yield
        finally:
            self._held[kind, holder] -= 1
            if not self._held[kind, holder]:
                del self._held[kind, holder]

    def turn(self, what: str, owner: str) -> asyncio.Lock:
        """The lock of one owner for one kind of work: his requests wait for each other and hold no
        thread meanwhile.
        """
        lock = self._turns.get((what, owner))
        if lock is None:
            lock = self._turns[what, owner] = asyncio.Lock()
        return lock


def holder_of(scope: Scope, client: Client | None) -> str:
    """Whose share a request uses: that of its token, or that of its address without one."""
    return address_of(scope.get("client")) if client is None else client.name


def address_of(client: tuple[str, int] | None) -> str:
    """The address of a connection as a holder. The 2^64 addresses of an IPv6 network are one."""
    host = client[0] if client else "unknown"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"address {host}"
    if isinstance(address, ipaddress.IPv4Address):
        return f"address {host}"
    if address.ipv4_mapped is not None:
        return f"address {address.ipv4_mapped}"
    return f"address {ipaddress.ip_network((address, 64), strict=False)}"
