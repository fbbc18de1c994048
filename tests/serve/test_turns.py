"""No job stops another: what one of them throws is its own failure, whatever it is."""

from __future__ import annotations

import errno
import json
import logging
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import Busy, Transient, Unreachable, is_transient
from jobs.record.paths import BaseFolder
from jobs.record.row import Row
from jobs.record.status import survey
from jobs.record.times import now
from jobs.serve import keeper as keeper_module
from jobs.serve.live.stream import Watch
from jobs.serve.rows import checks as rows
from jobs.serve.turn.troubles import Troubles
from jobs.submit import prepare
from tests.jobs.odd_folders import folder_at, status_of, text_at
from tests.serve.conftest import Stub, wait_until
from tests.serve.poisoned import (
    JOBS,
    KINDS,
    TENANTS,
    World,
    application,
    new_world,
    withdraw,
)
from tests.serve.test_service_chaos import free_port
from tests.wording import says
from trainer.data.readers.jsonl import read_jsonl
from trainer.errors import ConfigError, DataError, StorageError
from trainer.files.atomic import create_json

ROOT = Path(__file__).resolve().parents[2]
FINAL = ("succeeded", "failed", "cancelled")
SIX = (
    "half of an emoji in a row",
    "a record that is a folder",
    "an offer that is gone",
    "a wish of another shape",
    "a ticket that is a folder",
    "metrics that are a loop",
)


@pytest.fixture
def world(tmp_path: Path, stub: Stub, queue: Path) -> World:
    return new_world(tmp_path, stub)


def until_all_ended(world: World) -> dict[str, dict[str, Any]]:
    """All jobs, as soon as they have ended."""

    def turn() -> dict[str, dict[str, Any]]:
        world.keeper.turn()
        return world.jobs()

    return wait_until(
        turn, lambda jobs: all(one["status"] in FINAL for one in jobs.values()), within_s=60
    )


def turns_until_sent(world: World, jobs: list[dict[str, Any]]) -> int:
    return world.turns(
        lambda: all((world.base / job["lathe"]["exp_id"] / "job.jsonl").is_file() for job in jobs)
    )


def test_poisoned_jobs_fail_with_their_reasons_and_the_others_run_as_if_alone(
    tmp_path: Path, world: World, stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    alone = turns_until_sent(world, [world.asked("anna")])
    bad: dict[str, str] = {}
    good: list[dict[str, Any]] = []
    for number, (name, kind) in enumerate(KINDS.items()):
        job = world.asked(TENANTS[number % 3], kind)
        world.poison(job, kind)
        bad[job["id"]] = name
        if number % 3 == 0:
            good.append(world.asked(TENANTS[number // 3 % 3]))
    withdraw(world.keeper)
    assert turns_until_sent(world, good) == alone
    jobs = until_all_ended(world)
    assert {jobs[job["id"]]["status"] for job in good} == {"succeeded"}
    for job_id, name in bad.items():
        job = jobs[job_id]
        assert (name, job["status"]) == (name, "failed")
        assert KINDS[name].told in job["error"]["message"], job["error"]
        assert str(tmp_path) not in json.dumps(job)
    assert {*stub.starts()} & {jobs[job_id]["lathe"]["exp_id"] for job_id in bad} == set()

    # every list is there for everybody, and says which folders cannot be read
    for who in (*TENANTS, "adam"):
        for path in ("/v1/files", JOBS, "/lathe/v1/status", "/lathe/v1/results", "/v1/models"):
            world.ask("GET", path, who)
    world.ask("POST", "/lathe/v1/reconcile")
    unreadable = world.keeper.unreadable.reasons
    health = world.client.get("/healthz")
    assert health.status_code == 200
    assert health.text.splitlines()[0].startswith(f"degraded: {len(unreadable)} folder(s)")
    assert health.text.splitlines()[1:] == list(unreadable)
    (told,) = [
        json.loads(text.partition("data: ")[2])
        for text in Watch(world.keeper, None, -1, {}).news()
        if text.startswith("event: unreadable")
    ]
    assert told == unreadable
    wanted = {"a record that is a folder", "a ticket that is a folder", "a wish of another shape"}
    names = {bad.get(name, name) for name in unreadable}
    runs = {jobs[job_id]["lathe"]["exp_id"]: name for job_id, name in bad.items()}
    assert wanted <= names | {runs.get(name, "") for name in names}

    # once in the log, however many turns there were
    for name, reason in unreadable.items():
        lines = [one for one in caplog.messages if one == f"{name}: {reason}"]
        assert len(lines) == 1, (name, lines)

    # it is on the disk: another server, without an index, says the same
    for path in (world.base / "_service").glob("index-*"):
        path.unlink()
    keeper, client = application(world.base, tmp_path / "tokens.json", stub, 0.0)
    again = World(world.base, keeper, client, world.tokens)
    jobs_again = until_all_ended(again)
    for job_id, job in jobs.items():
        if bad.get(job_id) != "a ticket that is a folder":
            assert (job_id, jobs_again[job_id]["status"]) == (job_id, job["status"])
            assert jobs_again[job_id]["error"] == job["error"]


def test_a_full_disk_fails_no_job(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job = world.asked("anna")

    def refuse(path: Path, value: Any) -> bool:
        if path.name == "failed.json":
            return create_json(path, value)
        raise StorageError("full") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(keeper_module, "create_json", refuse)
    for _ in range(5):
        world.keeper.turn()
    assert world.jobs()[job["id"]]["status"] == "validating_files"
    monkeypatch.setattr(keeper_module, "create_json", create_json)
    assert until_all_ended(world)[job["id"]]["status"] == "succeeded"


def test_a_trouble_of_a_moment_fails_no_job(tmp_path: Path, stub: Stub, queue: Path) -> None:
    world = new_world(tmp_path, stub, every_s=0.05)
    job = world.asked("anna")
    wish = world.keeper.folder.tickets / job["id"] / "wish-1.json"
    wish.mkdir()
    world.keeper.turn()
    assert world.jobs()[job["id"]]["status"] == "validating_files"
    assert world.keeper.unreadable.reasons.keys() == {job["id"]}
    wish.rmdir()
    assert until_all_ended(world)[job["id"]]["status"] == "succeeded"
    assert world.keeper.unreadable.reasons == {}
    assert world.client.get("/healthz").text == "ok\n"


def test_a_job_whose_code_cannot_be_taken_fails_with_the_reason(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "trainval.py").write_text("")
    monkeypatch.setattr(prepare, "PROJECT", tmp_path / "project")
    world.keeper.send = replace(world.keeper.send, allow_dirty=False)
    del world.keeper.snapshot  # that of the fixture
    job = world.asked("anna")
    ended = until_all_ended(world)[job["id"]]
    assert ended["status"] == "failed"
    says("tree_without_git", ended["error"]["message"])


def test_status_calls_a_paused_job_paused(world: World, stub: Stub) -> None:
    stub.says("slow")
    job = world.asked("anna")
    exp_id = job["lathe"]["exp_id"]

    def row() -> Row:
        world.keeper.turn()
        backends = world.keeper.backend_of
        rows = survey(BaseFolder(world.base), only=[exp_id], backend_of=backends)
        return rows[0] if rows else Row(exp_id, "", "pending", "")

    wait_until(row, lambda row: row.step == 2, within_s=60)
    world.ask("POST", f"{JOBS}/{job['id']}/pause", "anna")
    ended = wait_until(row, lambda row: row.state == "paused", within_s=60)
    assert ended.reason == keeper_module.PAUSED
    assert row().reason == keeper_module.PAUSED
    said = world.jobs()[job["id"]]
    assert (said["status"], said["lathe"]["state"]) == ("queued", "paused")
    world.ask("POST", f"{JOBS}/{job['id']}/cancel", "anna")
    ended = wait_until(row, lambda row: row.state == "cancelled", within_s=60)
    assert ended.reason != keeper_module.PAUSED
    world.keeper.turn()
    said = world.jobs()[job["id"]]
    assert (said["status"], said["lathe"]["state"]) == ("cancelled", "cancelled")


def test_a_job_that_has_succeeded_stays_so_whatever_becomes_of_its_folder(world: World) -> None:
    job = world.asked("anna")
    until_all_ended(world)
    metrics = world.base / job["lathe"]["exp_id"] / "metrics.jsonl"
    metrics.unlink()
    metrics.symlink_to(metrics.name)
    for _ in range(3):
        world.keeper.turn()
    assert world.jobs()[job["id"]]["status"] == "succeeded"
    assert job["lathe"]["exp_id"] in world.client.get("/healthz").text


def test_a_job_that_fails_so_while_it_runs_is_ended(world: World, stub: Stub) -> None:
    stub.says("slow")
    job = world.asked("anna")
    metrics = world.base / job["lathe"]["exp_id"] / "metrics.jsonl"

    def turn() -> bool:
        world.keeper.turn()
        return metrics.exists() and len(metrics.read_text().splitlines()) == 2

    wait_until(turn, bool)
    text_at("wish-1.json", "5")(world.keeper.folder.base.run(f"_service/tickets/{job['id']}"))
    attempt = world.keeper.folder.base.run(job["lathe"]["exp_id"]).attempt(1)

    def ended() -> bool:
        world.keeper.turn()
        return attempt.exit.exists()

    wait_until(ended, bool, within_s=60)
    assert "wish-1.json" in world.jobs()[job["id"]]["error"]["message"]


def test_a_file_whose_facts_cannot_be_read_is_an_error_among_the_others(world: World) -> None:
    job = world.asked("anna")
    other = world.asked("ben")["training_file"]
    file_id = job["training_file"]
    folder_at("file.json")(world.keeper.folder.base.run(f"_service/uploads/{file_id}"))
    stranger = "file-" + "0" * 24  # of which nothing was ever known
    (world.keeper.folder.uploads / stranger / "file.json").mkdir(parents=True)
    world.keeper.turn()
    shown = {one["id"]: one for one in world.ask("GET", "/v1/files")["data"]}
    assert shown.keys() == {file_id, other, stranger}
    assert (shown[other]["status"], shown[stranger]["status"]) == ("processed", "error")
    for who, name in (("anna", file_id), ("adam", file_id), ("adam", stranger)):
        one = world.ask("GET", f"/v1/files/{name}", who)
        assert one["status"] == "error"
        assert "file.json" in one["status_details"]
    headers = {"authorization": f"Bearer {world.tokens['anna']}"}
    assert world.client.get(f"/v1/files/{stranger}", headers=headers).status_code == 404
    assert world.client.get(f"/v1/files/{stranger}/content", headers=headers).status_code == 404
    world.ask("DELETE", f"/v1/files/{file_id}", "anna")
    world.ask("DELETE", f"/v1/files/{stranger}")
    assert [one["id"] for one in world.ask("GET", "/v1/files")["data"]] == [other]


def test_values_that_json_has_no_word_for_end_no_list(world: World) -> None:
    exp_id = "0" * 31 + "1"
    run = world.keeper.folder.base.run(exp_id)
    run.path.mkdir()
    text_at("exp_dict.json", '{"a\\ud83d": NaN, "b": "\\ud83d"}')(run)
    text_at("status.json", status_of(state="failed", error="\ud83d", name="\ud83d"))(run)
    created = {"event": "created", "exp_id": exp_id, "digest": "d", "group": "\ud83d", "nonce": "n"}
    text_at("job.jsonl", json.dumps({**created, "at": now()}) + "\n")(run)
    other = world.keeper.folder.base.run("0" * 31 + "2")
    other.path.mkdir()
    text_at("exp_dict.json", '{"b": Infinity}')(other)
    text_at("status.json", status_of())(other)
    text_at("metrics.jsonl", '{"step": 1, "valid/\\ud83d": 2.0}\n')(other)
    world.keeper.turn()
    assert len(world.ask("GET", "/lathe/v1/status")) == 2
    assert len(world.ask("GET", "/lathe/v1/results")) == 2
    for one in (run, other):
        world.ask("GET", f"/lathe/v1/runs/{one.path.name}")
    board = Watch(world.keeper, None, -1, {}).news()[0]
    assert "NaN" not in board
    assert "d83d" not in board


ODD_ROWS = {
    "half of an emoji": '{"text": "a \\ud83d"}',
    "half of an emoji in a key": '{"text": "a", "\\ude00": 1}',
    "a key that stands twice": '{"text": "a", "text": "b"}',
    "101 lists": '{"text": "a", "b": ' + "[" * 101 + "]" * 101 + "}",
    "100,000 lists": '{"text": "a", "b": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a number of 5,000 digits": '{"text": "a", "b": ' + "9" * 5000 + "}",
    "no JSON": '{"text": "a"',
    "a list": '["a"]',
}
GOOD_ROWS = {
    "a whole emoji, escaped": '{"text": "a \\ud83d\\ude00"}',
    "99 lists": '{"text": "a", "b": ' + "[" * 98 + "]" * 98 + "}",
}


@pytest.mark.parametrize("name", [*ODD_ROWS, *GOOD_ROWS])
def test_an_upload_is_refused_where_a_training_would_refuse_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' + {**ODD_ROWS, **GOOD_ROWS}[name] + "\n")
    mistakes = [str(mistake) for mistake in rows.check(path).mistakes]
    if name in GOOD_ROWS:
        assert mistakes == []
        assert len(list(read_jsonl(path))) == 2
        return
    (mistake,) = mistakes
    assert mistake.startswith("line 2: got ")
    with pytest.raises(DataError) as refusal:
        list(read_jsonl(path))
    assert f"{path}, line 2" in str(refusal.value)


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.EMFILE, "too many open files"), True),
        (OSError(errno.ESTALE, "a file server is away"), True),
        (PermissionError(errno.EACCES, "no"), False),
        (OSError(errno.ELOOP, "a loop"), False),
        (sqlite3.OperationalError("database is locked"), True),
        (sqlite3.ProgrammingError("a value of no type"), False),
        (Unreachable("slurm"), True),
        (Busy("locked"), True),
        (RuntimeError("can't start new thread"), True),
        (MemoryError(), True),
        (ConfigError("a key"), False),
        (KeyError("model"), False),
        (Transient("git status took over 120 s"), True),
        (UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates not allowed"), False),
        (RecursionError(), False),
    ],
    ids=repr,
)
def test_what_may_pass_by_itself_is_tried_again_and_all_else_is_not(
    error: Exception, may_pass: bool
) -> None:
    assert is_transient(error) == may_pass
    if isinstance(error, OSError):
        told = StorageError("the disk refused")
        told.__cause__ = error
        assert is_transient(told) == may_pass


def test_a_trouble_is_there_for_good_when_it_lasts_and_does_not_pass() -> None:
    troubles = Troubles(0.05)

    def note(number: int, *, kind: str = "broken", is_transient: bool = False) -> bool:
        return troubles.note("a", f"{kind} {number}", kind=kind, is_transient=is_transient)

    assert not note(1)
    time.sleep(0.06)
    assert note(2)
    assert not note(3, is_transient=True)
    assert troubles.reasons == {"a": "broken 1"}
    assert not note(4, kind="broken otherwise")
    troubles.keep({"b"}, prefix="b")
    assert troubles.reasons == {"a": "broken otherwise 4"}
    troubles.keep({"b"})
    assert troubles.reasons == {}


def killed_server(world: World, stub: Stub, tokens: Path, port: int) -> subprocess.Popen[bytes]:
    """A server as a process of its own, over the folder of a world. It offers GONE no more."""
    argv = [sys.executable, "-m", "jobs.serve.app", "-sb", str(world.base), "--port", str(port)]
    argv += ["--python_binary", str(stub.python), "--allow-dirty", "--every_s", "0.2"]
    argv += ["--token_file", str(tokens)]
    with (world.base.parent / "server.log").open("ab") as log:
        return subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)


def seconds_of(world: World, jobs: Collection[str]) -> list[int]:
    """How long each of these jobs took from its creation to its end."""
    ended = world.jobs()
    return sorted(ended[name]["finished_at"] - ended[name]["created_at"] for name in jobs)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_twenty_poisoned_jobs_among_twenty_good_ones_and_six_kills_of_the_server(
    tmp_path: Path, stub: Stub, queue: Path
) -> None:
    """The good ones are those of three tenants, and so are the poisoned ones, of six kinds."""
    chance = random.Random(41)
    spent: dict[str, list[int]] = {}
    for name in ("alone", "among"):
        folder = tmp_path / name
        folder.mkdir()
        world, bad = new_world(folder, stub), dict[str, str]()
        good: list[str] = []
        for number in range(20):
            good.append(world.asked(TENANTS[number % 3])["id"])
            if name == "among":
                kind = SIX[number % 6]
                job = world.asked(TENANTS[number // 6 % 3], KINDS[kind])
                world.poison(job, KINDS[kind])
                bad[job["id"]] = kind
        port = free_port()
        process = killed_server(world, stub, folder / "tokens.json", port)
        try:
            for _ in range(6):
                time.sleep(chance.uniform(2.0, 5.0))
                process.kill()
                process.wait()
                process = killed_server(world, stub, folder / "tokens.json", port)
            jobs = wait_until(
                world.jobs,
                lambda jobs: all(one["status"] in FINAL for one in jobs.values()),
                within_s=600,
            )
        finally:
            process.kill()
            process.wait()
        assert {jobs[job_id]["status"] for job_id in good} == {"succeeded"}
        for job_id, kind in bad.items():
            assert (kind, jobs[job_id]["status"]) == (kind, "failed")
            assert KINDS[kind].told in jobs[job_id]["error"]["message"], jobs[job_id]["error"]
        spent[name] = seconds_of(world, good)
    # as long as alone, but for what this machine does besides
    assert spent["among"][-1] <= 2 * spent["alone"][-1] + 5, spent
    assert set(Counter(stub.starts()).values()) == {1}
    print(
        f"SHOW {len(good)} good jobs succeeded among {len(bad)} poisoned ones, which failed with "
        f"their reasons; six kills; the last good one after {spent['among'][-1]} s (alone "
        f"{spent['alone'][-1]})"
    )
