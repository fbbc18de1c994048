"""TLS: a connection is idle, and counted as such, from the moment at which it is accepted.

asyncio's own server makes a connection known once its handshake has ended. Whoever never ends it
would be bounded in time alone, so the handshake begins here, on a connection that is counted.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from jobs.serve.limits.connections import Connection
from jobs.serve.limits.shares import address_of


class Handshake(asyncio.Protocol):
    """A connection during its TLS handshake; afterwards its Connection takes over.

    It is given up after the time in which a request must come (`head_s`).
    """

    transport: asyncio.Transport

    def __init__(self, context: ssl.SSLContext, **options: Any) -> None:
        """options: those of a Connection."""
        self._context, self._connection = context, Connection(**options)
        self.holder = "unknown"
        self._received: list[bytes] = []  # what came with the last message of the handshake
        self._has_ended = False
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "of a TCP socket"
        transport.pause_reading()  # TLS reads from the first byte on
        self.transport = transport
        self.holder = address_of(transport.get_extra_info("peername"))
        self._connection.idle.add(self)
        self._task = asyncio.get_running_loop().create_task(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        self._received.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_ended = True

    async def _shake_hands(self) -> None:
        idle, inner = self._connection.idle, None
        try:
            inner = await asyncio.get_running_loop().start_tls(
                self.transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=idle.head_s,
            )
        except OSError:  # it was closed, took too long, or is no TLS: ssl.SSLError is one, too
            pass
        finally:
            idle.discard(self)
            if inner is None:
                self.transport.abort()
        if inner is None or self._has_ended:
            return
        inner.set_protocol(self._connection)
        self._connection.connection_made(inner)
        for data in self._received:
            self._connection.data_received(data)
