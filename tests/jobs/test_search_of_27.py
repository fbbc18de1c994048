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
from pathlib import Path

import pytest

from jobs.search.record import SearchRecord
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
# The training, and behind it a line with the CPU seconds that it took.
TIMED = """#!{python} -S
import os, sys
path = {path!r}
pid = os.fork()
if not pid:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
_, status, used = os.wait4(pid, 0)
with open(path, "a") as file:
    file.write(f"{{used.ru_utime + used.ru_stime:.2f}}\\n")
sys.exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
"""


def weights(run: Path) -> str:
    return hashlib.sha256((run / "final" / "model.safetensors").read_bytes()).hexdigest()


def cpu_s(path: Path) -> float:
    return sum(map(float, path.read_text().split()))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_search_of_27_killed_nine_times_has_the_winner_of_undisturbed_runs(
    tmp_path: Path, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATHE_QUEUE_CPUS", "2")
    base, groups, jobs = tmp_path / "base", tmp_path / "groups.py", tmp_path / "jobs.py"
    groups.write_text(GROUPS)
    jobs.write_text(JOBS)
    spent, timed = tmp_path / "cpu", tmp_path / "python"
    timed.write_text(TIMED.format(python=sys.executable, path=str(spent)))
    timed.chmod(0o755)
    lay_code_into(base)
    common = ["-e", "tuned", "-sb", str(base), "--exp_configs", str(groups)]
    words = ["sweep", *common, "-j", "local", "--job_configs", str(jobs), "--allow-dirty"]
    words += ["--python_binary", str(timed), "--", "--cache_dir", str(tmp_path / "cache")]
    record = SearchRecord.of(base, "tuned")
    for kill in range(KILLS + 1):
        seen = _lines(record)
        with (tmp_path / f"driver-{kill}").open("w") as said:
            driver = subprocess.Popen(
                [sys.executable, "-m", "jobs", *words], cwd=ROOT, stdout=said, stderr=said
            )
        if kill == KILLS:
            assert driver.wait(timeout=5400) == 0, (tmp_path / f"driver-{kill}").read_text()
            break
        # the first is killed as soon as it has asked; the others a few scores later
        while driver.poll() is None and _lines(record) < seen + (28 if not kill else 4):
            time.sleep(0.05)
        driver.kill()
        driver.wait()
        if kill % 3 == 2:
            _kill_one_training(base)
    search = record.read()
    assert search is not None
    assert search.best is not None
    assert [len(search.promoted[rung]) for rung in RUNGS] == [9, 3]
    attempts = Counter(
        len(list((base / one.exp_id / "attempts").iterdir())) for one in search.trials
    )
    assert sum(count * times for count, times in attempts.items()) <= 27 + 9 + 3 + KILLS // 3
    best = search.trials[search.best]

    alone, long_cpu = tmp_path / "alone", tmp_path / "long"
    timed.write_text(TIMED.format(python=sys.executable, path=str(long_cpu)))
    finalists = [search.trials[number] for number in search.promoted[RUNGS[-1]]]
    for trial in finalists:
        (alone / trial.exp_id).mkdir(parents=True)
        values = (base / trial.exp_id / "exp_dict.json").read_text()
        (alone / trial.exp_id / "exp_dict.json").write_text(values)
        own = ["trainval.py", "--exp_id", trial.exp_id, "-sb", str(alone)]
        run = [str(timed), *own, "--cache_dir", str(tmp_path / "cache")]
        subprocess.run(run, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        assert weights(alone / trial.exp_id) == weights(base / trial.exp_id)
    scores = {trial.exp_id: _last(alone / trial.exp_id) for trial in finalists}
    assert min(scores, key=lambda name: scores[name]) == best.exp_id
    # a start costs as much as dozens of steps of so small a model: it is taken off both sides
    starts, whole = len(spent.read_text().split()), cpu_s(long_cpu) / len(finalists) * 27
    start_s = _start_s(timed, tmp_path, base / best.exp_id)
    share = (cpu_s(spent) - starts * start_s) / (whole - 27 * start_s)
    print(
        f"CPU seconds: the search {cpu_s(spent):.0f} with {starts} starts, 27 whole runs "
        f"{whole:.0f}, a start {start_s:.1f}; without starts {share:.0%}, of the steps 26%"
    )
    assert share < 0.45


def _start_s(timed: Path, folder: Path, run: Path) -> float:
    """The CPU seconds of a run that is stopped after its first step."""
    once, base = folder / "once", folder / "stopped"
    timed.write_text(TIMED.format(python=sys.executable, path=str(once)))
    (base / run.name).mkdir(parents=True)
    (base / run.name / "exp_dict.json").write_text((run / "exp_dict.json").read_text())
    own = ["trainval.py", "--exp_id", run.name, "-sb", str(base), "--until", "1"]
    words = [str(timed), *own, "--cache_dir", str(folder / "cache")]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL)
    assert done.returncode == 10
    return cpu_s(once)


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
