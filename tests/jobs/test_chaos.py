"""Three submitters at once, killed at random and started again, until all is done: each experiment
starts once.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import Make, Place
from tests.jobs.real_slurm import need_slurm, real_slurm
from tests.jobs.toolkit_standin import standin
from tests.long import long_but

ROOT = Path(__file__).resolve().parents[2]
SUBMITTERS = 3
KILLS = 12


@dataclass
class Storm:
    """What happened to the submitters."""

    kills: int = 0
    finished: int = 0


def storm(here: Place, backend: str, *words: str, within_s: float, seed: int) -> Storm:
    """Keep three submitters alive, killing one every now and then, until three have ended well
    after the last kill.
    """
    random_ = random.Random(seed)
    argv = [
        sys.executable,
        "-m",
        "jobs",
        "submit",
        "-e",
        "sweep",
        "-sb",
        str(here.base),
        "-j",
        backend,
    ]
    argv += [
        "--exp_configs",
        str(here.groups),
        "--python_binary",
        str(here.python),
        "--allow-dirty",
    ]
    argv += ["--resend_after", "2", *words]
    log = (here.base.parent / "submitters.log").open("ab")
    happened, deadline = Storm(), time.monotonic() + within_s

    def begin() -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)

    live = [begin() for _ in range(SUBMITTERS)]
    next_kill = time.monotonic() + 1
    try:
        while happened.finished < SUBMITTERS:
            assert time.monotonic() < deadline, (happened, Path(log.name).read_text()[-2000:])
            time.sleep(0.02)
            if happened.kills < KILLS and time.monotonic() > next_kill:
                victim = random_.choice(live)
                victim.send_signal(signal.SIGKILL)
                happened.kills += victim.wait() == -signal.SIGKILL
                next_kill = time.monotonic() + random_.uniform(0.1, 0.9)
            for process in [process for process in live if process.poll() is not None]:
                live.remove(process)
                assert process.returncode in (0, 3, 4, -signal.SIGKILL), Path(log.name).read_text()[
                    -2000:
                ]
                if process.returncode == 0 and happened.kills >= KILLS:
                    happened.finished += 1
                live.append(begin())
    finally:
        for process in live:
            process.kill()
            process.wait()
        log.close()
    return happened


def check(here: Place, rows: list[dict[str, Any]], count: int) -> None:
    """Each experiment was accepted once, under one id, started once, and has its own result."""
    assert len(rows) == count
    for row in rows:  # of an array that was killed before it was sent, the experiments went alone
        earlier = [
            Path(row["folder"]) / "attempts" / str(number) for number in range(1, row["attempts"])
        ]
        assert all((folder / "given-up").exists() for folder in earlier)
        assert not any(list(folder.glob("started-*")) for folder in earlier)
    assert len({row["job_id"] for row in rows}) == count
    assert Counter(here.starts()) == Counter(row["exp_id"] for row in rows)
    assert sorted(row["metrics"]["loss"] for row in rows) == list(range(count))


@pytest.mark.long  # twenty seconds
def test_on_the_toolkit_that_loses_replies(
    place: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, count = place(24), 24
    configs = tmp_path / "jobs.py"
    configs.write_text(
        f"""JOB_CONFIGS = {{"default": {{"image": "registry.example.com/lathe", "data": ["org.a.x:{tmp_path}"],
        "python": {sys.executable!r}, "resources": {{"cpu": 1, "mem": 1}}}}}}"""
    )
    monkeypatch.setenv("LATHE_EAI_RETRY_S", "5")
    with standin(own_process=True, slots=4) as toolkit:
        toolkit.lose_fraction(0.3, 1)
        happened = storm(here, "toolkit", "--job_configs", str(configs), within_s=150, seed=1)
        toolkit.lose_fraction(0.0)
        rows = here.until_all("succeeded", within_s=180)
        stats = toolkit.stats()
    check(here, rows, count)
    assert happened.kills == KILLS
    assert stats["lost"] > 0
    assert (stats["created"], set(stats["starts"].values())) == (count, {1})


@pytest.mark.long
@pytest.mark.parametrize("words", [(), ("--array",)], ids=["one-by-one", "arrays"])
def test_on_slurm(place: Make, tmp_path: Path, words: tuple[str, ...]) -> None:
    need_slurm()
    here, count = place(40), 40
    configs = tmp_path / "jobs.py"
    configs.write_text('JOB_CONFIGS = {"default": {"resources": {"cpu": 1, "mem": 1}}}')
    with real_slurm():
        happened = storm(here, "slurm", "--job_configs", str(configs), *words, within_s=150, seed=2)
        rows = here.until_all("succeeded", within_s=100)
        check(here, rows, count)
    assert happened.kills == KILLS
    if not words:
        assert {row["attempts"] for row in rows} == {1}


@pytest.mark.parametrize("count", long_but((), (24, 40)))
def test_on_the_local_queue(place: Make, queue: Path, count: int) -> None:
    here = place(count)
    happened = storm(here, "local", within_s=150, seed=3)
    rows = here.until_all("succeeded", within_s=180)
    check(here, rows, count)
    assert happened.kills == KILLS
    assert len(os.listdir(queue / "jobs")) == count
