"""Commands that look at experiments without training them, in a process that may import torch."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs.serve.requests import Refusal
from jobs.submit.prepare import PROJECT

GROUP = "service_experiments"
MAX_OUTPUT = 100_000  # letters of an error
ONE_COMMAND = threading.Lock()


def look(
    words: Sequence[str], experiments: Sequence[dict[str, Any]], folder: Path, *, within_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a command of the trainer over experiments, and return what it printed and its exit code.

    words: the words after `python`; which experiments it looks at is added. folder: an empty one,
    for their dictionaries. Refusal: 429 while another command runs, 504 after `within_s` seconds.
    """
    if not ONE_COMMAND.acquire(blocking=False):
        text = "Another dry run or preview is in progress. Ask again."
        raise Refusal(429, text, code="rate_limit_exceeded", retry_after_s=5)
    try:
        file = folder / "groups.json"
        file.write_text(json.dumps({GROUP: list(experiments)}))
        which = ["-e", GROUP, "--exp_configs", str(file)]
        return subprocess.run(
            [sys.executable, *words, *which],
            cwd=PROJECT,
            capture_output=True,
            text=True,
            timeout=within_s,
        )
    except subprocess.TimeoutExpired:
        text = f"It took more than {within_s:.0f} s. Run {' '.join(words[:3])} by hand."
        raise Refusal(504, text) from None
    finally:
        ONE_COMMAND.release()
