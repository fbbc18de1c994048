"""Our own commands, as the benchmarks run them: one thread a process, and its CPU time counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}


def run(
    *argv: object, log: Path, killed_when: Callable[[], bool] | None = None
) -> tuple[str, float]:
    """What a command of ours printed on its output, and its CPU seconds.

    argv: as after `python`, from the root of the checkout. log: what it printed on its error
    output, added to what is there. killed_when: asked ten times a second; the first yes kills the
    command with signal 9, and it is run again. Ends the program with both texts when the command
    fails.
    """
    command = [sys.executable, *(str(word) for word in argv)]
    log.parent.mkdir(parents=True, exist_ok=True)
    out, cpu_s = log.with_suffix(".out"), 0.0
    with log.open("a") as errors, out.open("w+") as output:
        while True:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=errors, env=os.environ | _ENVIRONMENT
            )
            code, seconds = _waited(process, killed_when)
            cpu_s += seconds
            if code != -signal.SIGKILL or killed_when is None:
                break
            killed_when = None
        text = out.read_text()
    if code:
        sys.exit(f"{' '.join(command)}\nended with {code}\n{text}\n{log.read_text()}")
    return text, cpu_s


def figures(text: str) -> dict[str, str]:
    """The lines of a command's output that are a name and a value."""
    return dict(line.split() for line in text.splitlines() if len(line.split()) == 2)


def _waited(
    process: subprocess.Popen[bytes], killed_when: Callable[[], bool] | None
) -> tuple[int, float]:
    """The exit code and the CPU seconds of a process that may be killed meanwhile."""
    status = 0
    while killed_when is not None:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        if killed_when():
            process.kill()
            killed_when = None
        time.sleep(0.1)
    else:
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime
