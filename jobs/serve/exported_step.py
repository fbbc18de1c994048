"""The model of a saved step, made by a process of its own, because the server imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from jobs.submit.prepare import PROJECT

EXPORT_S = 900.0


def export_step(run: Path, model: str, cache: Path) -> str | None:
    """Make the folder RUN/step-N of a saved step, where there is none; returns the reason why it
    cannot be made, or None. model: "step-N".
    """
    words = ["-m", "trainer.commands.answer", str(run), str(cache), model]
    try:
        process = subprocess.run(
            [sys.executable, *words],
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=EXPORT_S,
        )
    except subprocess.TimeoutExpired:
        return f"its model was not made within {EXPORT_S:.0f} s. Create the job again."
    try:
        first = json.loads(process.stdout.partition("\n")[0])
    except ValueError:
        return f"the process that makes its model ended with code {process.returncode}."
    return first.get("error")
