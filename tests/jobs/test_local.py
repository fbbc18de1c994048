"""Groups of experiments through the command and the local queue, with a stand-in for the
training.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from jobs.backends.local.queue import Queue
from tests.jobs.conftest import Make, Place, wait_until
from trainer.runtime.process import birth

ROOT = Path(__file__).resolve().parents[2]


def runner_pid(queue: Path) -> int:
    """The process that holds the queue's lock."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"jobs.backends.local.runner" in words and str(queue).encode() in words:
            return int(entry.parent.name)
    raise AssertionError("no runner lives")


def test_a_group_goes_out_and_every_experiment_runs_once(place: Make) -> None:
    here = place(6)
    first = here.submit("--json").json
    assert [result["action"] for result in first] == ["send"] * 6
    rows = here.until_all("succeeded")
    assert Counter(here.starts()) == Counter(row["exp_id"] for row in rows)
    assert sorted(row["metrics"]["loss"] for row in rows) == [0, 1, 2, 3, 4, 5]
    again = here.submit("--json").json
    assert {(result["action"], result["text"]) for result in again} == {("skip", "it is done")}
    assert len(here.starts()) == 6


def test_the_run_folder_holds_what_the_layout_says(place: Make) -> None:
    here = place(1)
    here.submit()
    (row,) = here.until_all("succeeded")
    folder = Path(row["folder"])
    attempt = folder / "attempts" / "1"
    assert {path.name for path in attempt.iterdir()} == {
        *(
            "spec.json",
            "rendered.local.json",
            "env.json",
            "started-1.json",
            "heartbeat.json",
            "exit.json",
        ),
        *("logs.txt", "err.txt"),
    }
    assert (attempt / "logs.txt").read_text().startswith("training with ['trainval.py', '--exp_id=")
    assert (attempt / "err.txt").read_text() == "a warning\n"
    assert json.loads((attempt / "exit.json").read_text())["code"] == 0
    assert set(json.loads((folder / "job_dict.json").read_text())) == {"job_id", "command"}
    assert (folder / "code" / "trainval.py").is_file()
    events = [json.loads(line)["event"] for line in (folder / "job.jsonl").read_text().splitlines()]
    assert events[:3] == ["created", "intent", "submitted"]


def test_bad_input_is_never_retried_until_somebody_says_so_by_id(place: Make) -> None:
    here = place(1)
    here.says("2")
    here.submit()
    (row,) = here.until_all("failed")
    assert row["reason"].startswith("bad input")
    assert "Mend it" in here.submit("--retry", "failed").out
    here.lathe("reconcile", "-sb", str(here.base))
    assert len(here.starts()) == 1
    here.says("ok")
    assert here.lathe("retry", row["exp_id"][:10], "-sb", str(here.base)).code == 0
    (row,) = here.until_all("succeeded")
    assert (row["attempts"], len(here.starts())) == (2, 2)


def test_a_failure_is_retried_only_when_asked_for(place: Make) -> None:
    here = place(1)
    here.says("1")
    here.submit()
    (row,) = here.until_all("failed")
    assert row["reason"] == "exit code 1"
    assert "--retry failed runs it again" in here.submit().out
    here.says("ok")
    here.submit("--retry", "failed")
    here.until_all("succeeded")


def test_a_preempted_job_is_sent_again_by_reconcile(place: Make) -> None:
    here = place(1)
    here.says("75")
    here.submit()
    here.until_all("preempted")
    here.says("ok")
    (result,) = here.lathe("reconcile", "-sb", str(here.base), "--json").json
    assert result["action"] == "send"
    (row,) = here.until_all("succeeded")
    assert (row["attempts"], row["preemptions"]) == (2, 1)


def test_a_cancelled_job_may_save_and_a_waiting_one_never_starts(place: Make) -> None:
    here = place(6)
    here.says("sleep")
    here.submit()
    here.until(lambda rows: len(here.starts()) == 4)  # four cores
    assert Counter(row["state"] for row in here.status()) == {"running": 4, "queued": 2}
    assert (
        here.lathe("cancel", "-e", "sweep", "-sb", str(here.base)).code == 2
    )  # six at once need --yes
    assert here.lathe("cancel", "-e", "sweep", "-sb", str(here.base), "--yes").code == 0
    rows = here.until_all("cancelled")
    assert len(here.starts()) == 4
    codes = [
        json.loads(path.read_text())["code"] for path in here.base.glob("*/attempts/1/exit.json")
    ]
    assert codes == [75] * 4
    assert {row["reason"] for row in rows} >= {"cancelled before it started"}
    assert "nothing runs" in here.lathe("cancel", rows[0]["exp_id"], "-sb", str(here.base)).out


def test_a_killed_runner_loses_nothing_and_starts_nothing_twice(place: Make, queue: Path) -> None:
    here = place(6)
    here.says("sleep")
    here.submit()
    here.until(lambda rows: len(here.starts()) == 4)
    os.kill(runner_pid(queue), signal.SIGKILL)
    here.says("ok")
    for row in here.status()[:1]:  # looking wakes a new runner, for jobs wait
        assert row["state"] in ("running", "queued")
    here.until(lambda rows: Queue(queue).has_runner())
    here.lathe("cancel", "-e", "sweep", "-sb", str(here.base), "--yes")
    here.until_all("cancelled", "succeeded")
    assert max(Counter(here.starts()).values()) == 1


def test_a_killed_wrapper_takes_its_training_along_and_is_reported(
    place: Make, queue: Path
) -> None:
    here = place(1)
    here.says("sleep")
    here.submit()
    here.until(lambda rows: bool(here.starts()))
    started = json.loads(next(queue.glob("jobs/*/started.json")).read_text())
    children = Path(f"/proc/{started['pid']}/task/{started['pid']}/children").read_text().split()
    births = {int(pid): birth(int(pid)) for pid in children}
    os.kill(started["pid"], signal.SIGKILL)
    (row,) = here.until_all("failed")
    assert (
        "ended with -9" in row["reason"] or "killed" in row["reason"]
    )  # said by its runner, or seen before that
    deadline = time.monotonic() + 120
    while any(birth(pid) == born for pid, born in births.items()):
        assert time.monotonic() < deadline, "the training outlived its wrapper"
        time.sleep(0.05)


def test_a_training_that_ignores_sigterm_is_killed_after_its_grace(
    place: Make, tmp_path: Path
) -> None:
    here = place(1)
    here.says("stubborn")
    configs = tmp_path / "jobs.py"
    configs.write_text('JOB_CONFIGS = {"default": {"grace_s": 1}}')
    here.submit("--job_configs", str(configs))
    here.until(lambda rows: bool(here.starts()))
    here.lathe("cancel", "-e", "sweep", "-sb", str(here.base), "--yes")
    (row,) = here.until_all("cancelled")
    ended = json.loads(wait_until((Path(row["folder"]) / "attempts/1/exit.json").read_text, bool))
    assert (ended["code"], ended["kind"]) == (75, "preempted")  # its wrapper lived on, and told


def test_a_job_that_runs_too_long_ends_as_timeout(place: Make, tmp_path: Path) -> None:
    here = place(1)
    here.says("sleep")
    configs = tmp_path / "jobs.py"
    configs.write_text('JOB_CONFIGS = {"sweep": {"max_run_time": 1}}')
    here.submit("--job_configs", str(configs))
    (row,) = here.until_all("timeout")
    assert "retry" in row["reason"]


def test_max_parallel_bounds_the_group(place: Make) -> None:
    here = place(4)
    here.says("sleep")
    here.submit("--max-parallel", "2")
    here.until(lambda rows: Counter(row["state"] for row in rows) == {"running": 2, "queued": 2})
    here.lathe("cancel", "-e", "sweep", "-sb", str(here.base), "--yes")
    here.until_all("cancelled")
    assert len(here.starts()) <= 2  # the others never began


def test_a_job_runs_after_the_one_it_needs(place: Make) -> None:
    here = place(2)
    here.says("sleep")
    ids = [result["exp_id"] for result in here.lathe(*_plan(here), "--json").json]
    here.submit("--only", ids[0])
    (first,) = here.until_all("running")
    here.submit("--only", ids[1], "--after", first["job_id"])
    time.sleep(0.5)
    assert {row["exp_id"]: row["state"] for row in here.status()} == {
        ids[0]: "running",
        ids[1]: "queued",
    }
    here.lathe("cancel", ids[0], "-sb", str(here.base))
    rows = here.until_all("cancelled")
    assert "did not succeed" in next(row["reason"] for row in rows if row["exp_id"] == ids[1])


def _plan(here: Place) -> list[str]:
    return ["plan", "-e", "sweep", "-sb", str(here.base), "--exp_configs", str(here.groups)]


def test_a_plan_writes_nothing(place: Make) -> None:
    here = place(3, is_base_there=False)
    results = here.lathe(*_plan(here), "--json").json
    assert [(result["action"], result["state"]) for result in results] == [("send", "pending")] * 3
    assert not here.base.exists()


def test_a_job_that_no_device_here_can_hold_is_refused(place: Make, tmp_path: Path) -> None:
    here = place(1)
    configs = tmp_path / "jobs.py"
    configs.write_text('JOB_CONFIGS = {"sweep": {"resources": {"gpu": 4}}}')
    said = here.submit("--job_configs", str(configs))
    assert said.code == 3
    assert "it needs 4 GPUs, this machine has 0" in said.out
    (row,) = here.status()
    assert row["state"] == "pending"
    configs.write_text("JOB_CONFIGS = {}")
    assert here.submit("--job_configs", str(configs)).code == 0
    here.until_all("succeeded")


def test_a_reset_folder_starts_over_and_nothing_is_lost(place: Make) -> None:
    here = place(1)
    here.submit()
    (row,) = here.until_all("succeeded")
    assert here.lathe("reset", row["exp_id"], "-sb", str(here.base)).code == 2  # without --yes
    assert here.lathe("reset", row["exp_id"], "-sb", str(here.base), "--yes").code == 0
    (kept,) = (here.base / "deleted").iterdir()
    assert (kept / "metrics.jsonl").exists()
    here.submit()
    here.until_all("succeeded")
    assert len(here.starts()) == 2


def test_a_live_experiment_cannot_be_reset(place: Make) -> None:
    here = place(1)
    here.says("sleep")
    here.submit()
    (row,) = here.until_all("running")
    said = here.lathe("reset", row["exp_id"], "-sb", str(here.base), "--yes")
    assert (said.code, "`cancel` it first" in said.out) == (2, True)
    here.lathe("cancel", row["exp_id"], "-sb", str(here.base))
    here.until_all("cancelled")


def test_a_folder_of_another_dictionary_is_refused(place: Make) -> None:
    here = place(2)
    here.submit()
    rows = here.until_all("succeeded")
    path = Path(rows[0]["folder"]) / "exp_dict.json"
    values = json.loads(path.read_text())
    values["optim"]["lr"] = 1.0
    path.write_text(json.dumps(values))
    said = here.submit()
    assert said.code == 3
    assert "optim differ(s)" in said.out


def test_what_left_the_group_is_cancelled_by_prune(place: Make) -> None:
    here = place(3)
    here.says("sleep")
    here.submit()
    before = {row["exp_id"] for row in here.until_all("running")}
    here.groups.write_text(here.groups.read_text().replace("range(3)", "range(2)"))
    here.submit("--prune", "--yes")
    kept = {result["exp_id"] for result in here.lathe(*_plan(here), "--json").json}
    rows = here.until(
        lambda rows: Counter(row["state"] for row in rows) == {"running": 2, "cancelled": 1}
    )
    assert {row["exp_id"] for row in rows if row["state"] == "cancelled"} == before - kept
    here.lathe("cancel", "-e", "sweep", "-sb", str(here.base), "--yes")
    here.until_all("cancelled")


def test_inline_runs_here_to_the_end(place: Make) -> None:
    here = place(2)
    assert here.submit(backend="inline").code == 0
    assert [row["state"] for row in here.status()] == ["succeeded", "succeeded"]


def test_a_queue_on_another_machine_is_unseen_and_never_lost(
    place: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = place(1)
    here.says("sleep")
    here.submit()
    here.until_all("running")
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "elsewhere")
        (row,) = here.status()
        assert row["state"] == "running"
        assert "can only be seen there" in row["unseen_reason"]
    here.lathe("cancel", "-e", "sweep", "-sb", str(here.base), "--yes")
    here.until_all("cancelled")


def long_ago(folder: Path, *kinds: str) -> None:
    """Leave only such events in the record, and make them old. Without `submitted`, its submitter
    had died.
    """
    events = [json.loads(line) for line in (folder / "job.jsonl").read_text().splitlines()]
    kept = [
        {**event, "at": "2020-01-01T00:00:00+00:00"} for event in events if event["event"] in kinds
    ]
    (folder / "job.jsonl").write_text("".join(json.dumps(event) + "\n" for event in kept))


def test_what_was_sent_to_another_queue_is_adopted_there(
    place: Make, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = place(1)
    with monkeypatch.context() as patch:
        patch.setattr(Queue, "wake", lambda self: None)  # it waits
        here.submit()
        (row,) = here.status()
        long_ago(Path(row["folder"]), "created", "intent")
        patch.setenv("LATHE_QUEUE", str(queue) + "2")
        assert row["job_id"] in here.submit("--resend_after", "0.1", "--json").json[0]["text"]
        assert not list(Path(str(queue) + "2").glob("jobs/*"))
    here.until_all("succeeded")
    assert len(here.starts()) == 1


def test_what_may_be_in_a_queue_of_another_host_is_not_sent_again(
    place: Make, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = place(1)
    identity = queue / "identity.json"
    queue.mkdir()
    identity.write_text(json.dumps({"id": "0123abcd", "host": socket.gethostname()}))
    monkeypatch.setattr(Queue, "wake", lambda self: None)
    here.submit()
    (row,) = here.status()
    long_ago(Path(row["folder"]), "created", "intent")
    identity.write_text(json.dumps({"id": "0123abcd", "host": "elsewhere"}))
    rendered = Path(row["folder"], "attempts", "1", "rendered.local.json")
    rendered.write_text(rendered.read_text().replace(f'"{socket.gethostname()}:', '"elsewhere:'))
    monkeypatch.setenv("LATHE_QUEUE", str(queue) + "2")
    assert here.submit("--resend_after", "0.1").code == 4
    assert "look there first" in Path(row["folder"], "job.jsonl").read_text()
    assert not list(Path(str(queue) + "2").glob("jobs/*"))


def test_what_never_reached_its_queue_may_go_to_another(
    place: Make, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = place(1)
    with monkeypatch.context() as patch:
        patch.setattr(Queue, "wake", lambda self: None)
        here.submit()
    (row,) = here.status()
    long_ago(Path(row["folder"]), "created", "intent")
    for path in queue.glob("jobs/*"):
        shutil.rmtree(path)
    monkeypatch.setenv("LATHE_QUEUE", str(queue) + "2")
    assert here.submit("--resend_after", "0.1").code == 0
    here.until_all("succeeded")
    assert len(here.starts()) == 1


def test_a_job_seen_with_another_queue_is_unseen_and_never_lost(
    place: Make, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = place(1)
    with monkeypatch.context() as patch:
        patch.setattr(Queue, "wake", lambda self: None)  # it waits
        here.submit()
        (row,) = here.status()
        long_ago(Path(row["folder"]), "created", "intent", "submitted")
        patch.setenv("LATHE_QUEUE", str(queue) + "2")
        (row,) = here.status()
        assert row["state"] in ("submitted", "queued")
        assert "can only be seen there" in row["unseen_reason"]
        said = here.lathe("cancel", row["exp_id"], "-sb", str(here.base), "--json")
        assert (said.code != 0, "can only be seen there" in said.json[0]["text"]) == (True, True)


def test_whoever_looks_starts_a_runner_for_a_job_that_lost_its_own_and_is_to_end(
    place: Make, queue: Path
) -> None:
    here = place(1)
    here.says("sleep")
    here.submit()
    here.until_all("running")
    wait_until(here.starts, bool)  # before that a signal ends the wrapper, which leaves no word
    os.kill(runner_pid(queue), signal.SIGKILL)
    wait_until(Queue(queue).has_runner, lambda has_one: not has_one)
    (job,) = queue.glob("jobs/*")
    (job / "cancel").touch()  # as a `cancel` that still saw the dying runner leaves it
    (row,) = here.until_all("preempted", "cancelled", "failed", "succeeded")
    assert row["state"] in ("preempted", "cancelled")
    assert (
        json.loads((job / "ended.json").read_text())["reason"] == "its runner was killed before it"
    )


def test_a_job_in_another_container_is_unseen_and_never_failed(place: Make, queue: Path) -> None:
    here = place(1)
    here.says("sleep")
    here.submit()
    here.until_all("running")
    os.kill(runner_pid(queue), signal.SIGKILL)
    (path,) = queue.glob("jobs/*/started.json")
    facts = path.read_text()
    path.write_text(json.dumps({**json.loads(facts), "namespace": "pid:[1]", "pid": 999_999_999}))
    (row,) = here.status()
    assert (row["state"], "another container" in row["unseen_reason"]) == ("running", True)
    path.write_text(facts)
    here.lathe("cancel", "-e", "sweep", "-sb", str(here.base), "--yes")
    here.until_all("cancelled")


@pytest.mark.parametrize("before", ["nonsense", "HOST:0123abcd:ft_b_b_1", "HOST:QUEUE:ft_b_b_1"])
def test_waiting_for_what_is_not_in_this_queue_is_refused(
    place: Make, queue: Path, before: str
) -> None:
    here = place(1)
    before = before.replace("HOST", socket.gethostname()).replace(
        "QUEUE", Queue(queue).identity["id"]
    )
    said = here.submit("--after", before)
    assert (said.code, "no job of this queue" in " ".join(said.out.split())) == (3, True)
    assert [row["state"] for row in here.status()] == ["pending"]


def test_no_secret_of_the_shell_reaches_the_runner_or_a_job(
    place: Make, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("LATHE_NODE_RANK", "3")  # of a job that submits another
    here = place(1)
    here.says("sleep")
    here.submit()
    here.until_all("running")
    (path,) = queue.glob("jobs/*/started.json")
    for pid in (runner_pid(queue), json.loads(path.read_text())["pid"]):
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"LATHE_QUEUE_CPUS=4" in environment
        assert b"CUDA_VISIBLE_DEVICES=" in environment
        assert b"kkkk" not in environment
        assert b"LATHE_NODE_RANK" not in environment
    here.lathe("cancel", "-e", "sweep", "-sb", str(here.base), "--yes")
    here.until_all("cancelled")


def test_a_number_of_cores_that_is_none_is_bad_input(
    place: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = place(1)
    monkeypatch.setenv("LATHE_QUEUE_CPUS", "abc")
    said = here.submit()
    assert (said.code, "ConfigError: LATHE_QUEUE_CPUS=abc" in said.out, here.status()) == (
        2,
        True,
        [],
    )


@pytest.mark.long
def test_hundreds_of_experiments_are_submitted_and_shown_without_torch(place: Make) -> None:
    here = place(300)
    here.says("sleep")
    code = f"""
import sys
from jobs.cli import app
sys.argv = ["lathe-jobs", *{["submit", "-e", "sweep", "-sb", str(here.base), "-j", "local"]!r}]
sys.argv += ["--exp_configs", {str(here.groups)!r}, "--python_binary", {str(here.python)!r}, "--allow-dirty", "--json"]
try:
    app()
except SystemExit as end:
    assert not end.code, end.code
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert len(json.loads(done.stdout)) == 300
    assert len(here.status()) == 300
    here.lathe("cancel", "-e", "sweep", "-sb", str(here.base), "--yes")
    here.until_all("cancelled", within_s=180)
