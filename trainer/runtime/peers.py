"""What a rank knows about another rank that it watches (watch.py), and their connection."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainer.errors import ConfigError

VARIABLE = "LATHE_SILENCE_S"
MOST_BYTES = 65536  # that wait to be sent, or of one message
_AGAIN = "The same command goes on from the last checkpoint."

Message = dict[str, Any]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """How long a rank may be silent."""

    silence_s: float = 180.0  # then the run ends
    grace_s: float = 5.0  # a connection that broke may be made again
    own_end_s: float = 120.0  # after another rank failed, until this one feels it by itself

    @property
    def beat_s(self) -> float:
        """Seconds between two signs of life."""
        return min(5.0, self.silence_s / 6)

    @property
    def warn_s(self) -> float:
        """Seconds of silence after which a warning is logged."""
        return min(30.0, self.silence_s / 3)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Patience | None:
        """The patience of LATHE_SILENCE_S; None for 0. ConfigError if that is not a number."""
        text = environment.get(VARIABLE, str(cls.silence_s))
        try:
            silence_s = float(text)
        except ValueError:
            silence_s = -1.0
        if not 0 <= silence_s < float("inf"):
            raise ConfigError(
                f"{VARIABLE}={text!r}: want the seconds after which a rank that is not heard of "
                "ends the run, or 0 for no watch."
            )
        return cls(silence_s) if silence_s else None


@dataclass
class Peer:
    """Another rank, as this rank hears of it. Times are monotonic, except the one in messages."""

    rank: int
    name: str  # process and machine
    heard_at: float
    clock: str = ""
    broke_at: float | None = None  # its connection
    failed_at: float | None = None
    failure: str = ""
    is_done: bool = False
    is_warned: bool = False

    def __post_init__(self) -> None:
        self.hear(self.heard_at)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name})"

    def hear(self, now: float) -> None:
        """The rank has given a sign of life."""
        if self.is_warned:
            log.warning("%s is heard of again, after %.0f s", self, now - self.heard_at)
        self.heard_at, self.clock = now, time.strftime("%H:%M:%S")
        self.broke_at, self.is_warned = None, False

    def farewell(self, message: Message, now: float) -> None:
        """The text with which the rank left."""
        self.is_done = message["is_orderly"]
        if not self.is_done:
            self.failed_at, self.failure = now, message["text"]

    def delay(self, late_s: float) -> None:
        """This process was paused for `late_s`: shift all timestamps."""
        self.heard_at += late_s
        self.broke_at = None if self.broke_at is None else self.broke_at + late_s
        self.failed_at = None if self.failed_at is None else self.failed_at + late_s

    def suspicion(self) -> str:
        """Why an exchange may have failed just now; "" if this rank gives no reason."""
        if self.failed_at is not None:
            return f"{self} has ended: {self.failure}"
        if self.broke_at is None or self.is_done:
            return ""
        return (
            f"{self} ended without a word, at {self.clock} or soon after: killed, perhaps for want "
            f"of memory, or its machine went down. {_AGAIN}"
        )

    def verdict(self, now: float, patience: Patience) -> str:
        """Why the run cannot go on; "" while it can."""
        if self.is_done:
            return ""
        if self.failed_at is not None:
            return self.suspicion() if now - self.failed_at > patience.own_end_s else ""
        if self.broke_at is not None and now - self.broke_at > patience.grace_s:
            return self.suspicion()
        if now - self.heard_at > patience.silence_s:
            return (
                f"{self} has not been heard of since {self.clock}, for {patience.silence_s:.0f} s: "
                "its machine or the network to it is gone, or the process is stopped. "
                f"{_AGAIN} {VARIABLE} is how long to wait."
            )
        return ""

    def warning(self, now: float, patience: Patience) -> str:
        """The warning about a silence that may still end, once; "" if there is none."""
        is_silent = not self.is_done and self.failed_at is None
        if self.is_warned or not is_silent or now - self.heard_at <= patience.warn_s:
            return ""
        self.is_warned = True
        return (
            f"{self} has not been heard of since {self.clock}; the run ends if that lasts for "
            f"{patience.silence_s:.0f} s"
        )


class Line:
    """One end of a connection: it sends and reads messages as lines of JSON, without blocking."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._coming, self._going = b"", b""
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send as much as there is room for; what is not sent yet stays bounded."""
        with self._lock, suppress(OSError):
            if len(self._going) < MOST_BYTES:
                self._going += json.dumps(message).encode() + b"\n"
            self._going = self._going[self.connection.send(self._going) :]

    def receive(self) -> list[Message]:
        """The messages received so far. EOFError when the other end is gone, or is not ours."""
        try:
            data = self.connection.recv(MOST_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError(str(error)) from None
        *lines, self._coming = (self._coming + data).split(b"\n")
        try:
            if not data or len(self._coming) > MOST_BYTES:
                raise EOFError
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise EOFError(str(error)) from None
