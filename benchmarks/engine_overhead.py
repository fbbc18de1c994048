"""How long a step of our loop takes, against a bare torch loop and against the Hugging Face Trainer
with DeepSpeed.

    python benchmarks/engine_overhead.py [--rounds N] [--steps N] [--batch 8 2] [--clock cpu]
    [--json]

Prints a table of median step times and ratios, and exits 0; exits 1 when the contestants' losses
differ, for then they do not do the same work. Contestants take turns step by step, so that the
noise of the machine hits all alike; each round starts new processes, so that the luck of one memory
layout is not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # runs from a checkout that is not installed

from contestants import CHECKED, TOKENS, BareTorch, Work, hugging_face, lathe, write_data
from races import environment, ratio

from trainer.runtime import distributed

OURS, DEFAULT, FUSED = "lathe", "bare torch, AdamW", "bare torch, AdamW fused"
TRAINER = "Trainer + DeepSpeed"
SETTLING = 2  # timed steps left out of every round
TOLERANCE = 1e-4  # of the losses
REST_S = 0.02  # between the turns of two processes: lets OpenMP's waiting threads fall asleep
TARGETS = {DEFAULT: 1.05, FUSED: 1.05, TRAINER: 1.0}

Seconds = dict[str, list[float]]
Losses = dict[str, list[float]]


@dataclass
class Match:
    """What was measured of one batch size at one stage, by contestant."""

    batch: int
    stage: int
    seconds: Seconds = field(default_factory=dict)
    losses: list[Losses] = field(default_factory=list)  # of every round

    def add(self, seconds: Seconds, losses: Losses) -> None:
        for name, values in seconds.items():
            self.seconds.setdefault(name, []).extend(values[SETTLING:])
        self.losses.append(losses)

    def lines(self) -> list[Line]:
        ours = self.seconds[OURS]
        return [
            Line.of(self, name, ours, theirs)
            for name, theirs in self.seconds.items()
            if name != OURS
        ]


def disagreement(losses: Losses) -> float:
    """The largest difference between contestants over the CHECKED first steps; infinite when a loss
    is not finite.
    """
    if not all(
        len(values) == CHECKED and all(map(math.isfinite, values)) for values in losses.values()
    ):
        return math.inf
    return max(max(column) - min(column) for column in zip(*losses.values(), strict=True))


@dataclass(frozen=True)
class Line:
    """Our step time against one other's. low, high: quartiles of the ratio over
    neighbouring turns.
    """

    batch: int
    stage: int
    against: str
    ours_ms: float
    theirs_ms: float
    ratio: float
    low: float
    high: float
    target: float

    @classmethod
    def of(cls, match: Match, against: str, ours: list[float], theirs: list[float]) -> Line:
        times = ratio(ours, theirs)
        ours_ms, theirs_ms = 1e3 * statistics.median(ours), 1e3 * statistics.median(theirs)
        return cls(
            match.batch,
            match.stage,
            against,
            ours_ms,
            theirs_ms,
            ours_ms / theirs_ms,
            times["low"],
            times["high"],
            TARGETS[against],
        )

    def __str__(self) -> str:
        times = (
            f"{self.ours_ms:9.1f} {self.theirs_ms:9.1f} {self.ratio:8.3f}   "
            f"{self.low:.3f}-{self.high:.3f}"
        )
        return f"{self.batch:5d} {self.stage:5d}   {self.against:24s}{times}   {self.target:.2f}"


# Against bare torch: one process, in turns inside our loop
# ---------------------------------------------------------


def against_bare_torch(work: Work, connection: Any) -> None:
    """Train our loop at stage 0; between its steps the bare loops take theirs. Sends (seconds,
    losses).
    """
    distributed.init()
    others = {DEFAULT: BareTorch(work), FUSED: BareTorch(work, fused=True)}
    losses = {name: [float(other.step()) for _ in range(CHECKED)] for name, other in others.items()}
    seconds: Seconds = {OURS: [], DEFAULT: [], FUSED: []}
    began: list[float] = []

    def between() -> None:
        if began:
            seconds[OURS].append(work.now() - began.pop())
            for name, other in others.items():
                start = work.now()
                other.step()
                seconds[name].append(work.now() - start)
        began.append(work.now())

    losses[OURS] = lathe(work, 0, between)
    connection.send((seconds, losses))


# Against the Trainer: a process each, a step of one and then a step of the other
# -----------------------------------


def in_turns(
    contestant: Callable[..., list[float]], work: Work, stage: int, connection: Any
) -> None:
    """Train, one step each time that something is received; sends its seconds. At the end sends the
    losses.
    """
    if contestant is lathe:
        distributed.init()
    else:
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=_free_port(),
        )
    began: list[float] = []

    def between() -> None:
        connection.send(work.now() - began.pop() if began else None)
        connection.recv()
        began.append(work.now())

    connection.send(contestant(work, stage, between))


def against_trainer(work: Work, stage: int) -> tuple[Seconds, Losses]:
    names = {OURS: lathe, TRAINER: hugging_face}
    ends = {name: _start(in_turns, contestant, work, stage) for name, contestant in names.items()}
    for end in ends.values():
        _receive(end)  # ready: its first step after the checked ones is done
    seconds: Seconds = {name: [] for name in names}
    for _ in range(work.steps - 1):
        for name, end in ends.items():
            time.sleep(REST_S)
            end.send("go")
            seconds[name].append(_receive(end))
    for end in ends.values():
        end.send("go")
    return seconds, {name: _receive(end) for name, end in ends.items()}


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


# Processes
# --------------------------------------------------------------------------------------------------


def _start(function: Callable[..., None], *args: Any) -> Any:
    """Call `function(*args, connection)` in a new process. Returns our end of the connection."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=_child, args=(function, args, theirs), daemon=True).start()
    theirs.close()
    return ours


def _child(function: Callable[..., None], args: tuple[Any, ...], connection: Any) -> None:
    quiet = os.open(
        os.devnull, os.O_WRONLY
    )  # what deepspeed and our console say would break the table
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        function(*args, connection)
    except BaseException:
        connection.send(ChildFailed(traceback.format_exc()))
    os._exit(0)  # gloo's threads can abort a finished process in the interpreter's own way out


class ChildFailed(Exception):
    """The traceback of a contestant's process."""


def _receive(end: Any) -> Any:
    try:
        value = end.recv()
    except EOFError:
        raise SystemExit(
            "a contestant's process died without a word: is there memory for three models?"
        ) from None
    if isinstance(value, ChildFailed):
        raise SystemExit(f"a contestant failed:\n{value}")
    return value


# The command
# --------------------------------------------------------------------------------------------------


def measure(batch: int, *, rounds: int, steps: int, clock: str) -> list[Match]:
    """All matches at one batch size: bare torch at stage 0, the Trainer at stages 0 and 2."""
    bare, trainers = Match(batch, 0), {stage: Match(batch, stage) for stage in (0, 2)}
    with tempfile.TemporaryDirectory() as folder:
        work = Work(
            Path(folder), batch, steps + SETTLING + 1, clock
        )  # the step before the first turn is not timed
        write_data(work)
        for _ in range(rounds):
            bare.add(*_receive(_start(against_bare_torch, work)))
            for stage, match in trainers.items():
                match.add(*against_trainer(work, stage))
    return [bare, *trainers.values()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Step time of our loop against bare torch and the Trainer."
    )
    parser.add_argument("--rounds", type=int, default=3, help="new processes each")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each round")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[8, 2], help=f"rows of {TOKENS} tokens a step"
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: for a busy machine, one thread",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    options = parser.parse_args()
    shape = {"rounds": options.rounds, "steps": options.steps, "clock": options.clock}
    matches = [match for batch in options.batch for match in measure(batch, **shape)]
    lines = [line for match in matches for line in match.lines()]
    worst = max(disagreement(losses) for match in matches for losses in match.losses)
    if options.json:
        found = {
            "environment": environment("accelerate"),
            "loss_difference": worst,
            "lines": [asdict(line) for line in lines],
        }
        print(json.dumps(found, indent=1))
    else:
        print(environment("accelerate"))
        print(
            f"{options.rounds} round(s) of {options.steps} steps, {options.clock} clock, fp32, "
            "clip 1.0"
        )
        print(
            "batch stage   against                      ours ms  theirs ms   ratio   quartiles   "
            "  target"
        )
        print("\n".join(str(line) for line in lines))
        print(f"losses of the first {CHECKED} steps differ by at most {worst:.1e}")
    if not worst <= TOLERANCE:
        for match in matches:
            print(f"batch {match.batch} stage {match.stage}: {match.losses}", file=sys.stderr)
        raise SystemExit(
            f"the losses differ by {worst:.1e}, more than {TOLERANCE}: this compares different work"
        )


if __name__ == "__main__":
    main()
