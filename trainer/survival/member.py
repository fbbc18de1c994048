"""A process of `--survive` as its agent sees it, and the end of a generation of them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

STACK_S = 1.0  # what a rank gets to write down where it is

log = logging.getLogger(__name__)


@dataclass
class Member:
    """A process that is a rank, or may become one."""

    process: Any
    line: connection.Connection
    stacks: int  # the memory file that it dumps its stacks into
    state: str = "warming"  # spare, running, stranded
    rank: int = -1
    batches: list[int] = field(default_factory=list[int])  # train.global_batch of every experiment
    code: int | None = None  # that it said it leaves with
    hung: str = ""  # why it is ended
    is_to_blame: bool = True  # what ends it is its own; else a new process may stand in for it
    stranded_at: float = 0.0
    began_at: float = 0.0
    has_joined: bool = False
    step: int = -1
    place: str = "start"  # "step": inside a training step; else what it does has no known length
    moved_at: float = 0.0
    heard_at: float = 0.0
    waited_s: float = 0.0  # in an exchange with the other ranks, at its last beat

    def send(self, **message: Any) -> None:
        """Tell it; one that is gone hears nothing."""
        try:
            self.line.send_bytes(json.dumps(message).encode())
        except OSError as error:
            log.debug("process %d does not hear: %s", self.process.pid, error)

    def send_signal(self, number: int) -> None:
        """Send it a signal; one that is gone gets none."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def stack_text(self) -> str:
        """Where every thread of a process is; "" when it does not say within STACK_S."""
        os.ftruncate(self.stacks, 0)
        self.send_signal(signal.SIGUSR2)
        self.send_signal(signal.SIGCONT)  # one that is stopped says nothing
        text, given_up = b"", time.monotonic() + STACK_S
        while time.monotonic() < given_up:
            before, text = text, os.pread(self.stacks, 1 << 20, 0)
            if text and text == before:
                break
            time.sleep(0.002)
        return text.decode(errors="replace")


@dataclass
class Break:
    """A generation that ended before its run."""

    at: float
    reached: int  # the last step that any rank had done
    generation: int = 0  # the latest that ended before it did a step
    ended_at: float = 0.0  # that one
    is_explained: bool = False  # a rank of that one was lost
    lost: list[dict[str, Any]] = field(default_factory=list[Any])
    source: str = "the beginning"  # what the next generation went on from, and the step
    step: int = 0
