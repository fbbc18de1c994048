"""`make gpu` works before there is a GPU: its rehearsal, what a second call leaves out, its report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def python(*argv: str, timeout_s: float = 500) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.long
def test_parts_are_rehearsed_once_and_reported(tmp_path: Path) -> None:
    chosen = ["environment", "head", "step-vera"]
    argv = ["benchmarks/gpu.py", "--rehearse", "--out", str(tmp_path), "--only", *chosen]
    first = python(*argv)
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout.count(": done in") == len(chosen)
    step = json.loads((tmp_path / "step-vera-xxl-encoder.json").read_text())
    assert step["step_s"] > 0
    assert step["groups_per_s"] > 0
    (tmp_path / "head.json").write_text(json.dumps({"failed": "once", "is_rehearsed": True}))
    again = python(*argv)
    assert again.stdout.count(": done in") == 1, "only what failed is measured again"
    report = python("benchmarks/gpu_report.py", "--out", str(tmp_path))
    assert "| vera-xxl-encoder |" in report.stdout, report.stderr


@pytest.mark.long
def test_every_part_is_rehearsed(tmp_path: Path) -> None:
    done = python("benchmarks/gpu.py", "--rehearse", "--out", str(tmp_path), timeout_s=580)
    assert done.returncode == 0, done.stdout
    profile = json.loads((tmp_path / "profile-vera-xxl-encoder.json").read_text())
    assert sum(profile["shares"].values()) == pytest.approx(1)
    bits = [json.loads(file.read_text()) for file in tmp_path.glob("resume-*.json")]
    assert len(bits) == 6
    assert all(one["as it is"]["repeats"] and one["as it is"]["resumes"] for one in bits)


@pytest.mark.long
def test_a_sigterm_ends_the_runs_and_with_them_the_output(tmp_path: Path) -> None:
    argv = ["benchmarks/gpu.py", "--rehearse", "--out", str(tmp_path), "--only", "step-fid-base"]
    with subprocess.Popen([sys.executable, *argv], cwd=ROOT, stdout=subprocess.PIPE) as begun:
        assert begun.stdout is not None
        assert b"begins" in begun.stdout.readline()
        until = time.monotonic() + 120
        while not list(tmp_path.glob("work/*/out/*/status.json")):
            assert time.monotonic() < until, "no run has begun"
            time.sleep(0.1)
        begun.terminate()
        begun.communicate(timeout=30)  # ends only when nobody holds the pipe any more
    assert begun.returncode == 128 + signal.SIGTERM
