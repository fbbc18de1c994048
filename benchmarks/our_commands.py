"""Our own commands, as the benchmarks run them: one thread a process, and its CPU time counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}


def run(*argv: object, log: Path) -> tuple[str, float]:
    """What a command of ours printed on its output, and its CPU seconds.

    argv: as after `python`, from the root of the checkout. log: what it printed on its error
    output, added to what is there. Ends the program with both texts when the command fails.
    """
    command = [sys.executable, *(str(word) for word in argv)]
    log.parent.mkdir(parents=True, exist_ok=True)
    out = log.with_suffix(".out")
    with log.open("a") as errors, out.open("w+") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=errors, env=os.environ | _ENVIRONMENT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        text = out.read_text()
    if process.returncode:
        sys.exit(f"{' '.join(command)}\nended with {process.returncode}\n{text}\n{log.read_text()}")
    return text, usage.ru_utime + usage.ru_stime
