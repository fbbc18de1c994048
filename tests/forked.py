"""`python ARGV` as a process that forks from one which has imported everything: five CPU seconds
less for each start.

What a user sees is the same: arguments, folder, environment, standard output and error, signals,
exit code. Only the imports have happened before. Tests of what is imported, and one start of each
launcher, use real processes instead.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.ranks import SERVED

ROOT = Path(__file__).resolve().parent.parent
TRAINVAL = (str(ROOT / "trainval.py"),)
TRAINER = ("-m", "trainer")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Started:
    """A command that was started: its process, and the files that take what it writes."""

    argv: tuple[str, ...]
    process: Any
    folder: tempfile.TemporaryDirectory[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        """What it has written to standard output so far."""
        return _text(self.folder.name, "output")

    @property
    def errors(self) -> str:
        """What it has written to standard error so far."""
        return _text(self.folder.name, "errors")

    def finish(self, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """Its exit code and texts once it has ended, as subprocess.run gives them; -9 means killed
        by signal 9.
        """
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(
                f"{self.argv} had not ended after {timeout_s} s:\n{self.output}\n{self.errors}"
            )
        return subprocess.CompletedProcess(
            self.argv, self.process.exitcode, self.output, self.errors
        )


def start(
    *argv: str,
    cwd: Path = ROOT,
    variables: Mapping[str, str] | None = None,
    first: Callable[[], None] | None = None,
) -> Started:
    """Start `python ARGV` with this process's environment, no launcher's variables, and `variables`
    besides.

    first: a module-level function (or a partial of one) that the process calls before its command:
    a fault to plant.
    """
    environment = {
        name: value for name, value in os.environ.items() if name not in LAUNCHER
    } | dict(variables or {})
    folder = tempfile.TemporaryDirectory(prefix="forked-")
    process = SERVED.Process(target=_become, args=(argv, str(cwd), environment, folder.name, first))
    process.start()
    return Started(argv, process, folder)


def run(*argv: str, timeout_s: float = 240, **how: Any) -> subprocess.CompletedProcess[str]:
    """start(), then finish()."""
    return start(*argv, **how).finish(timeout_s)


class Measurer:
    """The process of trainer/plan/memory/measure.py, looked at as a Popen is."""

    def __init__(self, said: Any) -> None:
        """said: the file that takes its standard error once it has ended."""
        self._said, self._folder = said, tempfile.TemporaryDirectory(prefix="measurer-")
        asked, answers, errors = (
            os.path.join(self._folder.name, name) for name in ("asked", "answers", "errors")
        )
        os.mkfifo(asked)
        os.mkfifo(answers)
        self._process = SERVED.Process(target=_measure, args=(asked, answers, errors))
        self._process.start()
        self.stdin, self.stdout = open(asked, "w"), open(answers)  # noqa: SIM115 (close)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        """Its exit code."""
        self._process.join()
        code = self._process.exitcode
        assert code is not None
        errors = Path(self._folder.name, "errors")
        if errors.is_file():
            self._said.write(errors.read_text())
            self._said.flush()
            self._folder.cleanup()
        return code


def _measure(asked: str, answers: str, errors: str) -> None:
    """In the forked process: be `python -m trainer.plan.memory.fake_step`."""
    from trainer.plan.memory import fake_step, measure

    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
    sys.stdin, sys.stdout = open(asked), open(answers, "w")  # noqa: SIM115 (until it ends)
    os.environ.clear()
    os.environ.update(measure._environment())  # pyright: ignore[reportPrivateUsage]
    try:
        fake_step.main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_ranks(world: int, *argv: str, **how: Any) -> list[Started]:
    """The same command as `world` ranks, with the variables that torchrun sets."""
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return [start(*argv, variables=variables, **how) for variables in ranks]


def run_ranks(
    world: int, *argv: str, timeout_s: float = 240, **how: Any
) -> list[subprocess.CompletedProcess[str]]:
    """start_ranks(), then finish(), by rank. As a launcher does, it ends the others once one has
    failed.
    """
    ranks = start_ranks(world, *argv, **how)
    waiting = {rank.process.sentinel: rank for rank in ranks}
    while waiting:
        ended = connection.wait(list(waiting), timeout_s)
        has_failed = [waiting.pop(sentinel).process.exitcode for sentinel in ended] != [0] * len(
            ended
        )
        if has_failed or not ended:
            for rank in waiting.values():
                rank.process.kill()
    return [rank.finish(timeout_s) for rank in ranks]


def _become(
    argv: tuple[str, ...],
    cwd: str,
    environment: dict[str, str],
    folder: str,
    first: Callable[[], None] | None,
) -> None:
    """In the forked process: be what `python ARGV` is, and end as it does."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "output"), (2, "errors")):
        file = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    if first is not None:
        first()
    if argv[0] == "-m":
        sys.path.insert(0, cwd)
        sys.argv = [argv[1], *argv[2:]]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(argv[0]).parent))
        sys.argv = list(argv)
        runpy.run_path(argv[0], run_name="__main__")


def _text(folder: str, name: str) -> str:
    path = Path(folder, name)
    return path.read_text() if path.exists() else ""
