"""Connections: one that sends no request in time is closed, and silent ones keep nobody out.

A connection is idle when no request of it is in progress: during a TLS handshake
(limits/handshakes.py), before its first one, while the head of the next one arrives, and after an
answer. Idle connections are bounded in time (`head_s`) and in
number (`idle_connections`). Above the number the oldest connection of the holder that has the most
is closed, so a new connection is never refused.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jobs.serve.limits.shares import address_of

MOST_FILES = 8192  # that the server may have open; every connection is one


class Idle(Protocol):
    """A connection, or the handshake of one that is to come."""

    holder: str  # whose share it uses
    transport: asyncio.Transport


@dataclass
class IdleConnections:
    """The idle connections of a server, the oldest first."""

    most: int
    head_s: float
    _all: dict[Idle, None] = field(default_factory=dict[Idle, None])

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: Idle) -> None:
        """Add a connection, and close another one when there are too many."""
        self._all[connection] = None
        if len(self._all) > self.most:
            counts = Counter(one.holder for one in self._all)
            most = max(counts.values())
            oldest = next(one for one in self._all if counts[one.holder] == most)
            self.discard(oldest)
            oldest.transport.abort()

    def discard(self, connection: Idle) -> None:
        """Remove a connection that is closed, or whose request has come."""
        self._all.pop(connection, None)


class Connection(H11Protocol):
    """One connection of a client.

    holder: its address, and from its first request with a token on the token's name.
    """

    def __init__(self, *args: Any, app_state: dict[str, Any], **options: Any) -> None:
        # The Door finds the connection of a request in the state of its scope.
        super().__init__(*args, app_state={**app_state, "connection": self}, **options)
        door: Any = self.config.app
        self.idle: IdleConnections = door.idle
        self.holder = "unknown"
        self.has_token = False
        self._timer: asyncio.TimerHandle | None = None
        self._unread = self._sent = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.holder = address_of(self.client)
        self._update()

    def data_received(self, data: bytes) -> None:
        self._sent += len(data)
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def _update(self) -> None:
        """Start to wait for a request when none is in progress; else stop waiting."""
        is_idle = not self.cycle or self.cycle.response_complete
        if not is_idle or self.transport.is_closing():
            self._end_wait()
        elif self._timer is None:
            self._wait()
            self.idle.add(self)

    def _wait(self) -> None:
        self._unread, self._sent = self.transport.get_write_buffer_size(), 0
        self._timer = self.loop.call_later(self.idle.head_s, self._give_up)

    def _end_wait(self) -> None:
        self.idle.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        """Close the connection, unless its client still reads the last answer, or (with a token)
        still sends the body that was answered before its end.
        """
        is_reading = 0 < self.transport.get_write_buffer_size() < self._unread
        is_body = self.conn.their_state is h11.SEND_BODY
        if is_reading or (is_body and self._sent and self.has_token):
            self._wait()
            return
        self._end_wait()
        self.transport.abort()


def raise_file_limit() -> None:
    """Let this process have as many open files as the system allows it, at most MOST_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
