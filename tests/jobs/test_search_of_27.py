"""A search of 27 trials with three rungs that is killed nine times: its winner has the bits of an
undisturbed long run, and it costs what its rungs cost.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.search.record import SearchRecord
from tests.jobs.forked_python import ForkedPython
from tests.jobs.stored_code import lay_code_into
from trainer.runtime.process import birth

ROOT = Path(__file__).resolve().parents[2]
KILLS, RUNGS, STEPS = 9, [8, 24], 72
GROUPS = f"""
from exp_configs import CAUSAL_LM_TINY, vary

PARENT = vary(
    CAUSAL_LM_TINY,
    train={{"steps": {STEPS}, "eval_every": {STEPS}, "save_every": {STEPS}, "log_every": 8, "global_batch": 64}},
    data={{"max_tokens": 128}},
    schedule={{"warmup_steps": 4}},
    deepspeed="zero1",
)
KEYS = {{"optim.lr": [3e-4, 1e-3, 3e-3], "optim.weight_decay": [0.0, 0.01, 0.1], "train.seed": [1, 2, 3]}}
EXP_GROUPS = {{"tuned": vary(PARENT, sweep=KEYS, search={{"rungs": {RUNGS}}})}}
"""
JOBS = 'JOB_CONFIGS = {"default": {"resources": {"cpu": 1, "mem": 2}, "max_retries": 9}}\n'


def weights(run: Path) -> str:
    return hashlib.sha256((run / "final" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture
def python(tmp_path: Path) -> Iterator[ForkedPython]:
    python = ForkedPython(tmp_path)
    with python.forking():
        yield python


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_search_of_27_killed_nine_times_has_the_winner_of_undisturbed_runs(
    tmp_path: Path, queue: Path, python: ForkedPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATHE_QUEUE_CPUS", "2")
    base, groups, jobs = tmp_path / "base", tmp_path / "groups.py", tmp_path / "jobs.py"
    groups.write_text(GROUPS)
    jobs.write_text(JOBS)
    lay_code_into(base)
    common = ["-e", "tuned", "-sb", str(base), "--exp_configs", str(groups)]
    words = ["sweep", *common, "-j", "local", "--job_configs", str(jobs), "--allow-dirty"]
    words += ["--python_binary", str(python.program), "--", "--cache_dir", str(tmp_path / "cache")]
    record = SearchRecord.of(base, "tuned")
    _search_through_kills(words, record, tmp_path)
    search = record.read()
    assert search is not None
    assert search.best is not None
    assert [len(search.promoted[rung]) for rung in RUNGS] == [9, 3]
    attempts = Counter(
        len(list((base / one.exp_id / "attempts").iterdir())) for one in search.trials
    )
    assert sum(count * times for count, times in attempts.items()) <= 27 + 9 + 3 + KILLS // 3
    best, searching_s = search.trials[search.best], python.cpu_s()

    alone, python.spent = tmp_path / "alone", tmp_path / "cpu-of-long-runs"
    finalists = [search.trials[number] for number in search.promoted[RUNGS[-1]]]
    for trial in finalists:
        assert _run(python, base / trial.exp_id, alone) == 0
        assert weights(alone / trial.exp_id) == weights(base / trial.exp_id)
    scores = {trial.exp_id: _last(alone / trial.exp_id) for trial in finalists}
    assert min(scores, key=lambda name: scores[name]) == best.exp_id
    # a start costs as much as dozens of steps of so small a model: it is taken off both sides
    whole_s = sum(python.cpu_s()) / len(finalists) * 27
    python.spent = tmp_path / "cpu-of-a-start"
    assert _run(python, base / best.exp_id, tmp_path / "stopped", "--until", "1") == 10
    (start_s,) = python.cpu_s()
    starts, search_s = len(searching_s), sum(searching_s)
    share = (search_s - starts * start_s) / (whole_s - 27 * start_s)
    print(
        f"CPU seconds: the search {search_s:.0f} with {starts} starts, 27 whole runs "
        f"{whole_s:.0f}, a start {start_s:.1f}; without starts {share:.0%}, of the steps 26%"
    )
    assert share < 0.45


def _run(python: ForkedPython, of: Path, base: Path, *flags: str) -> int:
    """The exit code of a training of the experiment of another run folder, into `base`."""
    (base / of.name).mkdir(parents=True)
    (base / of.name / "exp_dict.json").write_text((of / "exp_dict.json").read_text())
    own = ["trainval.py", "--exp_id", of.name, "-sb", str(base), *flags]
    words = [str(python.program), *own, "--cache_dir", str(base.parent / "cache")]
    return subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL).returncode


def _search_through_kills(words: list[str], record: SearchRecord, folder: Path) -> None:
    """Start the search again and again, until the last start comes to the end."""
    for kill in range(KILLS + 1):
        seen = _lines(record)
        with (folder / f"driver-{kill}").open("w") as said:
            driver = subprocess.Popen(
                [sys.executable, "-m", "jobs", *words], cwd=ROOT, stdout=said, stderr=said
            )
        if kill == KILLS:
            assert driver.wait(timeout=5400) == 0, (folder / f"driver-{kill}").read_text()
            break
        # the first is killed as soon as it has asked; the others a few scores later
        while driver.poll() is None and _lines(record) < seen + (28 if not kill else 4):
            time.sleep(0.05)
        driver.kill()
        driver.wait()
        if kill % 3 == 2:
            _kill_one_training(folder / "base")


def _lines(record: SearchRecord) -> int:
    return len(record.path.read_bytes().splitlines()) if record.path.exists() else 0


def _last(run: Path) -> float:
    return json.loads((run / "score_list.json").read_text())[-1]["valid/loss"]


def _kill_one_training(base: Path) -> None:
    """SIGKILL one training that runs, as the kernel does when memory is over."""
    for path in base.glob("[0-9a-f]*/status.json"):
        told = json.loads(path.read_text())
        process = told["process"]
        if told["state"] == "running" and birth(process["pid"]) == process.get("birth"):
            os.kill(process["pid"], signal.SIGKILL)
            return
