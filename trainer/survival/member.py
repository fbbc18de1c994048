"""What the agent of `--survive` knows of one process, and of a generation that a loss ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any, Literal

STACK_S = 1.0  # how long a process may take to write its stacks

State = Literal[
    "warming",  # it imports
    "spare",  # it waits to become a rank
    "running",  # it is a rank
    "stranded",  # it was a rank whose peers are gone, and waits for its next place
    "dismissed",  # it was stranded when the run ended, and was told to leave
]

log = logging.getLogger(__name__)


@dataclass
class Member:
    """A process that is a rank, or may become one."""

    process: Any
    line: connection.Connection
    stacks: int  # the memory file that it dumps its stacks into
    state: State = "warming"
    rank: int = -1
    batches: list[int] = field(default_factory=list[int])  # train.global_batch of every experiment
    code: int | None = None  # the exit code that it announced
    hang: str = ""  # how it hung, if the agent ended it for that
    is_to_blame: bool = True  # it ended by its own fault; else a new process may take its place
    stranded_at: float = 0.0
    began_at: float = 0.0
    has_joined: bool = False  # the process group of its generation
    step: int = -1
    place: str = "start"  # "step": inside a training step; else what it does has no known length
    moved_at: float = 0.0  # when it came to this place
    heard_at: float = 0.0  # when its last message was read
    waited_s: float = 0.0  # how long it had waited for other ranks, at its last beat

    @property
    def is_rank(self) -> bool:
        """Whether it belongs to a generation, stranded or not."""
        return self.state in ("running", "stranded")

    @property
    def is_awaited(self) -> bool:
        """Whether a run that ends waits for it: a rank, or a dismissed one that has not left."""
        return self.is_rank or self.state == "dismissed"

    @property
    def exit_code(self) -> int | None:
        """The code that it announced, or else that of its process; None before it has ended."""
        return self.process.exitcode if self.code is None else self.code

    @property
    def end(self) -> str:
        """How it ended, for messages."""
        code = self.exit_code
        return f"ended by {signal.Signals(-code).name}" if code and code < 0 else "ended"

    def join_generation(self, now: float) -> None:
        """It begins to join the next process group as `rank`."""
        self.state, self.has_joined = "running", False
        self.step, self.place, self.moved_at = -1, "start", now
        self.heard_at, self.waited_s = now, 0.0

    def send(self, **message: Any) -> None:
        """Send it a message; a process that is gone gets none."""
        try:
            self.line.send_bytes(json.dumps(message).encode())
        except OSError as error:
            log.debug("process %d does not hear: %s", self.process.pid, error)

    def send_signal(self, number: int) -> None:
        """Send it a signal; a process that is gone gets none."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def stack_text(self) -> str:
        """The stacks of all its threads; "" when it writes none within STACK_S."""
        os.ftruncate(self.stacks, 0)
        self.send_signal(signal.SIGUSR2)
        self.send_signal(signal.SIGCONT)  # a stopped process handles no signal
        text, deadline = b"", time.monotonic() + STACK_S
        while time.monotonic() < deadline:
            before, text = text, os.pread(self.stacks, 1 << 20, 0)
            if text and text == before:
                break
            time.sleep(0.002)
        return text.decode(errors="replace")


@dataclass
class Break:
    """The time from the loss of a rank to the next new step; several generations may fail in it."""

    at: float  # when the first generation ended
    reached: int  # the last step that any rank had completed
    generation: int = 0  # the last generation that ended
    ended_at: float = 0.0  # when it did
    is_explained: bool = False  # whether a rank of that generation is known to be lost
    lost: list[dict[str, Any]] = field(default_factory=list[Any])
    source: str = "the beginning"  # what the next generation resumed from
    step: int = 0  # and at which step
