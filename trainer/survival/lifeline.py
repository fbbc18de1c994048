"""The connection of a rank to the agent of `--survive` that started it (agent.py). The agent tells
the process which rank to be, and the process reports what it does. Without an agent every call does
nothing.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import queue
import signal
import sys
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from trainer.errors import LatheError
from trainer.runtime import distributed

SAMPLE_S, SAMPLES_A_BEAT = 0.1, 5
EXCHANGES = ("distributed_c10d.py", "lifeline.py")  # files whose frames wait for other ranks
DEEPEST = 4  # a wait shows in one of so many innermost frames

log = logging.getLogger(__name__)


class PeerLost(Exception):
    """Another rank is lost: this process must release everything and take its next place."""


@dataclass(frozen=True)
class Seat:
    """The place that the agent gives a process."""

    rank: int
    world: int
    begun: list[str]  # ids of the experiments that an earlier generation has begun
    memory: list[list[str]]  # two files of each rank, which the agent holds


@dataclass
class Lifeline:
    """The process's end of the connection, with a thread that reads orders and sends beats."""

    line: Connection[Any, Any]
    memory: list[list[str]]
    _orders: queue.Queue[dict[str, Any]] = field(default_factory=queue.Queue[Any])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _in_step: bool = False
    _is_own: bool = False  # the agent has said that an error was this rank's own

    def begin(self, stacks: str) -> None:
        """Start to listen. stacks: the file that SIGUSR2 writes the stacks of this process into."""
        file = os.open(stacks, os.O_WRONLY | os.O_APPEND)
        faulthandler.register(signal.SIGUSR2, file, all_threads=True)
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    def tell(self, what: str, **values: Any) -> None:
        """Send one message."""
        with self._lock:
            self.line.send_bytes(json.dumps({"is": what, **values}).encode())

    def seat(self) -> Seat | None:
        """The next place of this process, with the launcher's variables set for it. None when the
        run is over.
        """
        order = self._orders.get()
        if order["do"] != "join":
            return None
        names = {"RANK": "rank", "LOCAL_RANK": "rank", "WORLD_SIZE": "world", "MASTER_PORT": "port"}
        os.environ.update({name: str(order[key]) for name, key in names.items()})
        os.environ["LOCAL_WORLD_SIZE"] = str(order["world"])
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        return Seat(order["rank"], order["world"], order["begun"], self.memory)

    def is_peer_lost(self, error: Exception) -> bool:
        """Whether the end of another rank caused `error`. This rank has abandoned its groups by
        now, so that ranks which wait for it notice, too.
        """
        if isinstance(error, LatheError) or self._is_own:
            return False
        self.tell("stranded", error=f"{type(error).__name__}: {error}"[:500])
        order = self._orders.get()
        self._orders.put(order)
        self._is_own = order["do"] == "fail"
        return not self._is_own

    def moved(self, step: int, *, is_stepping: bool) -> None:
        """Report that `step` steps are done. is_stepping: the next thing is a training step."""
        self._in_step = is_stepping
        self.tell("moved", step=step, place="step" if is_stepping else "other")

    def _listen(self) -> None:
        main = threading.main_thread().ident
        busy = of = ticks = 0
        waited_s = 0.0
        try:
            while True:
                if self.line.poll(SAMPLE_S):
                    self._take(json.loads(self.line.recv_bytes()))
                    continue
                waits = _is_exchange(sys._current_frames().get(main or 0))
                waited_s = waited_s + SAMPLE_S if waits else 0.0
                if self._in_step:
                    busy, of = busy + (not waits), of + 1
                ticks += 1
                if ticks % SAMPLES_A_BEAT == 0:
                    self.tell("beat", busy=busy, of=of, waited_s=waited_s)
                    busy = of = 0
        except (EOFError, OSError):
            os._exit(1)  # the agent is gone, and with it the memory files to resume from

    def _take(self, order: dict[str, Any]) -> None:
        if order["do"] == "let go":
            distributed.abort()
        else:
            self._orders.put(order)


def _is_exchange(frame: FrameType | None) -> bool:
    for _ in range(DEEPEST):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_name == "wait" or os.path.basename(code.co_filename) in EXCHANGES:
            return True
        frame = frame.f_back
    return False


_current: Lifeline | None = None


def current() -> Lifeline | None:
    """The Lifeline of this process; None without an agent."""
    return _current


def attach(line: Connection[Any, Any], stacks: str, memory: list[list[str]]) -> Lifeline:
    """Make the Lifeline of this process, with `line` as its connection."""
    global _current
    _current = Lifeline(line, memory)
    _current.begin(stacks)
    return _current


def tell(what: str, **values: Any) -> None:
    """Lifeline.tell of this process, if it has an agent."""
    if _current is not None:
        _current.tell(what, **values)


def moved(step: int, *, is_stepping: bool) -> None:
    """Lifeline.moved of this process, if it has an agent."""
    if _current is not None:
        _current.moved(step, is_stepping=is_stepping)
