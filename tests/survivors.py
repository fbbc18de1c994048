"""Runs under `--survive` whose ranks meet a fault at a known step: an agent in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.ranks import run_alone
from trainer.files.survive import Survival, parse
from trainer.launch.ending import set_up_logging
from trainer.survival.agent import Agent

ROWS = "rows.jsonl"  # beside the runs: what every rank took into every step


@dataclass(frozen=True)
class Fault:
    """What happens, once, to rank `rank` as it comes to its step `step`, counted from 1."""

    what: str  # "kill", "stop" (SIGSTOP), "spin" (a loop without end), "raise", "nan", "term", "orphan" (the agent)
    rank: int
    step: int
    where: str = "step"  # "step": before it; "mirror": done, and not yet mirrored; "save"


def survived(
    experiments: list[dict[str, Any]],
    options: dict[str, Any],
    spec: str,
    *faults: Fault,
) -> tuple[int, str]:
    """The exit code of the agent, and what it and its ranks wrote."""
    return run_alone(_run, experiments, options, parse(spec), faults)


def _run(
    experiments: list[dict[str, Any]],
    options: dict[str, Any],
    survival: Survival,
    faults: tuple[Fault, ...],
) -> tuple[int, str]:
    share_fork_server()
    base = Path(options["savedir_base"])
    base.mkdir(parents=True, exist_ok=True)
    file = os.open(base / "output.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    set_up_logging()
    code = Agent(survival, __name__, faults, str(base), experiments, options).run()
    return code, (base / "output.txt").read_text(errors="replace")


def share_fork_server() -> None:
    """Python 3.11: a process that a fork server made would start another server, and import all
    again; it knows the address of its own.
    """
    forkserver._forkserver.ensure_running = lambda: None  # pyright: ignore


def become(line: Any, stacks: Any, memory: Any, outputs: Any, environment: Any, *work: Any) -> None:
    faults, base, experiments, options = work
    environment |= {"AGENT": stacks.split("/")[2]}
    os.environ["AGENT"] = environment["AGENT"]
    _plant(faults, Path(base))
    from trainer.launch import rank

    rank.become(line, stacks, memory, outputs, environment, experiments, options)


def _plant(faults: tuple[Fault, ...], base: Path) -> None:
    from trainer.launch import start
    from trainer.survival import mirror
    from trainer.training import loop

    take, keep, snapshot = loop.train_step, mirror.Mirror.keep, start.snapshot

    def step(session: Any, window: Any, **how: Any) -> Any:
        rows = [int(row) for rows in window.rows for row in rows]
        world = session.sharding.world
        with (base / ROWS).open("a") as file:
            file.write(json.dumps([window.step + 1, world, session.sharding.rank, rows]) + "\n")
        meet("step", session.sharding.rank, window.step + 1)
        if Fault("nan", session.sharding.rank, window.step + 1) in faults:
            session = replace(session, task=SimpleNamespace(losses=spoilt(session.task)))
        return take(session, window, **how)

    def spoilt(task: Any) -> Callable[[Any, Any], Iterator[Any]]:
        return lambda *given: (loss * float("nan") for loss in task.losses(*given))

    def kept(self: Any, live: Any, progress: Any, *state: Any) -> None:
        meet("mirror", int(os.environ["RANK"]), progress.step)
        keep(self, live, progress, *state)

    def snap(plan: Any, live: Any, progress: Any, identity: Any) -> Any:
        write = snapshot(plan, live, progress, identity)

        def written() -> Path:
            meet("save", int(os.environ["RANK"]), progress.step)
            return write()

        return written

    def meet(where: str, rank: int, step: int) -> None:
        for number, fault in enumerate(faults):
            if (fault.where, fault.rank, fault.step) != (where, rank, step):
                continue
            if fault.what in _HAPPENINGS and _is_first(base / f"fault-{number}"):
                return _HAPPENINGS[fault.what]()

    loop.train_step, mirror.Mirror.keep, start.snapshot = step, kept, snap


def _is_first(marker: Path) -> bool:
    try:
        marker.open("x").close()
    except FileExistsError:
        return False
    return True


def _spin() -> None:
    while True:
        time.sleep(0.01)


def _raise() -> None:
    raise ArithmeticError("a fault of this rank's own")


_HAPPENINGS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "spin": _spin,
    "term": lambda: os.kill(int(os.environ["AGENT"]), signal.SIGTERM),
    "orphan": lambda: os.kill(int(os.environ["AGENT"]), signal.SIGKILL),
    "raise": _raise,
}


def trained_rows(base: Path) -> dict[int, tuple[int, list[int]]]:
    """{step: (world, every row, sorted)} of what ranks took in the last time that a step was begun
    by all: the earlier times came to nothing.
    """
    shares: dict[tuple[int, int], dict[int, list[int]]] = {}
    found: dict[int, tuple[int, list[int]]] = {}
    for line in (base / ROWS).read_text().splitlines():
        step, world, rank, rows = json.loads(line)
        ranks = shares.setdefault((step, world), {})
        ranks[rank] = rows
        if len(ranks) == world:
            found[step] = (world, sorted(row for own in ranks.values() for row in own))
    return found
