"""Groups of experiments on a real Slurm: preempted, requeued, cancelled, held, forgotten, and
arrays of them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.jobs.conftest import Make, Place, wait_until
from tests.jobs.real_slurm import RealSlurm, need_slurm, real_slurm

TIMINGS = ("at", "seal", "goodput", "step_s", "tokens_per_s", "peak_gib", "mfu", "tflops")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RealSlurm]:
    need_slurm()
    with real_slurm(kill_wait_s=30) as running:
        yield running


@pytest.fixture
def here(place: Make, tmp_path: Path, cluster: RealSlurm) -> Callable[..., Place]:
    """A Place whose jobs go to Slurm, in the partition `low` unless said otherwise."""

    def make(count: int, **job: Any) -> Place:
        made = place(count)
        values = {"resources": {"cpu": 1, "mem": 1}, "partition": "low", **job}
        (tmp_path / "jobs.py").write_text(f"JOB_CONFIGS = {{'default': {values!r}}}")
        return made

    return make


def submit(place: Place, *words: str) -> Any:
    said = place.submit(
        "--job_configs", str(place.base.parent / "jobs.py"), *words, backend="slurm"
    )
    assert said.code in (0, 4), said.out
    return said


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what is timing."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]


def step_of(folder: Path) -> int:
    """The last step in metrics.jsonl; 0 before the first."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_is_preempted_requeued_and_ends_as_if_nothing_had_been(
    ranks: int, here: Callable[..., Place], cluster: RealSlurm, tmp_path: Path
) -> None:
    made = here(
        0, resources={"cpu": 2, "mem": 2}, environment_vars={"OMP_NUM_THREADS": "1"}, nodelist="n1"
    )
    made.groups.write_text(
        "from exp_configs import EXP_GROUPS as BUILT_IN, vary\n"
        'STEPS = {"steps": 44, "log_every": 1, "eval_every": 44, "save_every": 5}\n'
        'EXP_GROUPS = {"sweep": [vary(BUILT_IN["crossattn_tiny"][0], train=STEPS)]}\n'
    )
    launcher = f"{sys.executable} -m torch.distributed.run --nproc-per-node {ranks}"
    python = sys.executable if ranks == 1 else launcher
    words = ["--python_binary", python, "--", f"--cache_dir={tmp_path / 'cache'}"]
    said = submit(made, *words)
    assert said.code == 0, said.out
    folder = Path(made.status()[0]["folder"])
    wait_until(lambda: step_of(folder), lambda step: step >= 8, within_s=180)
    urgent = tmp_path / "urgent"
    urgent.write_text("#!/bin/sh\nexec sleep 1\n")
    cluster.command(
        "sbatch", "-p", "high", "-w", "n1", "-c", "2", "--mem=64", "-o", "/dev/null", str(urgent)
    )
    stopped = wait_until(lambda: [*folder.glob("attempts/1/exit*.json")], bool, within_s=180)
    assert json.loads(stopped[0].read_text())["code"] == 75
    wait_until(lambda: (folder / "attempts/1/started-2.json").exists(), bool, within_s=180)
    saved_at = step_of(folder)
    wait_until(lambda: step_of(folder), lambda step: step >= saved_at + 8, within_s=180)
    # where Slurm has not saved that the job runs, it kills it and starts it once more
    cluster.kill_controller()
    cluster.start_controller()
    (row,) = made.until_all("succeeded", "failed", within_s=120)
    assert row["state"] == "succeeded", row["reason"]
    assert row["attempts"] == 1
    assert len(row["starts"]) >= 2
    assert "resumed from" in (folder / "attempts/1/logs.txt").read_text()

    where = ("--exp_configs", str(made.groups), "-sb", str(tmp_path / "undisturbed"), words[-1])
    # as many ranks: others sum in another order
    done = forked.run_ranks(ranks, *forked.TRAINVAL, "-e", "sweep", *where)
    assert [rank.returncode for rank in done] == [0] * ranks, done[0].stderr
    undisturbed = tmp_path / "undisturbed" / folder.name
    assert metrics_of(folder) == metrics_of(undisturbed)
    weights = [
        next(each.glob("final/*.safetensors")).read_bytes() for each in (folder, undisturbed)
    ]
    assert weights[0] == weights[1]


def made_token(row: dict[str, Any]) -> str:
    return row["history"][-1]["token"]


@pytest.mark.long
def test_an_array_of_twenty_runs_each_once_two_at_a_time(here: Callable[..., Place]) -> None:
    made = here(20)
    said = submit(made, "--array", "--max-parallel", "2", "--json").json
    assert [result["action"] for result in said] == ["send"] * 20
    rows = made.until_all("succeeded", within_s=180)
    assert len({row["job_id"].partition("_")[0] for row in rows}) == 1
    assert {row["job_id"].partition("_")[2] for row in rows} == {str(index) for index in range(20)}
    assert Counter(made.starts()) == Counter(row["exp_id"] for row in rows)
    assert {(result["action"]) for result in submit(made, "--array", "--json").json} == {"skip"}


def test_scancel_is_reported_as_cancelled_and_not_run_again(
    here: Callable[..., Place], cluster: RealSlurm
) -> None:
    made = here(1)
    made.says("sleep")
    submit(made)
    (row,) = made.until(lambda rows: bool(made.starts()))
    cluster.command("scancel", row["job_id"])
    (row,) = made.until_all("cancelled")
    cluster.wait_gone(row["job_id"])
    made.lathe("reconcile", "-sb", str(made.base))
    assert len(made.starts()) == 1


def test_our_cancel_lets_the_training_save(here: Callable[..., Place], cluster: RealSlurm) -> None:
    made = here(1)
    made.says("sleep")
    submit(made)
    (row,) = made.until(lambda rows: bool(made.starts()))
    assert made.lathe("cancel", row["exp_id"], "-sb", str(made.base)).code == 0
    (row,) = made.until_all("cancelled")
    outcome = json.loads((Path(row["folder"]) / "attempts/1/exit.json").read_text())
    assert (outcome["code"], outcome["kind"]) == (75, "preempted")
    cluster.wait_gone(row["job_id"])


@pytest.mark.long
def test_a_job_that_a_killed_controller_takes_for_waiting_is_cancelled_once_it_has_ended(
    here: Callable[..., Place], cluster: RealSlurm
) -> None:
    made = here(1, nodelist="n2")
    made.says("sleep")
    cluster.command("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=not yet")
    submit(made)
    (row,) = made.status()
    cluster.wait_saved(made_token(row), is_waiting=True)
    waiting = (cluster.folder / "state" / "job_state").read_bytes()
    cluster.command("scontrol", "update", "NodeName=n2", "State=RESUME")
    wait_until(made.starts, bool)
    cluster.kill_controller()
    (cluster.folder / "state" / "job_state").write_bytes(waiting)
    cluster.start_controller()
    assert made.lathe("cancel", row["exp_id"], "-sb", str(made.base)).code == 0
    (row,) = made.until_all("cancelled", within_s=180)
    outcome = json.loads((Path(row["folder"]) / "attempts/1/exit.json").read_text())
    assert outcome["code"] == 75
    cluster.wait_gone(row["job_id"])
    assert len(made.starts()) == 1


def test_a_drained_node_and_a_held_job_are_explained(
    here: Callable[..., Place], cluster: RealSlurm
) -> None:
    made = here(1, nodelist="n2")
    cluster.command("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=broken-fan")
    try:
        submit(made)
        (row,) = made.until_all("held")
        assert "broken-fan" in row["reason"]
        assert "State=RESUME" in row["reason"]
    finally:
        cluster.command("scontrol", "update", "NodeName=n2", "State=RESUME")
    made.until_all("succeeded")


@pytest.mark.long
def test_a_job_that_slurm_has_forgotten_is_lost_unless_it_left_an_outcome(
    place: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_slurm()
    monkeypatch.setattr("jobs.record.verdict.LISTING_S", 0.0)
    made = place(2)
    (tmp_path / "jobs.py").write_text(
        "JOB_CONFIGS = {'default': {'resources': {'cpu': 1, 'mem': 1}}}"
    )
    with real_slurm(min_job_age_s=2) as cluster:
        submit(made)
        rows = made.until_all("succeeded")
        lost = rows[0]
        folder = Path(lost["folder"])
        for path in (
            *folder.glob("attempts/1/exit.json"),
            *folder.glob("attempts/1/heartbeat.json"),
            folder / "status.json",
        ):
            path.unlink()
        _forget_the_end(folder)
        wait_until(
            lambda: cluster.command("squeue", "-h", "-t", "all", "-o", "%i"),
            lambda text: not text.strip(),
        )
        states = {row["exp_id"]: row["state"] for row in made.status()}
    assert states == {lost["exp_id"]: "lost", rows[1]["exp_id"]: "succeeded"}


def _forget_the_end(folder: Path) -> None:
    """As if nobody had looked since the job was accepted, and its heart had stopped long ago."""
    record = folder / "job.jsonl"
    lines = [
        line
        for line in record.read_text().splitlines(keepends=True)
        if json.loads(line)["event"] != "observed"
    ]
    record.write_text("".join(lines))
    started = folder / "attempts/1/started-1.json"
    started.write_text(
        json.dumps({**json.loads(started.read_text()), "at": "2020-01-01T00:00:00+00:00"})
    )


def test_a_dry_run_asks_slurm_itself(here: Callable[..., Place]) -> None:
    made = here(1, partition="nowhere")
    plan = [
        "plan",
        "-e",
        "sweep",
        "-sb",
        str(made.base),
        "--exp_configs",
        str(made.groups),
        "-j",
        "slurm",
    ]
    said = made.lathe(*plan, "--job_configs", str(made.base.parent / "jobs.py"))
    assert said.code == 2
    assert "invalid partition" in said.out.lower()
    assert [path.name for path in made.base.iterdir()] == ["_jobs"]  # the code


@pytest.mark.long
def test_a_controller_that_is_away_loses_nothing(
    here: Callable[..., Place], cluster: RealSlurm
) -> None:
    made = here(2)
    made.says("sleep")
    submit(made)
    made.until(lambda rows: len(made.starts()) == 2)
    cluster.wait_saved(*(made_token(row) for row in made.status()))
    cluster.kill_controller()
    try:
        rows = made.status()
        assert [row["state"] for row in rows] == ["running", "running"]
        assert all(row["unseen_since"] for row in rows)
        assert submit(made).code in (0, 4)
    finally:
        cluster.start_controller()
    made.until(lambda rows: not any(row["unseen_since"] for row in rows))
    assert made.lathe("cancel", "-e", "sweep", "-sb", str(made.base), "--yes").code == 0
    made.until_all("cancelled")
    cluster.wait_gone()
    assert len(made.starts()) == 2
