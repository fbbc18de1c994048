"""What a training leaves for the wrapper of its job, because torchrun turns every exit code but 0
into 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def refused(outcome: Path, *flags: str, rank: int = 0) -> str:
    """Run trainval.py with flags that it refuses; what it says."""
    environment = {**os.environ, "LATHE_OUTCOME": str(outcome), "RANK": str(rank)}
    command = [sys.executable, str(ROOT / "trainval.py"), *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment
    )
    assert done.returncode == 2, done.stderr
    return done.stderr.strip()


def test_the_first_rank_that_fails_tells_why_and_those_after_it_do_not_overwrite_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "outcome.json"
    text = refused(path, "-e", "no_such_group", "-sb", str(tmp_path), rank=1)
    assert json.loads(path.read_text()) == {"code": 2, "error": text}
    assert refused(path, "-e", "crossattn_tiny") != text
    assert json.loads(path.read_text()) == {"code": 2, "error": text}
