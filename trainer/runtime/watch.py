"""Ranks watch each other, because a collective waits half an hour for a machine that is gone.

A thread of every rank sends rank 0 a sign of life every few seconds, over its own connection, and
receives one from rank 0, which also passes on what it knows about the other ranks. The thread runs
during long steps, saves and compilations, so silence means that a process was killed or stopped, or
that a machine or the network is gone. Every rank then ends its own process.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from trainer.errors import IN_ORDER, LatheError, RankLostError
from trainer.runtime import distributed, process
from trainer.runtime.peers import Line, Message, Patience, Peer

LEAVE_S = 30.0  # how long the main thread may take to notice that a rank is lost
CLOSE_S = 150.0  # how long it may then take to end the run: trackers upload for two minutes
WORDS_S = 20.0  # how long last_words may take: the disk may be on the lost machine
FEEL_S = 1.5  # a broken connection is noticed within this time after a failed collective
_KEY = "lathe/peers"

log = logging.getLogger(__name__)


@dataclass
class PeerWatch(ABC):
    """The thread of one rank. It calls on_loss once, with the reason."""

    rank: int
    patience: Patience
    on_loss: Callable[[RankLostError], None]
    name: str = field(default_factory=lambda: f"process {os.getpid()} on {socket.gethostname()}")
    lost: RankLostError | None = None  # why the run ends
    has_come_out: threading.Event = field(
        default_factory=threading.Event
    )  # the main thread noticed the loss
    has_left: threading.Event = field(default_factory=threading.Event)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    suspicion: str = ""  # the likely reason if a collective fails now
    _is_suspicious: threading.Event = field(default_factory=threading.Event)
    _ends: bool = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="peers", daemon=True).start()

    def leave(self, text: str, *, is_orderly: bool) -> None:
        """Tell the other ranks that this rank leaves, and end the watch on both sides."""
        self.has_come_out.set()
        self.has_left.set()
        self.tell({"is": "bye", "text": text, "is_orderly": is_orderly})

    def cause_of(self, error: Exception) -> Exception:
        """The loss of another rank if that caused `error`, else `error`."""
        self.has_come_out.set()
        is_own = isinstance(error, (LatheError, torch.OutOfMemoryError))
        if self.lost is not None and not isinstance(error, LatheError):
            return self.lost
        if is_own or not isinstance(error, RuntimeError):  # torch raises it when a collective fails
            return error
        if not self._is_suspicious.wait(FEEL_S):
            return error
        self.lost = RankLostError(self.suspicion)
        return self.lost

    def _run(self) -> None:
        beat_at = time.monotonic()
        while not self.has_left.is_set():
            self._listen(max(0.0, beat_at - time.monotonic()))
            now = time.monotonic()
            if now < beat_at:
                continue
            if now - beat_at > self.patience.beat_s:  # this process itself was stopped
                for peer in self.peers():
                    peer.delay(now - beat_at)
            beat_at = now + self.patience.beat_s
            self.tell({"is": "beat"})
            for peer in self.peers():
                if warning := peer.warning(now, self.patience):
                    self._warn(warning)
                if verdict := peer.verdict(now, self.patience):
                    self._lose(verdict)

    def suspect(self, text: str) -> None:
        """Remember which rank is probably lost ("": none), and tell the connected ranks."""
        if text != self.suspicion:
            self.suspicion = text
            self.tell({"is": "suspect", "text": text})
            (self._is_suspicious.set if text else self._is_suspicious.clear)()

    def _warn(self, text: str) -> None:
        self.tell({"is": "warning", "text": text})
        if distributed.local_rank() == 0:
            log.warning("%s", text)

    def _lose(self, text: str) -> None:
        if not self._ends and not self.has_left.is_set():
            self._ends, self.lost = True, self.lost or RankLostError(text)
            self.tell({"is": "lost", "text": text})
            self.on_loss(self.lost)

    def _listen(self, wait_s: float) -> None:
        for key, _ in self.selector.select(wait_s):
            self.take(key.fileobj)

    @abstractmethod
    def peers(self) -> list[Peer]:
        """The ranks that this rank watches."""

    @abstractmethod
    def tell(self, message: Message) -> None:
        """Send a message to the connected ranks."""

    @abstractmethod
    def take(self, ready: Any) -> None:
        """Read the messages that have arrived."""


class Hub(PeerWatch):
    """The watch of rank 0: every other rank connects to it."""

    def __init__(self, patience: Patience, on_loss: Callable[[RankLostError], None]) -> None:
        super().__init__(0, patience, on_loss)
        self.token = secrets.token_hex(8)  # other programs may connect to the port
        self._listener = _listener()
        self.port: int = self._listener.getsockname()[1]
        self.selector.register(self._listener, selectors.EVENT_READ)
        self._lines: dict[socket.socket, tuple[Line, Peer | None]] = {}
        self._peers: dict[int, Peer] = {}
        self._suspect: Peer | None = None  # the first one: later ones may be its victims

    def peers(self) -> list[Peer]:
        return list(self._peers.values())

    def tell(self, message: Message) -> None:
        for line, peer in list(self._lines.values()):
            if peer is not None:
                line.send(message)

    def take(self, ready: Any) -> None:
        if ready is self._listener:
            with suppress(OSError):
                connection, _ = self._listener.accept()
                self._lines[connection] = (Line(connection), None)
                self.selector.register(connection, selectors.EVENT_READ)
            return
        line, _ = self._lines[ready]
        try:
            for message in line.receive():
                self._take(line, message)
        except (EOFError, KeyError, TypeError):  # it is gone, or not one of our ranks
            self._drop(ready)
        if self._suspect is None or not self._suspect.suspicion():
            self._suspect = next((peer for peer in self.peers() if peer.suspicion()), None)
        self.suspect(self._suspect.suspicion() if self._suspect else "")

    def _take(self, line: Line, message: Message) -> None:
        _, peer = self._lines[line.connection]
        now = time.monotonic()
        if peer is None:
            if message["token"] != self.token:
                raise EOFError
            rank = int(message["rank"])
            peer = self._peers.setdefault(rank, Peer(rank, str(message["name"]), now))
            self._lines[line.connection] = (line, peer)
            line.send({"is": "welcome", "name": self.name, "silence_s": self.patience.silence_s})
        peer.hear(now)
        if message["is"] == "bye":
            peer.farewell(message, now)

    def _drop(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        connection.close()
        _, peer = self._lines.pop(connection)
        has_another = any(peer is other for _, other in self._lines.values())
        if peer is not None and not has_another:
            peer.broke_at = time.monotonic()


class Spoke(PeerWatch):
    """The watch of any other rank: it is connected to rank 0."""

    def __init__(
        self,
        rank: int,
        patience: Patience,
        on_loss: Callable[[RankLostError], None],
        address: Message,
    ) -> None:
        super().__init__(rank, patience, on_loss)
        self._address = address
        self._line: Line | None = None
        self._main: Peer | None = None
        self._told = ""  # what rank 0 suspects
        self._began_at = time.monotonic()
        self._has_said = False  # that rank 0 cannot be reached

    def peers(self) -> list[Peer]:
        return [] if self._main is None else [self._main]

    def tell(self, message: Message) -> None:
        line = self._line
        if message["is"] in ("beat", "bye") and line is not None:
            line.send(message)

    def take(self, ready: Any) -> None:
        assert self._line is not None, "it is what is ready"
        try:
            for message in self._line.receive():
                self._take(message)
        except (EOFError, KeyError):
            self.selector.unregister(self._line.connection)
            self._line.connection.close()
            self._line = None
            if self._main is not None:
                self._main.broke_at = time.monotonic()
        self.suspect(self._told or (self._main.suspicion() if self._main else ""))

    def _take(self, message: Message) -> None:
        now, what = time.monotonic(), message["is"]
        if self._main is None:
            self._main = Peer(0, str(message["name"]), now)
            self.patience = Patience(float(message["silence_s"]))
        self._main.hear(now)
        if what == "bye":
            self._main.farewell(message, now)
        elif what == "suspect":
            self._told = message["text"]
        elif what == "warning":
            self._warn(message["text"])
        elif what == "lost":
            self._lose(message["text"])

    def _listen(self, wait_s: float) -> None:
        if self._line is None and not (self._main and self._main.is_done):
            self._connect()
        if self._line is None:
            time.sleep(wait_s)
        else:
            super()._listen(wait_s)

    def _connect(self) -> None:
        place = (self._address["host"], self._address["port"])
        try:
            connection = socket.create_connection(place, timeout=self.patience.beat_s)
        except OSError as error:
            is_late = time.monotonic() - self._began_at > self.patience.warn_s
            if self._main is None and is_late and not self._has_said:
                self._has_said = True
                log.warning(
                    "rank %d cannot reach rank 0 at %s, port %d (%s): nobody will notice when it "
                    "is lost",
                    *(self.rank, *place, error),
                )
            return
        self._line = Line(connection)
        self.selector.register(connection, selectors.EVENT_READ)
        hello = {"is": "hello", "token": self._address["token"]}
        self._line.send({**hello, "rank": self.rank, "name": self.name})


def _listener() -> socket.socket:
    try:
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):  # IPv6 is switched off
        listener = socket.create_server(("", 0))
    listener.setblocking(False)
    return listener


# Of this process
# -------------------------------------------------------------------------------------------

_current: PeerWatch | None = None
_record: Callable[[LatheError], None] | None = None  # writes into the run folder


@contextmanager
def watch_ranks(last_words: Callable[[LatheError], None]) -> Iterator[None]:
    """Inside, the ranks of the process group watch each other, until leave(). If a collective fails
    because another rank ended, the error becomes a RankLostError. A collective.

    last_words: called with the reason from another thread if the main thread hangs and this process
    has to be ended.
    """
    global _current
    _current = _begun(lambda error: _end(error, last_words)) if distributed.world() > 1 else None
    try:
        yield
    except Exception as error:
        cause = cause_of(error)
        if cause is error:
            raise
        raise cause from error


def cause_of(error: BaseException) -> BaseException:
    """The loss of another rank if that caused `error`, else `error`. The run is about to end by it,
    so the watch gives the main thread time for that.
    """
    if _current is None or not isinstance(error, Exception):
        return error
    return _current.cause_of(error)


def record_by(record: Callable[[LatheError], None] | None) -> None:
    """Set the function that records why the run ended if its main thread hangs; None: none."""
    global _record
    _record = record


def leave(code: int, text: str = "") -> None:
    """Tell the other ranks that this rank leaves, with its exit code and the reason."""
    if _current is not None:
        is_orderly = code in IN_ORDER and not distributed.leaves_alone()
        _current.leave(text or f"exit code {code}", is_orderly=is_orderly)


def _begun(on_loss: Callable[[RankLostError], None]) -> PeerWatch | None:
    """Start the watch of this rank, if rank 0 decides that there is one."""
    store = dist.distributed_c10d._get_default_store()
    watch: PeerWatch | None = None
    if distributed.is_main():
        patience = Patience.of(os.environ)
        place: Message | None = None
        if patience is not None:
            watch = hub = Hub(patience, on_loss)
            place = {"host": _own_address(), "port": hub.port, "token": hub.token}
        store.set(_KEY, json.dumps(place))
    else:
        place = json.loads(store.get(_KEY))
        if place is not None:
            watch = Spoke(distributed.rank(), Patience(), on_loss, place)
    if watch is not None:
        watch.start()
    return watch


def _own_address() -> str:
    """The address of this machine on the network of the rendezvous."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    with suppress(OSError, ValueError):
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            address = probe.getsockname()[0]
        if not ipaddress.ip_address(address).is_loopback:
            return address
    return host  # this machine hosts the rendezvous, so the others reach it by that name


def _end(error: RankLostError, last_words: Callable[[LatheError], None]) -> None:
    """End this process, because another rank is lost: through its main thread, whose collective
    fails now, or else from this thread.
    """
    watch = _current
    assert watch is not None, "it calls this"
    if distributed.local_rank() == 0:
        log.error("%s", error)
    process.end_launcher_if_stuck()
    distributed.abort(with_outgoing=True)
    if watch.has_come_out.wait(LEAVE_S) and watch.has_left.wait(CLOSE_S):
        return

    def tell() -> None:
        for listener in (_record, last_words):
            with suppress(Exception):  # nobody is left to hear of it
                if listener is not None:
                    listener(error)

    words = threading.Thread(target=tell, daemon=True)
    words.start()
    words.join(WORDS_S)
    os._exit(error.exit_code)
