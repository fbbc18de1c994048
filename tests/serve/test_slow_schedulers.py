"""A command of a scheduler that hangs holds up nobody else, and what it may have done is not done
twice.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jobs import time_limits
from jobs.backends.slurm import backend as slurm
from jobs.serve import keeper as keeper_module
from jobs.serve.keeper import Send
from jobs.serve.turn.lanes import Action, Lane, Lanes
from tests.jobs.conftest import wait_until
from tests.serve.conftest import Stub
from tests.serve.fake_slurm import FakeSlurm
from tests.serve.poisoned import JOBS, World, new_world
from tests.wording import refused

LONG_S = 60.0  # for what takes a second on a machine without other work


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    cluster = FakeSlurm(tmp_path / "slurm")
    cluster.make(monkeypatch)
    return cluster


@pytest.fixture
def world(tmp_path: Path, stub: Stub, queue: Path, cluster: FakeSlurm) -> World:
    world = new_world(tmp_path, stub, every_s=0.1)
    world.keeper.send = Send("slurm", python_binary=str(stub.python), allow_dirty=True)
    return world


@contextmanager
def looked_after(world: World, cluster: FakeSlurm) -> Iterator[None]:
    """Inside, the keeper takes turns as in a server; afterwards nothing hangs any more."""
    thread = threading.Thread(target=world.keeper.run)
    thread.start()
    try:
        yield
    finally:
        cluster.says("release")
        world.keeper.stop()
        thread.join(LONG_S)
        world.keeper._lanes.join()  # pyright: ignore[reportPrivateUsage]


def state_of(world: World, job: dict[str, Any]) -> str:
    return world.jobs()[job["id"]]["lathe"]["state"]


def test_a_submission_that_hangs_holds_up_no_job_of_another_and_no_cancellation(
    world: World, cluster: FakeSlurm
) -> None:
    cluster.says("hang")
    with looked_after(world, cluster):
        world.asked("anna")
        wait_until(lambda: cluster.is_there("hanging"), bool, within_s=LONG_S)
        others = [world.asked(who) for who in ("ben", "carl", "anna")]
        wait_until(cluster.jobs, lambda jobs: len(jobs) == 3, within_s=LONG_S)
        for job in others:
            wait_until(lambda job=job: state_of(world, job), "queued".__eq__, within_s=LONG_S)
        world.ask("POST", f"{JOBS}/{others[0]['id']}/cancel", "ben")
        wait_until(lambda: cluster.lines("cancelled"), bool, within_s=LONG_S)
        assert not cluster.is_there("release")  # it hangs still
        assert len(cluster.lines("asked")) == 4


def test_a_cancellation_that_hangs_holds_up_no_other_one_and_no_submission(
    world: World, cluster: FakeSlurm
) -> None:
    cluster.says("hang-cancel")
    with looked_after(world, cluster):
        jobs = [world.asked(who) for who in ("anna", "ben")]
        for job in jobs:
            wait_until(lambda job=job: state_of(world, job), "queued".__eq__, within_s=LONG_S)
        world.ask("POST", f"{JOBS}/{jobs[0]['id']}/cancel", "anna")
        wait_until(lambda: cluster.is_there("hanging-cancel"), bool, within_s=LONG_S)
        world.ask("POST", f"{JOBS}/{jobs[1]['id']}/cancel", "ben")
        world.asked("anna")
        wait_until(lambda: cluster.lines("cancelled"), bool, within_s=LONG_S)
        wait_until(cluster.jobs, lambda jobs: len(jobs) == 3, within_s=LONG_S)


@pytest.mark.parametrize("has_arrived", [True, False])
def test_a_submission_that_was_given_up_is_adopted_and_never_sent_twice(
    has_arrived: bool, world: World, cluster: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "SEND_S", 1.0)
    monkeypatch.setattr(keeper_module, "ASK_AGAIN_S", 0.2)
    cluster.says("hang")
    if has_arrived:
        cluster.says("arrives")
    with looked_after(world, cluster):
        job = world.asked("anna")
        wait_until(lambda: state_of(world, job), "submitting".__eq__, within_s=LONG_S)
        assert world.jobs()[job["id"]]["status"] == "queued"
        wait_until(lambda: state_of(world, job), "queued".__eq__, within_s=LONG_S)
        asked = cluster.lines("asked")
        assert cluster.jobs() == asked[-1:]
        # what never arrived is sent again under the same name, 10 s later
        assert asked == [asked[0]] * (1 if has_arrived else 2)
    attempts = world.jobs()[job["id"]]["lathe"]["attempts"]
    assert attempts == 1


def test_a_program_is_killed_at_its_limit_with_all_that_it_has_started(tmp_path: Path) -> None:
    """A script around sbatch: its child holds the output open."""
    script = tmp_path / "program"
    script.write_text(f"#!/bin/sh\nsleep 71.25\ntouch '{tmp_path}/ended'\n")
    script.chmod(0o755)
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        time_limits.run_program([str(script)], timeout_s=0.5)
    assert time.monotonic() - began < 30
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert "sleep 71.25" not in running.stdout
    done = time_limits.run_program(["cat"], content=b"a", timeout_s=LONG_S)
    assert (done.returncode, done.stdout) == (0, b"a")


def test_a_call_that_does_not_return_is_given_up_and_few_of_them_are_made() -> None:
    release = threading.Event()
    for _ in range(time_limits.MOST_GIVEN_UP):
        with refused("backend_gave_no_answer", who="a cluster"):
            time_limits.within(0.01, "a cluster", lambda: release.wait(LONG_S))
    with refused("backend_gave_none_of_many", who="a cluster"):
        time_limits.within(LONG_S, "a cluster", lambda: None)
    assert time_limits.within(LONG_S, "another one", lambda: 5) == 5
    with pytest.raises(KeyError):
        time_limits.within(LONG_S, "another one", lambda: {}["a"])
    release.set()
    wait_until(lambda: is_answered("a cluster"), bool, within_s=LONG_S)


def is_answered(who: str) -> bool:
    try:
        return time_limits.within(LONG_S, who, lambda: True)
    except Exception:  # of any kind: it is looked at again
        return False


def test_owners_take_turns_in_a_lane_and_none_fills_it() -> None:
    lanes, order = Lanes(), list[str]()
    release = threading.Event()

    def act(name: str) -> bool:
        order.append(name)
        release.wait(LONG_S)
        return name == "ben-0"

    def action(owner: str, number: int, lane: Lane) -> Action:
        name = f"{owner}-{number}"
        return Action(name, owner, lane, lambda: act(name))

    narrow, other = Lane("narrow", 3, 2), Lane("other", 1, 1)
    actions = [action("anna", number, narrow) for number in range(9)]
    actions += [action("ben", number, narrow) for number in range(2)]
    actions += [action("anna", 99, other)]
    lanes.replace(actions, seen_at=time.monotonic())
    wait_until(lambda: len(order), lambda count: count == 4, within_s=LONG_S)
    assert set(order) == {"anna-0", "anna-1", "ben-0", "anna-99"}
    lanes.replace(actions, seen_at=time.monotonic())
    assert len(order) == 4  # a job has one action at a time
    release.set()
    assert lanes.join() == {"ben-0"}
    assert len(order) == len(set(order)) == 12
    # what was seen before an action ended calls for none
    lanes.replace(actions, seen_at=time.monotonic() - LONG_S)
    lanes.join()
    assert len(order) == 12
    lanes.replace(actions, seen_at=time.monotonic())
    lanes.join()
    assert len(order) == 24


def test_the_jobs_of_one_owner_do_not_all_come_before_those_of_another() -> None:
    lanes, order = Lanes(), list[str]()
    names = ["anna-0", "anna-1", "anna-2", "ben-0", "anna-3", "carl-0"]

    def action(name: str) -> Action:
        def note() -> bool:
            order.append(name)
            return False

        return Action(name, name.partition("-")[0], Lane("one", 1, 1), note)

    lanes.replace(map(action, names), seen_at=time.monotonic())
    lanes.join()
    assert order == ["anna-0", "ben-0", "carl-0", "anna-1", "anna-2", "anna-3"]
