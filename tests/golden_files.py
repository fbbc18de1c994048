"""Golden files: what a task gave once, and with what it was made.

LATHE_WRITE_GOLDEN="why they move" pytest tests/contract -k golden writes them anew.
"""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

GOLDEN = Path(__file__).parent / "golden"
WRITES = "LATHE_WRITE_GOLDEN"  # in the environment: the reason, or 1 for none
MADE_WITH = (
    "python",
    "torch",
    "transformers",
    "deepspeed",
    "processor",
    "cpu_capability",
    "threads",
    "command",
    "reason",
)


def read(task: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{task}.json").read_text())


def write_if_told(task: str, **facts: Any) -> None:
    """Write these facts, and with what they were made, if LATHE_WRITE_GOLDEN is set."""
    if not os.environ.get(WRITES):
        return
    path = GOLDEN / f"{task}.json"
    before = read(task) if path.exists() else {}
    content = {**before, "made_with": made_with(os.environ[WRITES]), **facts}
    path.write_text(json.dumps(content, indent=1) + "\n")


def made_with(reason: str) -> dict[str, str | int]:
    """What a golden file says of its making, here and now."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "deepspeed": version("deepspeed"),
        "processor": processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": 1,  # tests/ranks.py gives each rank one, and the losses come from a rank
        "command": f"{WRITES}=... pytest tests/contract -k golden",
        "reason": "unknown" if reason == "1" else reason,
    }


def processor() -> str:
    """The name that Linux gives it; "unknown" elsewhere."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"
