"""`-j inline`: this process and this terminal, one experiment after the other."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.conftest import Make, wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_submission_saves_and_starts_no_other(
    place: Make, number: signal.Signals
) -> None:
    here = place(3)
    here.says("sleep")
    words = [
        "submit",
        "-e",
        "sweep",
        "-sb",
        str(here.base),
        "-j",
        "inline",
        "--exp_configs",
        str(here.groups),
    ]
    words += ["--python_binary", str(here.python), "--allow-dirty"]
    submitter = subprocess.Popen(
        [sys.executable, "-m", "jobs", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(here.starts, bool)
    submitter.send_signal(number)
    said, _ = submitter.communicate(timeout=120)
    assert submitter.returncode == 3, said
    assert f"preempted: stopped by {number.name}" in said
    assert said.count("the one before it was stopped") == 2
    assert len(here.starts()) == 1
    here.says("ok")
    here.lathe(*words)
    assert [row["state"] for row in here.status()] == ["succeeded"] * 3


def test_a_failed_experiment_makes_the_submission_fail(place: Make) -> None:
    here = place(2)
    here.says("7")
    said = here.submit(backend="inline")
    assert said.code == 3
    assert said.out.count("failed: exit code 7") == 2
