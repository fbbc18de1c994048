"""What is in the way of one job, for a moment or for good, keeps no other job waiting."""

from __future__ import annotations

import errno
import logging
import secrets
import shutil
import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobs.code import repository, snapshot
from jobs.errors import Unreachable, is_transient, kind_of
from jobs.protocol import Rendered
from jobs.record import events as record
from jobs.record.patience import PatientBackends
from jobs.serve import keeper as keeper_module
from jobs.serve.index import Index
from jobs.serve.turn import reader as reader_module
from jobs.serve.turn.lanes import Lane
from jobs.serve.turn.reader import failure_part, index_part
from jobs.submit import control, prepare
from jobs.submit import group as group_of_jobs
from tests.jobs.odd_folders import folder_at
from tests.jobs.test_sending import Memory
from tests.serve.conftest import Stub, wait_until
from tests.serve.poisoned import JOBS, World, new_world
from tests.serve.test_turns import until_all_ended
from tests.wording import refused, says
from trainer.errors import LatheError, StorageError
from trainer.files.atomic import create_json

LONG_S = 20.0  # less than any wait that a turn must not do, and more than a busy machine needs


@pytest.fixture
def world(tmp_path: Path, stub: Stub, queue: Path) -> World:
    return new_world(tmp_path, stub)


class Full(Memory):
    """A scheduler that counts how often it was asked to take a job."""

    num_asked = 0

    def submit(self, rendered: Rendered) -> str:
        self.num_asked += 1
        return super().submit(rendered)


def use(world: World, scheduler: Memory) -> None:
    """Let the jobs of a world go to this scheduler."""
    world.keeper.backend_of = lambda name: scheduler  # type: ignore[assignment]
    world.keeper.reader.observed_by = PatientBackends(lambda name: scheduler)


def turn_s(world: World) -> float:
    """How long a turn took."""
    began = time.monotonic()
    world.keeper.turn()
    return time.monotonic() - began


def test_a_job_that_waits_for_its_turn_is_queued_and_sent_when_there_is_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Full(room=0)
    use(world, scheduler)
    job_id = world.asked("anna")["id"]
    for _ in range(5):
        world.keeper.turn()
    job = world.jobs()[job_id]
    assert (job["status"], job["error"]) == ("queued", None)
    assert job["lathe"]["reason"] == "waits for its turn: QOSMaxSubmitJobPerUserLimit"
    assert scheduler.num_asked == 2  # and again only after ASK_AGAIN_S
    scheduler.room = 1
    monkeypatch.setattr(keeper_module, "ASK_AGAIN_S", 0.0)
    world.keeper.turn()
    world.keeper.turn()
    assert len(scheduler.ids) == 1
    job = world.jobs()[job_id]
    assert (job["status"], job["lathe"]["state"]) == ("queued", "queued")


def test_a_job_that_waits_for_its_turn_is_not_sent_once_it_is_cancelled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Full(room=0)
    use(world, scheduler)
    monkeypatch.setattr(keeper_module, "ASK_AGAIN_S", 0.0)
    job_id = world.asked("anna")["id"]
    for _ in range(3):
        world.keeper.turn()
    world.ask("POST", f"{JOBS}/{job_id}/cancel", "anna")
    scheduler.room = 1
    world.keeper.turn()
    assert world.jobs()[job_id]["status"] == "cancelled"
    assert scheduler.ids == {}


def test_a_trouble_with_a_new_temporary_name_each_time_fails_its_job(
    tmp_path: Path, stub: Stub, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code folder of a shared savedir_base belongs to a colleague."""
    world = new_world(tmp_path, stub, every_s=0.05)
    folder = world.base / "_jobs" / "code"

    def refuse(*arguments: Any, **options: Any) -> None:
        name = str(folder / f".tmp-dddd-10570-{secrets.token_hex(4)}")
        cause = PermissionError(errno.EACCES, "Permission denied", name)
        raise StorageError(f"{name}: Permission denied.") from cause

    monkeypatch.setattr(keeper_module, "take", refuse)
    del world.keeper.snapshot  # that of the fixture
    job_id = world.asked("anna")["id"]
    for _ in range(6):
        world.keeper.turn()
        time.sleep(0.05)
    job = world.jobs()[job_id]
    assert (job["status"], (job["error"] or {}).get("code")) == ("failed", "cannot_run")
    assert job["error"]["message"].startswith("_jobs/code/.tmp-dddd-10570-")


def test_the_kind_of_an_error_is_the_same_whatever_temporary_file_it_names() -> None:
    def denied(name: str, *, is_ours: bool = True) -> Exception:
        cause = PermissionError(errno.EACCES, "Permission denied", name)
        error = StorageError(f"{name}: Permission denied.")
        error.__cause__ = cause
        return error if is_ours else cause

    def kinds(*errors: Exception) -> int:
        return len({kind_of(error) for error in errors})

    for is_ours in (True, False):
        names = ("/a/code/.tmp-zzzz", "/a/code/.tmp-yyyy")
        assert kinds(*(denied(name, is_ours=is_ours) for name in names)) == 1
        assert kinds(denied("/a/code/x", is_ours=is_ours), denied("/a/run/x", is_ours=is_ours)) == 2
    inside = [f"/a/code/.tmp-dddd-{number}-b9ab0ca{number}/tree/x" for number in (1, 23)]
    assert kinds(*map(denied, inside)) == 1
    # what another part of the program has made a text of
    assert kinds(*(LatheError(f"{name}: Permission denied.") for name in inside)) == 1
    assert kinds(LatheError("a: Permission denied"), LatheError("a: Is a directory")) == 2
    assert kinds(KeyError("model"), ValueError("model")) == 2


def test_a_failure_that_cannot_be_written_down_is_tried_again_and_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.keeper, "_offer", lambda ticket: {}[ticket.model])
    job_id = world.asked("anna")["id"]

    def refuse(path: Path, value: Any) -> bool:
        if path.name != "failed.json":
            return create_json(path, value)
        name = f"{path}.{secrets.token_hex(4)}.tmp"
        raise StorageError(name) from PermissionError(errno.EACCES, "Permission denied", name)

    monkeypatch.setattr(keeper_module, "create_json", refuse)
    for _ in range(5):
        world.keeper.turn()
    told = world.keeper.reader.failing.reasons
    assert told.keys() == {job_id, failure_part(job_id)}
    assert "KeyError" in told[job_id]
    lines = world.client.get("/healthz").text.splitlines()
    assert lines[0].startswith("degraded: 2 thing(s) could not be done")
    assert set(lines[1:]) == told.keys()
    monkeypatch.setattr(keeper_module, "create_json", create_json)
    world.keeper.turn()
    job = world.jobs()[job_id]
    assert job["status"] == "failed"
    says("not_understood", job["error"]["message"], path=f"_service/tickets/{job_id}")
    assert "KeyError" not in job["error"]["message"]
    assert world.client.get("/healthz").text == "ok\n"


def test_a_job_that_has_failed_stays_as_it_was_when_its_folder_cannot_be_read(
    world: World, stub: Stub
) -> None:
    stub.says("7")
    job = world.asked("anna")
    ended = until_all_ended(world)[job["id"]]
    assert ended["error"]["code"] == "training_failed"
    folder_at("job.jsonl")(world.keeper.folder.base.run(job["lathe"]["exp_id"]))
    for _ in range(4):
        world.keeper.turn()
    assert world.jobs()[job["id"]] == ended
    assert not (world.keeper.folder.tickets / job["id"] / "failed.json").exists()


def test_a_failure_that_cannot_be_written_down_stays_at_its_time(
    world: World, monkeypatch: pytest.MonkeyPatch, stub: Stub
) -> None:
    stub.says("slow")
    job = world.asked("anna")
    world.keeper.turn()
    times = (f"2026-01-01T00:{minute:02}:00.000+00:00" for minute in range(60))
    monkeypatch.setattr(reader_module, "now", lambda: next(times))

    def refuse(path: Path, value: Any) -> bool:
        raise StorageError(str(path)) from PermissionError(errno.EACCES, "denied", str(path))

    monkeypatch.setattr(keeper_module, "create_json", refuse)
    folder_at("checked.json")(world.keeper.folder.base.run(f"_service/tickets/{job['id']}"))
    ends = set()
    for _ in range(6):
        world.keeper.turn()
        ends.add(world.jobs()[job["id"]]["finished_at"])
    assert len(ends - {None}) == 1


def test_a_cancelled_job_stays_so_and_is_ended_though_its_ticket_cannot_be_read_any_more(
    world: World, stub: Stub
) -> None:
    stub.says("slow")
    job = world.asked("anna")
    exp_id = job["lathe"]["exp_id"]

    def turn() -> str:
        world.keeper.turn()
        return world.jobs()[job["id"]]["lathe"]["state"]

    wait_until(turn, lambda state: state == "running", within_s=60)
    world.ask("POST", f"{JOBS}/{job['id']}/cancel", "anna")
    folder_at("wish-1.json")(world.keeper.folder.base.run(f"_service/tickets/{job['id']}"))

    def state_of_run() -> str:
        world.keeper.turn()
        return world.keeper.reader.rows([exp_id])[exp_id].state

    wait_until(state_of_run, lambda state: state == "cancelled", within_s=60)
    assert world.jobs()[job["id"]]["status"] == "cancelled"


def test_a_run_whose_lock_is_held_keeps_no_turn_waiting(world: World, stub: Stub) -> None:
    """A `lathe-jobs retry` that was stopped (Ctrl+Z) holds the lock of one run for hours."""
    stub.says("slow")
    stuck, other = world.asked("anna"), world.asked("ben")
    run = world.keeper.folder.base.run(stuck["lathe"]["exp_id"])
    with record.lock(run, wait_s=0):
        for _ in range(3):
            assert turn_s(world) < LONG_S
        assert world.jobs()[stuck["id"]]["status"] == "queued"
        assert (world.base / other["lathe"]["exp_id"] / "job.jsonl").is_file()
    world.keeper.turn()
    assert run.record.is_file()
    with record.lock(run, wait_s=0):
        world.ask("POST", f"{JOBS}/{stuck['id']}/cancel", "anna")
        for _ in range(2):
            assert turn_s(world) < LONG_S
        assert not run.attempt(1).cancel_file.exists()
    world.keeper.turn()  # not after ASK_AGAIN_S: nobody was asked yet
    assert run.attempt(1).cancel_file.exists()
    world.ask("POST", f"{JOBS}/{other['id']}/cancel", "ben")
    world.keeper.turn()


def test_a_submission_without_an_answer_keeps_no_turn_waiting(world: World) -> None:
    scheduler = Full(lose_requests=9)
    use(world, scheduler)
    job_id = world.asked("anna")["id"]
    assert sum(turn_s(world) for _ in range(3)) < LONG_S
    assert scheduler.num_asked == 1
    assert world.jobs()[job_id]["lathe"]["state"] == "submitting"


def test_a_wish_that_comes_while_another_job_is_sent_is_seen_before_its_own_job_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Full()
    use(world, scheduler)
    monkeypatch.setattr(keeper_module, "Lane", partial(Lane, width=1))
    jobs = {job["lathe"]["exp_id"]: job for job in (world.asked("anna"), world.asked("anna"))}
    submit = group_of_jobs.submit
    sent: list[str] = []

    def cancel_the_other(request: Any) -> Any:
        sent.extend(request.by_id)
        for exp_id, job in jobs.items():
            if exp_id not in sent and len(sent) == 1:
                world.ask("POST", f"{JOBS}/{job['id']}/cancel", "anna")
        return submit(request)

    monkeypatch.setattr(group_of_jobs, "submit", cancel_the_other)
    for _ in range(3):
        world.keeper.turn()
    assert len(sent) == len(scheduler.ids) == 1


def test_a_wish_that_comes_while_another_job_is_sent_again_is_seen_before_its_own_job_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Full(room=0)
    use(world, scheduler)
    monkeypatch.setattr(keeper_module, "Lane", partial(Lane, width=1))
    monkeypatch.setattr(keeper_module, "ASK_AGAIN_S", 0.0)
    jobs = {job["lathe"]["exp_id"]: job for job in (world.asked("anna"), world.asked("anna"))}
    for _ in range(3):
        world.keeper.turn()
    again = control.again
    sent: list[str] = []

    def cancel_the_other(request: Any, rows: Any) -> Any:
        sent.extend(row.exp_id for row in rows)
        for exp_id, job in jobs.items():
            if exp_id not in sent and len(sent) == 1:
                world.ask("POST", f"{JOBS}/{job['id']}/cancel", "anna")
        return again(request, rows)

    monkeypatch.setattr(control, "again", cancel_the_other)
    scheduler.room = 2
    for _ in range(3):
        world.keeper.turn()
    assert len(sent) == len(scheduler.ids) == 1


def test_a_wish_that_comes_while_the_code_is_copied_is_seen_before_its_job_is_sent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Full()
    use(world, scheduler)
    job_id = world.asked("anna")["id"]
    code = world.keeper.snapshot

    def take_long(*arguments: Any, **options: Any) -> snapshot.Snapshot:
        world.ask("POST", f"{JOBS}/{job_id}/cancel", "anna")
        return code

    del world.keeper.snapshot
    monkeypatch.setattr(keeper_module, "take", take_long)
    for _ in range(3):
        world.keeper.turn()
    assert world.jobs()[job_id]["status"] == "cancelled"
    assert scheduler.num_asked == 0


def test_a_full_index_is_no_trouble_of_a_folder_and_shown_to_probes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = world.asked("anna")["id"]
    with monkeypatch.context() as patch:
        full = sqlite3.OperationalError("database or disk is full")

        def refuse(*arguments: Any, **options: Any) -> None:
            raise full

        patch.setattr(Index, "write_job", refuse)
        for _ in range(3):
            world.keeper.turn()
        assert world.keeper.unreadable.reasons == {}
        lines = world.client.get("/healthz").text.splitlines()
        assert lines[0].startswith("degraded: 1 thing(s) could not be done")
        assert lines[1:] == [index_part(job_id)]
    world.keeper.turn()
    assert world.client.get("/healthz").text == "ok\n"
    assert until_all_ended(world)[job_id]["status"] == "succeeded"


def test_what_was_tried_for_a_job_is_forgotten_when_it_has_ended_or_is_gone(
    world: World, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Full(room=0)
    use(world, scheduler)
    ids = [world.asked("anna")["id"] for _ in range(2)]
    for _ in range(4):
        world.keeper.turn()
    tries = world.keeper._last_tries  # pyright: ignore[reportPrivateUsage]
    assert tries.keys() == set(ids)
    world.ask("POST", f"{JOBS}/{ids[0]}/cancel", "anna")
    world.keeper.turn()
    assert tries.keys() == {ids[1]}

    def throw(folder: Any, ticket: Any) -> None:
        raise Unreachable("a trouble")

    monkeypatch.setattr(world.keeper, "_check", throw)
    third = world.asked("anna")["id"]
    world.keeper.turn()
    assert third in world.keeper.reader.failing
    for name in (ids[1], third):
        shutil.rmtree(world.keeper.folder.tickets / name)
    world.keeper.turn()
    assert tries == {}
    assert world.keeper.reader.failing.reasons == {}


def test_git_that_is_slow_twice_fails_no_job(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "project").mkdir()
    git = tmp_path / "programs" / "git"
    git.parent.mkdir()
    git.write_text("#!/bin/sh\nexec sleep 60\n")
    git.chmod(0o755)
    monkeypatch.setattr(prepare, "PROJECT", tmp_path / "project")
    monkeypatch.setattr(repository, "GIT_S", 0.02)
    monkeypatch.setenv("PATH", f"{git.parent}:/usr/bin:/bin")
    with refused("git_slow", command="rev-parse", folder=str(tmp_path / "project")):
        repository.read_source(tmp_path / "project")
    del world.keeper.snapshot  # that of the fixture
    job_id = world.asked("anna")["id"]
    for _ in range(5):
        world.keeper.turn()
    assert world.jobs()[job_id]["status"] == "queued"
    assert any(f"{job_id}: git rev-parse" in line for line in caplog.messages)


def test_files_that_change_while_they_are_copied_may_be_copied_later(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    program = tmp_path / "project" / "trainval.py"
    program.write_text("")
    publish = snapshot._publish  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(snapshot, "_publish", lambda *folders: _change())
    with refused("tree_changes", folder=str(tmp_path / "project")) as told:
        snapshot.take(tmp_path / "project", world.keeper.folder.base, allow_dirty=True)
    assert is_transient(told.value)
    monkeypatch.setattr(snapshot, "_publish", publish)
    snapshot.take(tmp_path / "project", world.keeper.folder.base, allow_dirty=True)


def _change() -> None:
    raise snapshot._Changed  # pyright: ignore[reportPrivateUsage]
