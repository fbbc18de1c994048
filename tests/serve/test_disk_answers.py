"""What is answered when a disk refuses, a file has just gone, or the token file is not there; and
what of it the clients are told.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import reason_for_client
from jobs.serve import uploads
from jobs.serve.access import add_token
from jobs.serve.dialect import models as model_routes
from jobs.serve.job_view import Facts, standing
from jobs.serve.live.stream import Watch
from jobs.serve.tickets import Failure, UploadFolder
from tests.jobs.odd_folders import folder_at
from tests.serve.conftest import Stub
from tests.serve.poisoned import World, new_world
from tests.serve.test_job_view import DONE, at, row, ticket
from tests.serve.test_turns import until_all_ended
from tests.wording import is_said, says


@pytest.fixture
def world(tmp_path: Path, stub: Stub, queue: Path) -> World:
    return new_world(tmp_path, stub)


def answer_to(world: World, method: str, path: str, who: str = "anna") -> Any:
    headers = {"authorization": f"Bearer {world.tokens[who]}"}
    return world.client.request(method, path, headers=headers)


def message_of(answer: Any) -> str:
    return answer.json()["error"]["message"]


# Deleting
# --------------------------------------------------------------------------------------------------


def test_the_second_of_two_deletions_of_a_file_is_404(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_id = world.asked("anna")["training_file"]
    remove = uploads.remove

    def remove_twice(folder: UploadFolder) -> None:
        remove(folder)  # by another request, a moment earlier
        remove(folder)

    monkeypatch.setattr(uploads, "remove", remove_twice)
    answer = answer_to(world, "DELETE", f"/v1/files/{file_id}")
    assert answer.status_code == 404
    says("file_gone", message_of(answer), path=f"/v1/files/{file_id}")


REFUSALS = {
    errno.ENOSPC: 507,
    errno.EDQUOT: 507,
    errno.EROFS: 507,
    errno.EMFILE: 503,
    errno.EACCES: 409,
    errno.EIO: 500,
}


def refusing(number: int) -> Callable[..., Any]:
    def refuse(path: Any, *others: Any) -> None:
        raise OSError(number, os.strerror(number), str(path))

    return refuse


@pytest.mark.parametrize("number", REFUSALS, ids=errno.errorcode.get)
def test_a_refusal_of_the_disk_is_called_what_it_is(
    number: int, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    file_id = world.asked("anna")["training_file"]
    with monkeypatch.context() as patch:
        patch.setattr(uploads.os, "rename", refusing(number))
        answer = answer_to(world, "DELETE", f"/v1/files/{file_id}")
    assert answer.status_code == REFUSALS[number]
    assert is_said("disk_refuses", answer.text) == (answer.status_code == 507)
    assert str(world.base) not in answer.text
    place = f"_service/uploads/{file_id}"
    if answer.status_code == 409:
        told = says("file_refuses", message_of(answer))["reason"]
        assert told.startswith(f"{place}: Permission denied")
    assert any(f"{world.base}/{place}" in line for line in [*caplog.messages, caplog.text])
    assert answer_to(world, "DELETE", f"/v1/files/{file_id}").status_code == 200


def test_a_model_that_a_disk_did_not_let_go_is_not_called_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = world.asked("anna")
    model = until_all_ended(world)[job["id"]]["fine_tuned_model"]
    path = f"/v1/models/{model}"
    with monkeypatch.context() as patch:
        patch.setattr(model_routes.os, "rename", refusing(errno.ENOSPC))
        answer = answer_to(world, "DELETE", path)
    assert answer.status_code == 507
    says("disk_refuses", message_of(answer))
    world.keeper.turn()
    assert answer_to(world, "GET", path).status_code == 200
    assert (world.base / job["lathe"]["exp_id"] / "final").is_dir()
    assert answer_to(world, "DELETE", path).status_code == 200
    assert answer_to(world, "GET", path).status_code == 404
    assert not (world.base / job["lathe"]["exp_id"] / "final").exists()


# Probes
# --------------------------------------------------------------------------------------------------

ODD_HEADERS: list[tuple[list[tuple[str, str]], int]] = [
    ([("host", "10.1.2.3:8100")], 421),
    ([("origin", "https://elsewhere.example")], 403),
    ([("sec-fetch-site", "cross-site")], 403),
    ([("content-type", "a"), ("content-type", "b")], 400),
    ([("authorization", "Bearer nothing")], 401),
]


@pytest.mark.parametrize(("headers", "status"), ODD_HEADERS, ids=str)
def test_a_probe_is_answered_whatever_its_headers_are(
    headers: list[tuple[str, str]], status: int, world: World
) -> None:
    assert world.client.get("/v1/models", headers=headers).status_code == status
    answer = world.client.get("/healthz", headers=headers)
    assert (answer.status_code, answer.text) == (200, "ok\n")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_token_file_that_is_away_for_a_moment_is_503_and_refuses_no_probe(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, away = tmp_path / "tokens.json", tmp_path / "away"
    tokens.rename(away)
    for content in (None, "{", json.dumps({"tokens": [{"name": "x"}]})):
        if content is not None:
            tokens.write_text(content)
            tokens.chmod(0o600)
        answer = answer_to(world, "GET", "/v1/models")
        assert answer.status_code == 503
        says("tokens_unreadable", message_of(answer))
        assert "retry-after" in answer.headers
        assert str(tokens) in caplog.text
        assert str(tokens) not in answer.text
        assert world.client.get("/healthz").status_code == 200
    tokens.unlink()
    away.rename(tokens)
    world.tokens["dora"] = add_token(tokens, "dora", "run", {})
    assert answer_to(world, "GET", "/v1/models", "dora").status_code == 200


# What clients are told
# --------------------------------------------------------------------------------------------------


def told_on_page(world: World, owner: str | None) -> dict[str, str]:
    """The folders that cannot be read, as the page of an owner names them."""
    texts = Watch(world.keeper, owner, -1, {}).news()
    events = [text.partition("data: ")[2] for text in texts if text.startswith("event: unread")]
    (told,) = map(json.loads, events)
    return told


def test_the_page_of_an_owner_names_his_own_jobs_files_and_runs_that_cannot_be_read(
    world: World,
) -> None:
    jobs = [world.asked(who) for who in ("anna", "anna", "anna", "ben")]
    world.keeper.turn()
    folder = world.keeper.folder
    for job in (jobs[0], jobs[3]):
        folder_at("wish-1.json")(folder.base.run(f"_service/tickets/{job['id']}"))
    folder_at("file.json")(folder.base.run(f"_service/uploads/{jobs[1]['training_file']}"))
    folder_at("job.jsonl")(folder.base.run(jobs[2]["lathe"]["exp_id"]))
    for _ in range(3):
        world.keeper.turn()
    wanted = {jobs[0]["id"], jobs[1]["training_file"], jobs[2]["lathe"]["exp_id"]}
    told = told_on_page(world, "anna")
    assert told.keys() == wanted
    assert str(world.base) not in json.dumps(told)
    assert told_on_page(world, "ben").keys() == {jobs[3]["id"]}
    assert told_on_page(world, None) == world.keeper.unreadable.reasons
    assert world.keeper.unreadable.reasons.keys() == wanted | {jobs[3]["id"]}
    shutil.rmtree(folder.uploads / jobs[1]["training_file"])
    world.keeper.turn()
    assert told_on_page(world, "anna").keys() == wanted - {jobs[1]["training_file"]}


def test_a_file_that_can_be_read_again_is_shown_as_it_was(world: World) -> None:
    file_id = world.asked("anna")["training_file"]
    before = world.ask("GET", "/v1/files", "anna")
    facts_file = world.keeper.folder.uploads / file_id / "file.json"
    facts_file.rename(facts_file.with_name("aside"))
    facts_file.mkdir()
    world.keeper.turn()
    (shown,) = world.ask("GET", "/v1/files", "anna")["data"]
    assert (shown["id"], shown["status"]) == (file_id, "error")
    assert shown["filename"] == before["data"][0]["filename"]
    assert str(world.base) not in shown["status_details"]
    facts_file.rmdir()
    facts_file.with_name("aside").rename(facts_file)
    world.keeper.turn()
    assert world.ask("GET", "/v1/files", "anna") == before
    assert world.keeper.unreadable.reasons == {}


def test_clients_are_told_places_below_the_base_and_no_words_of_python(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b"
    denied = PermissionError(errno.EACCES, "Permission denied", str(place / "c"))
    assert reason_for_client(denied, place, tmp_path) == "a/b/c: Permission denied"
    told = reason_for_client(KeyError("x"), place, tmp_path)
    says("not_understood", told, path="a/b")
    assert "KeyError" not in told


def test_a_run_that_had_failed_before_its_folder_could_not_be_read_failed_by_itself() -> None:
    late = Failure(at=at(30), message="unreadable")
    for failure, code in (
        (late, "training_failed"),
        (Failure(at=at(3), message="x"), "cannot_run"),
    ):
        now = standing(Facts(ticket(), DONE, [], row("failed", ended=9), failure))
        assert now.status == "failed"
        assert (now.error or {})["code"] == code
