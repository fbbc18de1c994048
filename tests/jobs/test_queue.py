"""The queue's folder and its runner, turn by turn, with processes of a few milliseconds."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jobs.backends.local import queue as queue_module
from jobs.backends.local import runner as runner_module
from jobs.backends.local.backend import Local
from jobs.backends.local.queue import Queue, QueuedJob, default_folder, runner_lock
from jobs.backends.local.runner import CANCELLED, Capacity, Runner, main, serve
from tests.jobs.conftest import wait_until
from tests.wording import refused
from trainer.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_PREEMPTED, StorageError
from trainer.runtime.process import birth, life, namespace

Spawned = list[subprocess.Popen[bytes]]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """A queue of two cores and no GPU."""
    monkeypatch.setenv("LATHE_QUEUE_CPUS", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("LATHE_QUEUE", str(tmp_path / "queue"))
    return Queue(tmp_path / "queue")


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spawned]:
    """The runners that were started: stand-ins that live, and never come to hold the lock."""
    runners: Spawned = []

    def spawn(self: Queue) -> subprocess.Popen[bytes]:
        runners.append(subprocess.Popen(["sleep", "60"]))
        return runners[-1]

    monkeypatch.setattr(Queue, "_spawn", spawn)
    yield runners
    for runner in runners:
        runner.kill()
        runner.wait()


@pytest.fixture
def idle(own: Queue, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """A queue that no runner serves."""
    monkeypatch.setattr(Queue, "_spawn", lambda self: Nobody())
    return own


class Nobody:
    """A runner that never begins."""

    def poll(self) -> int | None:
        return None


def add(queue: Queue, token: str, argv: Sequence[str] = ("true",), **changes: Any) -> str:
    """Put a job into the queue; returns its id."""
    facts = {
        "id": queue.id_of(token),
        "wrapper": list(argv),
        "workdir": "/",
        "gpus": 0,
        "cpus": 1,
        "grace_s": 1,
        "group": "group",
        "max_parallel": None,
        "after": [],
        "at": time.time(),
    }
    queue.add(token, json.dumps({**facts, **changes}))
    return queue.id_of(token)


def end(queue: Queue, token: str, code: int) -> None:
    """Put a job into the queue that has ended."""
    add(queue, token)
    queue.entry(token).end(code, None)


def started(queue: Queue, token: str, **changes: Any) -> None:
    """Put a job into the queue that says it was started as this very process."""
    add(queue, token)
    facts = {"pid": os.getpid(), "birth": birth(os.getpid()), "gpus": []}
    place = {"host": socket.gethostname(), "namespace": namespace()}
    (queue.entry(token).folder / "started.json").write_text(
        json.dumps({**facts, **place, **changes})
    )


def turned(queue: Queue, *, until: Callable[[Runner], bool] = lambda runner: True) -> Runner:
    """A runner after as many turns as it takes."""
    runner = Runner(queue, Capacity.here())

    def turn() -> Runner:
        runner.looked_at = -float("inf")
        runner.turn()
        return runner

    return wait_until(turn, until, within_s=45)


def code_of(queue: Queue, token: str) -> int | None:
    """The code with which a job ended; None when it has not."""
    return (queue.entry(token).read_end() or {}).get("code")


# Whose queue it is
# -------------------------------------------------------------------------------------------------


def test_a_queue_has_one_id_whoever_asks_first(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: Queue(tmp_path / "queue").identity["id"], range(32)))
    assert len(set(found)) == 1
    assert found[0] != Queue(tmp_path / "other").identity["id"]
    assert [path.name for path in (tmp_path / "queue").iterdir()] == ["identity.json"]


def test_a_job_that_another_process_adds_at_this_moment_enters_once(
    own: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def overtaken(descriptor: int) -> None:
        fsync(descriptor)
        folder = own.entry("ft_a_b_1").folder
        folder.mkdir()
        (folder / "entry.json").write_text("the first")
        (folder / "started.json").write_text("its runner was fast")

    monkeypatch.setattr(os, "fsync", overtaken)
    own.add("ft_a_b_1", "the second")
    assert (own.entry("ft_a_b_1").folder / "entry.json").read_text() == "the first"
    assert (own.entry("ft_a_b_1").folder / "started.json").exists()
    assert [path.name for path in own.folder.iterdir()] == ["jobs"]


def test_that_a_job_starts_is_on_the_disk_before_it_runs(
    own: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, fsync = tmp_path / "fsynced", os.fsync

    def recorded(descriptor: int) -> None:
        """Add what was fsynced to a file, for this happens in the child that becomes the
        wrapper.
        """
        fsync(descriptor)
        with log.open("a") as file:
            file.write(os.readlink(f"/proc/self/fd/{descriptor}") + "\n")

    seen = tmp_path / "seen"
    add(own, "ft_a_b_1", ["cp", str(log), str(seen)])
    monkeypatch.setattr(os, "fsync", recorded)
    turned(own, until=lambda runner: own.entry("ft_a_b_1").read_end() is not None)
    assert "/jobs/ft_a_b_1/.started.json." in seen.read_text()


def test_hosts_that_share_a_home_have_a_queue_each(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: set[Path] = set()
    for host in ("node1", "node2"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        folders.add(default_folder({"XDG_STATE_HOME": "/state"}))
    assert folders == {Path("/state/lathe/queue/node1"), Path("/state/lathe/queue/node2")}


def test_no_runner_serves_the_queue_of_another_host(
    own: Queue, spawned: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(own, "ft_a_a_1")
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    monkeypatch.setattr("sys.argv", ["runner", str(own.folder)])
    assert main() == EXIT_BAD_INPUT
    own.wake()
    assert (spawned, own.entry("ft_a_a_1").read_start()) == ([], None)


@pytest.mark.parametrize(
    "change", [{"host": "elsewhere"}, {"namespace": "pid:[1]"}, {"host": None}]
)
def test_a_job_out_of_sight_is_neither_ended_nor_started_again(
    own: Queue, change: dict[str, Any]
) -> None:
    started(own, "ft_a_a_1", pid=999_999_999, **change)
    before = own.entry("ft_a_a_1").read_start()
    runner = turned(own)
    assert (runner.is_idle(), code_of(own, "ft_a_a_1")) == (True, None)
    assert own.entry("ft_a_a_1").read_start() == before


def test_another_process_of_the_same_number_is_not_taken_for_the_job(own: Queue) -> None:
    boot = str(birth(os.getpid())).partition(":")[0]
    started(own, "ft_a_a_1", birth=f"{boot}:1")
    facts = own.entry("ft_a_a_1").read_start()
    assert facts is not None
    assert life(facts) == "gone"
    started(own, "ft_b_b_1")
    facts = own.entry("ft_b_b_1").read_start()
    assert facts is not None
    assert life(facts) == "alive"


def test_what_ran_before_the_machine_was_restarted_is_to_be_run_again(own: Queue) -> None:
    started(own, "ft_a_a_1", birth="of-another-boot:17")
    turned(own)
    assert own.entry("ft_a_a_1").read_end() == {
        "code": EXIT_PREEMPTED,
        "reason": "the machine, or its container, was restarted",
    }


def test_what_a_container_started_that_has_ended_is_to_be_run_again(own: Queue) -> None:
    started(own, "ft_a_a_1", pid=999_999_999, namespace="pid:[1]")
    entry = own.entry("ft_a_a_1")
    with entry.hold():  # by a process of the other container
        turned(own)
        assert code_of(own, "ft_a_a_1") is None
    turned(own)
    assert code_of(own, "ft_a_a_1") == EXIT_PREEMPTED


def test_a_job_holds_its_lock_until_it_ends(own: Queue, tmp_path: Path) -> None:
    goes_on = tmp_path / "goes_on"
    add(own, "ft_a_a_1", ("sh", "-c", f"while [ ! -e {goes_on} ]; do sleep 0.02; done"))
    runner = Runner(own, Capacity.here())
    runner.turn()
    entry = own.entry("ft_a_a_1")
    facts = {**wait_until(lambda: entry.read_start() or {}, bool), "namespace": "pid:[1]"}
    assert entry.life(facts) == "unseen"
    goes_on.touch()
    wait_until(lambda: entry.life(facts), lambda life: life == "restarted")


def test_a_job_that_another_runner_starts_at_this_moment_is_not_ended(
    own: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(own, "ft_a_a_1")
    runner = Runner(own, Capacity.here())
    runner.welcome()
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        started(own, "ft_a_a_1", pid=sleeper.pid, birth=birth(sleeper.pid))
        runner.turn()
        assert (code_of(own, "ft_a_a_1"), runner.live["ft_a_a_1"].pid) == (None, sleeper.pid)
    finally:
        sleeper.kill()
        sleeper.wait()
    runner.turn()
    assert code_of(own, "ft_a_a_1") == -1


def test_a_wrapper_that_does_not_exist_ends_its_job(own: Queue) -> None:
    add(own, "ft_a_a_1", ["/no/such/program"])
    turned(own)
    assert "cannot start /no/such/program" in (own.entry("ft_a_a_1").read_end() or {})["reason"]


# What waits
# --------------------------------------------------------------------------------------------------


def test_a_job_too_big_for_the_runner_ends_with_the_reason_and_stops_nobody(own: Queue) -> None:
    add(own, "ft_big_a_1", cpus=32, at=1)
    add(own, "ft_small_a_1", at=2)
    turned(own, until=lambda runner: runner.is_idle())
    reason = (own.entry("ft_big_a_1").read_end() or {})["reason"]
    assert "it needs 32 cores, this machine has 2" in reason
    assert code_of(own, "ft_small_a_1") == EXIT_OK


def test_a_job_that_waits_for_another_lets_those_behind_it_pass(own: Queue) -> None:
    add(own, "ft_first_a_1", ["sleep", "60"], at=1)
    add(own, "ft_second_a_1", cpus=2, after=[own.id_of("ft_first_a_1")], at=2)
    add(own, "ft_third_a_1", at=3)
    runner = turned(own, until=lambda runner: code_of(own, "ft_third_a_1") == EXIT_OK)
    assert set(runner.waiting) == {"ft_second_a_1"}
    own.cancel("ft_first_a_1")
    wait_until(lambda: runner.turn(), lambda _: "ft_first_a_1" not in runner.live)


def test_a_job_that_waits_for_devices_is_not_overtaken_by_smaller_ones(own: Queue) -> None:
    add(own, "ft_first_a_1", ["sleep", "60"], at=1)
    add(own, "ft_large_a_1", cpus=2, at=2)
    add(own, "ft_small_a_1", at=3)
    runner = turned(own, until=lambda runner: "ft_first_a_1" in runner.live)
    runner.turn()
    assert set(runner.waiting) == {"ft_large_a_1", "ft_small_a_1"}
    own.cancel("ft_first_a_1")
    wait_until(lambda: runner.turn(), lambda _: runner.is_idle())
    assert code_of(own, "ft_large_a_1") == code_of(own, "ft_small_a_1") == EXIT_OK


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({1: EXIT_OK}, "runs"),
        ({1: 1}, "ends"),
        ({1: 1, 2: EXIT_OK}, "runs"),
        ({1: EXIT_OK, 2: 1}, "runs"),
        ({1: 1, 2: None}, "waits"),
        ({1: 1, 2: 1}, "ends"),
        ({1: EXIT_PREEMPTED}, "waits"),
        ({1: EXIT_PREEMPTED, 2: 1}, "ends"),
        ({1: 1, 2: EXIT_PREEMPTED, 10: EXIT_OK}, "runs"),
    ],
)
def test_any_attempt_of_the_one_before_counts(
    own: Queue, ends: dict[int, int | None], expected: str
) -> None:
    for number, code in ends.items():
        if code is None:
            started(own, f"ft_before_a_{number}")
        else:
            end(own, f"ft_before_a_{number}", code)
    end(own, "ft_before_b_9", EXIT_OK)  # another experiment's, whose id begins alike
    add(own, "ft_after_a_1", after=[own.id_of("ft_before_a_1")])
    if expected == "waits":
        assert set(turned(own).waiting) == {"ft_after_a_1"}
    else:
        turned(own, until=lambda runner: code_of(own, "ft_after_a_1") is not None)
        assert code_of(own, "ft_after_a_1") == (EXIT_OK if expected == "runs" else CANCELLED)


def test_nothing_runs_after_a_job_that_was_cancelled_and_could_save(own: Queue) -> None:
    end(own, "ft_before_a_1", EXIT_PREEMPTED)
    own.cancel("ft_before_a_1")
    add(own, "ft_after_a_1", after=[own.id_of("ft_before_a_1")])
    turned(own)
    assert "did not succeed" in (own.entry("ft_after_a_1").read_end() or {})["reason"]


# Waking
# --------------------------------------------------------------------------------------------------


def test_many_wakes_start_one_runner(own: Queue, spawned: Spawned) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: own.wake(), range(60)))
    assert len(spawned) == 1


def test_a_runner_that_was_killed_before_it_looked_is_replaced_at_once(
    own: Queue, spawned: Spawned
) -> None:
    own.wake()
    spawned[0].kill()
    spawned[0].wait()
    own.wake()
    assert len(spawned) == 2


def test_whoever_looks_for_a_runner_is_not_taken_for_one(own: Queue, spawned: Spawned) -> None:
    with runner_lock(own.folder, fcntl.LOCK_SH) as is_free:
        assert is_free
        own.wake()
    assert len(spawned) == 1


@pytest.mark.long
def test_no_job_is_forgotten_that_comes_as_the_runner_leaves(
    own: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "IDLE_S", 0.02)
    monkeypatch.setattr(runner_module, "POLL_S", 0.004)
    random_, errors = random.Random(7), [0]

    class Thread(threading.Thread):
        """A runner within this process."""

        def __init__(self) -> None:
            super().__init__(daemon=True)
            self.start()

        def run(self) -> None:
            try:
                serve(Queue(own.folder))
            except BaseException:
                errors[0] += 1
                raise

        def poll(self) -> int | None:
            return None if self.is_alive() else 0

    monkeypatch.setattr(Queue, "_spawn", lambda self: Thread())
    for number in range(50):
        token = f"ft_a_a_{number}"
        add(own, token)
        own.wake()
        deadline = time.monotonic() + 60
        while code_of(own, token) != EXIT_OK:
            assert code_of(own, token) in (None, EXIT_OK), f"{token}: {own.entry(token).read_end()}"
            assert time.monotonic() < deadline, f"{token}: {own.entry(token).read_start()}"
            time.sleep(0.002)
        time.sleep(random_.uniform(0, 0.04))  # it leaves about now
    assert errors == [0]


def test_a_runner_that_was_held_up_longer_than_it_stays_idle_keeps_its_job(
    own: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "IDLE_S", 0.05)
    monkeypatch.setattr(runner_module, "POLL_S", 0.2)  # as if suspended between two turns
    add(own, "ft_a_a_1", ["sleep", "0.5"])
    serve(own)
    assert code_of(own, "ft_a_a_1") == EXIT_OK, own.entry("ft_a_a_1").read_end()


def test_a_job_of_a_killed_runner_is_adopted(own: Queue) -> None:
    add(own, "ft_a_a_1", ["sleep", "60"])
    first = turned(own)
    pid = first.live["ft_a_a_1"].pid
    second = turned(own)
    assert (second.live["ft_a_a_1"].pid, second.live["ft_a_a_1"].child) == (pid, None)
    own.cancel("ft_a_a_1")
    wait_until(lambda: [first.turn(), second.turn()], lambda _: second.is_idle())
    assert code_of(own, "ft_a_a_1") in (-signal.SIGTERM, -1)


# Devices
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["abc", "0", "-1", "1.5", " 4"])
def test_a_number_of_cores_that_is_none_says_what_to_do(text: str) -> None:
    with refused("queue_cpus"):
        Capacity.here({"LATHE_QUEUE_CPUS": text, "CUDA_VISIBLE_DEVICES": ""})


def test_a_folder_that_cannot_be_made_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LATHE_QUEUE", str(tmp_path / "file" / "queue"))
    (finding,) = Local().check()
    assert (finding.name, finding.is_good, "LATHE_QUEUE" in finding.text) == ("queue", False, True)
    with refused("queue_folder"):
        Local().query(["a:b:c"])


def test_visible_devices_bound_the_queue() -> None:
    assert Capacity.here({"LATHE_QUEUE_CPUS": "3", "CUDA_VISIBLE_DEVICES": "0, 2,-1"}) == Capacity(
        3, ("0", "2")
    )


# What the backend says of it
# -----------------------------------------------------------------------------------------


def test_jobs_of_elsewhere_do_not_hide_those_of_here(idle: Queue) -> None:
    own = add(idle, "ft_a_a_1")
    other = "elsewhere:0123abcd:ft_b_b_1"
    found = Local().query([own, other, idle.id_of("ft_c_c_1")])
    assert {job_id: observed.state for job_id, observed in found.items()} == {
        own: "queued",
        other: "submitted",
    }
    assert "0123abcd of elsewhere" in (found[other].reason or "")


@pytest.mark.parametrize(
    "job_id", ["elsewhere:0123abcd:ft_b_b_1", "HOST:0123abcd:ft_b_b_1", "HOST:ft_b_b_1", "8"]
)
def test_a_job_of_elsewhere_alone_is_unreachable(idle: Queue, job_id: str) -> None:
    job_id = job_id.replace("HOST", socket.gethostname())
    add(idle, "ft_b_b_1")
    for ask in (
        lambda: Local().query([job_id]),
        lambda: Local().cancel(job_id),
        lambda: next(Local().logs(job_id, follow=True)),
    ):
        with refused("queue_seen_elsewhere"):
            ask()
    assert not idle.entry("ft_b_b_1").is_cancelled()


def test_a_queue_of_another_host_never_says_that_it_knows_nothing(
    idle: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = add(idle, "ft_a_a_1")
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert Local().find("ft_a_a_1") == [job_id]
    with refused("queue_of_other_host"):
        Local().find("ft_b_b_1")
    assert next((finding.name, finding.is_good) for finding in Local().check()) == ("queue", False)


def test_what_ran_before_a_restart_of_the_machine_is_preempted(idle: Queue) -> None:
    job_id = add(idle, "ft_a_a_1")
    facts = {
        "pid": 1,
        "birth": "another-boot:1",
        "gpus": [],
        "host": socket.gethostname(),
        "namespace": "pid:[1]",
    }
    (idle.entry("ft_a_a_1").folder / "started.json").write_text(json.dumps(facts))
    observed = Local().query([job_id])[job_id]
    assert (observed.state, observed.reason) == (
        "preempted",
        "the machine, or its container, was restarted",
    )


GARBAGE = ["", "{", "[]", "null", '{"x": 1}', '{"code": "0"}', "[" * 100_000, "a folder", "a loop"]


@pytest.mark.parametrize("text", GARBAGE, ids=[text[:12] or "empty" for text in GARBAGE])
def test_an_ended_json_that_is_none_of_the_queues_is_a_failure_with_its_file(
    idle: Queue, text: str
) -> None:
    job_id, other = add(idle, "ft_a_a_1"), add(idle, "ft_b_b_1")
    file = idle.entry("ft_a_a_1").folder / "ended.json"
    if text == "a folder":
        file.mkdir()
    elif text == "a loop":
        file.symlink_to(file)
    else:
        file.write_text(text)
    found = Local().query([job_id, other])
    assert (found[job_id].state, found[other].state) == ("failed", "queued")
    assert str(file) in (found[job_id].reason or "")
    assert (Local().find("ft_a_a_1"), idle.has_succeeded(["ft_a_a_1"])) == ([job_id], False)


def test_adoption_wakes_the_queue(own: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[Path] = []
    monkeypatch.setattr(Queue, "wake", lambda self: woken.append(self.folder))
    job_id = add(own, "ft_a_a_1")
    assert (Local().find("ft_a_a_1"), woken) == ([job_id], [own.folder])
    own.entry("ft_a_a_1").end(0, None)
    assert (Local().find("ft_a_a_1"), woken) == ([job_id], [own.folder])


@pytest.mark.parametrize(
    ("changes", "free", "reason"),
    [
        (
            {"cpus": 2},
            {"cpus": 1, "gpus": 0, "groups": {}},
            "waits for devices: needs 2 cores, 1 free",
        ),
        (
            {"gpus": 1},
            {"cpus": 4, "gpus": 0, "groups": {}},
            "waits for devices: needs 1 GPU, 0 free",
        ),
        (
            {"max_parallel": 2},
            {"cpus": 4, "gpus": 0, "groups": {"group": 2}},
            "waits for its group: 2 of at most 2 run",
        ),
        (
            {"after": ["HOST:ft_b_b_1"], "cpus": 2},
            {"cpus": 1, "gpus": 0, "groups": {}},
            "waits for HOST:ft_b_b_1",
        ),
        ({}, {"cpus": 4, "gpus": 0, "groups": {}}, "waits for its turn"),
        ({}, None, "waits for its turn"),
    ],
)
def test_the_reason_for_waiting_is_the_true_one(
    idle: Queue, changes: dict[str, Any], free: dict[str, Any] | None, reason: str
) -> None:
    add(idle, "ft_b_b_1")
    job_id = add(idle, "ft_a_a_1", **changes)
    if free is not None:
        (idle.folder / "free.json").write_text(json.dumps(free))
    assert Local().query([job_id])[job_id].reason == reason


# What may stand in the folder of the queue's jobs and was written by nobody of ours.
FOREIGN: dict[str, Callable[[Path], object]] = {
    "an empty folder": lambda path: path.mkdir(),
    "a file": lambda path: path.write_text("x"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "an entry that is a pipe": lambda path: (path.mkdir(), os.mkfifo(path / "entry.json")),
    "a start that is a pipe": lambda path: (path.mkdir(), os.mkfifo(path / "started.json")),
    "an entry of another shape": lambda path: (
        path.mkdir(),
        (path / "entry.json").write_text('{"cpus": NaN, "after": [5], "base": 7}'),
    ),
    "a start of another shape": lambda path: (
        path.mkdir(),
        (path / "started.json").write_text('{"pid": "x"}'),
    ),
}


def test_what_is_no_job_keeps_no_other_from_running_and_is_told(
    own: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    (own.folder / "jobs").mkdir(parents=True)
    for number, put in enumerate(FOREIGN.values()):
        put(own.folder / "jobs" / f"ft_a_b_{number + 1}")
    (own.folder / "jobs" / "\udcff\udcfe").mkdir()
    ids = [add(own, f"ft_c_d{number}_1") for number in range(3)]
    runner = Runner(own, Capacity.here())
    ended = wait_until(
        lambda: runner.turn() or [own.entry(f"ft_c_d{n}_1").read_end() for n in range(3)],
        all,
        within_s=20,
    )
    assert [end["code"] for end in ended if end] == [EXIT_OK] * 3
    assert runner.is_idle()
    for number in range(len(FOREIGN)):
        lines = [one for one in caplog.messages if one.startswith(f"ft_a_b_{number + 1}: ")]
        assert len(lines) == 1, lines
    # nor does it hide the others
    foreign = [own.id_of(f"ft_a_b_{number + 1}") for number in range(len(FOREIGN))]
    states = {name: seen.state for name, seen in Local().query([*ids, *foreign]).items()}
    assert [states.pop(job_id) for job_id in ids] == ["succeeded"] * 3
    assert set(states.values()) <= {"failed", "held"}


def test_an_end_that_a_full_disk_refuses_is_recorded_later(
    own: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(own, "ft_a_b_1")
    add(own, "ft_c_d_1")
    runner = Runner(own, Capacity.here())
    end, refused_ones = QueuedJob.end, list[str]()

    def end_or_fail(self: QueuedJob, code: int, reason: str | None) -> None:
        if self.token == "ft_a_b_1" and len(refused_ones) < 3:
            refused_ones.append(self.token)
            raise StorageError("no space") from OSError(errno.ENOSPC, "No space left on device")
        end(self, code, reason)

    monkeypatch.setattr(QueuedJob, "end", end_or_fail)
    tokens = ("ft_a_b_1", "ft_c_d_1")
    ended = wait_until(
        lambda: runner.turn() or [own.entry(token).read_end() for token in tokens], all, within_s=20
    )
    assert [end["code"] for end in ended if end] == [EXIT_OK] * 2
    assert len(refused_ones) == 3
