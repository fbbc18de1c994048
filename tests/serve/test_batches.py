"""BatchFolders: OpenAI's client asks for many answers at once, over kills, cancellations and time."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from jobs.record.paths import BaseFolder
from jobs.serve.batches import routes as batch_routes
from jobs.serve.batches import runner as batch_runner
from jobs.serve.batches.asking import TOGETHER
from jobs.serve.batches.folder import Batch, BatchFolder, BatchFolders, ids_of_lines
from jobs.serve.batches.turn import append
from jobs.serve.tickets import ServiceFolder, alone
from tests.serve.answering import StandIn, line, stand_in, tuned_model
from tests.serve.conftest import Service, Stub, jsonl, own_queue, serving, wait_until
from tests.wording import says
from trainer.errors import StorageError

World = tuple[Service, StandIn, OpenAI, str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("service")
    stub = Stub(folder / "stub")
    with pytest.MonkeyPatch.context() as patch:
        model = stand_in(folder / "standin", patch)
        with own_queue(folder / "queue"), serving(folder / "base", python=stub.python) as running:
            yield running, model, running.client(), tuned_model(running)


def created(client: OpenAI, rows: list[dict[str, Any]], **options: Any) -> Any:
    return created_of(client, jsonl(rows), **options)


def created_of(client: OpenAI, content: bytes, **options: Any) -> Any:
    file = client.files.create(file=("batch.jsonl", content), purpose="batch")
    options = {"endpoint": "/v1/chat/completions", **options}
    return client.batches.create(input_file_id=file.id, completion_window="24h", **options)


def until_end(client: OpenAI, batch_id: str, within_s: float = 60) -> Any:
    ends = ("completed", "failed", "cancelled", "expired")
    return wait_until(
        lambda: client.batches.retrieve(batch_id), lambda one: one.status in ends, within_s=within_s
    )


def lines_of(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def test_every_request_of_a_batch_is_answered_once_and_a_refused_one_is_told(world: World) -> None:
    _, standin, client, model = world
    rows = [line(number, model, f"a{number}") for number in range(40)]
    rows[7]["body"]["temperature"] = 9
    batch = created(client, rows, metadata={"who": "me"})
    assert (batch.status, batch.object) == ("validating", "batch")
    end = until_end(client, batch.id)
    assert end.status == "completed"
    counts = end.request_counts
    assert (counts.total, counts.completed, counts.failed) == (40, 39, 1)
    assert (end.model, end.metadata, end.errors) == (model, {"who": "me"}, None)
    answers = lines_of(client, end.output_file_id)
    assert sorted(one["custom_id"] for one in answers) == sorted(
        row["custom_id"] for row in rows if row["custom_id"] != "row-7"
    )
    for one in answers:
        body = one["response"]["body"]
        number = one["custom_id"].removeprefix("row-")
        assert body["choices"][0]["message"]["content"] == f"you said a{number}"
        assert (one["response"]["status_code"], body["model"]) == (200, model)
    (error,) = lines_of(client, end.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("row-7", 400)
    says("request_value", error["response"]["body"]["error"]["message"], key="temperature")
    file = client.files.retrieve(str(end.output_file_id))
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert file.id in [one.id for one in client.files.list(purpose="batch_output")]
    assert sorted(one for one in standin.asked() if one.startswith("a")) == sorted(
        f"a{number}" for number in range(40) if number != 7
    )


def test_batches_are_listed_newest_first_by_page_and_come_back_alike(world: World) -> None:
    _, _, client, model = world
    first = created(client, [line(0, model, "b")])
    until_end(client, first.id)
    second = created(client, [line(0, model, "c")], endpoint="/v1/chat/completions")
    until_end(client, second.id)
    ids = [one.id for one in client.batches.list(limit=1)]
    assert ids[:2] == [second.id, first.id]
    assert client.batches.list(limit=1).data[0] == client.batches.retrieve(second.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.cancel(first.id)
    says("job_over", caught.value, state="completed")
    with pytest.raises(openai.NotFoundError) as missing:
        client.batches.retrieve("batch_none")
    says("batch_unknown", missing.value, name="batch_none")


BAD: list[tuple[dict[str, Any], str, str | None, str]] = [
    ({"custom_id": "row-0"}, "duplicate_custom_id", "custom_id", "stands in line 1 already"),
    ({"custom_id": ""}, "missing_required_parameter", "custom_id", "want a text of 1 to 512"),
    ({"method": "GET"}, "invalid_method", "method", "got 'GET', want 'POST'"),
    ({"url": "/v1/embeddings"}, "invalid_url", "url", "want '/v1/chat/completions'"),
    ({"body": 5}, "invalid_request", "body", "got '5', want the JSON object"),
    ({"body": {"model": "m"}}, "mismatched_model", "body.model", "the model of the first line"),
    ({"body": {}}, "missing_required_parameter", "body.model", "want a name"),
    ({"stream": True}, "unknown_parameter", "stream", "there is no such key"),
]


@pytest.mark.parametrize(("change", "code", "param", "told"), BAD)
def test_a_mistake_in_a_line_fails_the_batch_with_its_line(
    world: World, change: dict[str, Any], code: str, param: str | None, told: str
) -> None:
    _, standin, client, model = world
    rows = [line(0, model, "never"), {**line(1, model, "never"), **change}]
    end = until_end(client, created(client, rows).id)
    assert end.status == "failed"
    (error,) = end.errors.data
    assert (error.line, error.code, error.param) == (2, code, param)
    assert told in error.message
    assert "never" not in standin.asked()


def test_a_file_without_sense_or_with_too_many_lines_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, _, client, model = world
    limits = running.keeper.config.model_copy(update={"batch_lines": 2, "max_body": 3000})
    monkeypatch.setattr(running.keeper, "config", limits)
    many = until_end(client, created(client, [line(n, model, "x") for n in range(3)]).id)
    assert [one.code for one in many.errors.data] == ["too_many_tasks"]
    long = until_end(client, created(client, [line(0, model, "x" * 4000), {"a": 1}]).id)
    assert [one.code for one in long.errors.data][:2] == ["line_too_long", "unknown_parameter"]
    unknown = until_end(client, created(client, [line(0, "ft:none", "x")]).id)
    assert [one.code for one in unknown.errors.data] == ["model_not_found"]


def test_a_byte_order_mark_and_the_line_ends_of_windows_are_read(world: World) -> None:
    _, standin, client, model = world
    content = jsonl([line(number, model, f"j{number}") for number in range(2)])
    content = b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n")
    end = until_end(client, created_of(client, content).id)
    assert (end.status, end.request_counts.completed, end.errors) == ("completed", 2, None)
    assert {"j0", "j1"} < {*standin.asked()}


def test_a_line_that_is_short_enough_is_no_longer_when_it_is_asked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, _, client, model = world
    limits = running.keeper.config.model_copy(update={"max_body": 3000})
    monkeypatch.setattr(running.keeper, "config", limits)
    row = json.dumps(
        line(0, model, "é" * 1200), ensure_ascii=False
    )  # \\u00e9 has three times as many
    end = until_end(client, created_of(client, row.encode()).id)
    assert (end.request_counts.completed, end.request_counts.failed) == (1, 0)


def test_what_stands_for_stream_is_told_as_it_is(world: World) -> None:
    _, _, client, model = world
    row = line(0, model, "x")
    row["body"]["stream"] = "yes"
    (error,) = until_end(client, created(client, [row]).id).errors.data
    says("line_streamed", error.message, value="yes")


def test_a_batch_that_cannot_be_read_is_listed_with_its_reason_and_stops_no_other(
    world: World,
) -> None:
    running, _, client, model = world
    folder = running.keeper.folder.batches
    ids = {part: f"batch_{letter * 24}" for part, letter in (("batch", "a"), ("end", "b"))}
    first = created(client, [line(0, model, "k")])
    until_end(client, first.id)
    for part, name in ids.items():
        (folder / name).mkdir()
        request = json.loads((folder / first.id / "batch.json").read_text())
        (folder / name / "batch.json").write_text(json.dumps({**request, "id": name}))
        (folder / name / f"{part}.json").write_text("{")
    until_end(client, created(client, [line(1, model, "k")]).id)
    listed = {one.id: one for one in client.batches.list()}
    for part, name in ids.items():
        one = client.batches.retrieve(name)
        assert one == listed[name]
        assert one.status == "failed"
        (error,) = one.errors.data
        assert (error.code, error.line) == ("cannot_run", None)
        says("not_json", error.message, file=f"_service/batches/{name}/{part}.json")
    copied = f"batch_{'c' * 24}"
    shutil.copytree(folder / first.id, folder / copied)
    (error,) = client.batches.retrieve(copied).errors.data
    says("batch_of_another_folder", error.message, name=first.id)
    names = {*ids.values(), copied}
    wait_until(lambda: {*running.keeper.unreadable.reasons}, lambda told: told == names)
    for name in names:
        shutil.rmtree(folder / name)
    wait_until(lambda: running.keeper.unreadable.reasons, lambda told: not told)


def test_a_batch_that_can_never_go_on_fails_and_keeps_its_answers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, standin, client, model = world
    monkeypatch.setattr(batch_runner, "AGAIN_S", 0.2)
    with standin.slowed():
        rows = [line(number, model, f"l{number}") for number in range(400)]
        batch = created(client, rows)
        folder = BatchFolder(running.keeper.folder.batches / batch.id)
        wait_until(lambda: folder.output.exists(), bool)
        (folder.path / "progress.json").unlink(missing_ok=True)
        (folder.path / "progress.json").mkdir()
        end = until_end(client, batch.id)
    assert (end.status, [one.code for one in end.errors.data]) == ("failed", ["cannot_run"])
    assert len(lines_of(client, end.output_file_id)) == end.request_counts.completed > 0


def test_batches_go_on_after_a_look_that_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, _, client, model = world
    with monkeypatch.context() as patch:

        def refuse(folders: BatchFolders) -> Any:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        patch.setattr(BatchFolders, "open", refuse)
        part = batch_runner.THE_BATCHES
        wait_until(lambda: running.keeper.reader.failing.reasons, lambda told: part in told)
    assert until_end(client, created(client, [line(0, model, "m")]).id).status == "completed"


def test_of_two_servers_with_the_same_key_one_makes_the_batch(tmp_path: Path) -> None:
    service = ServiceFolder(BaseFolder(tmp_path))
    service.make()
    batches, contents = BatchFolders(service), [tmp_path / "one", tmp_path / "two"]
    made = []
    for content in contents:
        content.write_text(content.name)
        at = "2026-01-01T00:00:00.000+00:00"
        batch = Batch(
            id=f"batch_{'0' * 24}",
            created_at=at,
            expires_at=at,
            owner="anna",
            role="run",
            endpoint="/v1/embeddings",
            completion_window="24h",
            input_file_id=f"file-{content.name}",
        )
        made.append(batches.create(batch, content))
    assert made == [True, False]
    state = batches.state(f"batch_{'0' * 24}")
    assert state is not None
    assert state.batch.input_file_id == "file-one"
    assert BatchFolder(service.batches / state.batch.id).input.read_text() == "one"
    with pytest.raises(StorageError):
        batches.create(state.batch.model_copy(update={"id": f"batch_{'1' * 24}"}), tmp_path / "no")
    assert os.listdir(service.batches) == [state.batch.id]


def test_what_a_killed_server_left_of_a_batch_is_removed(tmp_path: Path) -> None:
    service = ServiceFolder(BaseFolder(tmp_path))
    service.make()
    torn, held, young = (service.batches / f".batch_{name}.tmp" for name in "abc")
    for path in (torn, held, young):
        path.mkdir()
        (path / "lock").touch()
    for path in (torn, held):
        os.utime(path, (0, 0))
    with alone(held / "lock") as is_ours:
        assert is_ours
        service.make()
    assert sorted(path.name for path in service.batches.iterdir()) == [held.name, young.name]


def test_a_file_of_another_purpose_makes_no_batch(world: World) -> None:
    _, _, client, model = world
    rows = jsonl([line(0, model, "x")])
    file = client.files.create(file=("batch.jsonl", rows), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
    says("batch_purpose", caught.value, file=file.id, purpose="fine-tune")
    batch_file = client.files.create(file=("batch.jsonl", rows), purpose="batch")
    with pytest.raises(openai.BadRequestError) as other:
        client.fine_tuning.jobs.create(model="tiny-chat", training_file=batch_file.id)
    says("upload_purpose", other.value, key="training_file", purpose="batch")


def test_the_same_key_is_the_same_batch(world: World) -> None:
    _, _, client, model = world
    key = {"extra_headers": {"Idempotency-Key": "monday"}}
    file = client.files.create(file=("b.jsonl", jsonl([line(0, model, "i")])), purpose="batch")
    options: Any = {"input_file_id": file.id, "completion_window": "24h", **key}
    ids = {client.batches.create(endpoint="/v1/chat/completions", **options).id for _ in range(3)}
    assert len(ids) == 1
    with pytest.raises(openai.ConflictError) as caught:
        client.batches.create(endpoint="/v1/completions", **options)
    says("job_of_another_request", caught.value)
    until_end(client, ids.pop())


def test_a_cancelled_batch_keeps_what_was_answered(world: World) -> None:
    _, _, client, model = world
    rows = [line(number, model, f"d{number}") for number in range(16)]
    rows += [line(99, model, "wait")]
    batch = created(client, rows)
    wait_until(
        lambda: client.batches.retrieve(batch.id),
        lambda one: one.request_counts is not None and one.request_counts.completed >= 1,
        within_s=60,
    )
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    end = until_end(client, batch.id)
    assert end.status == "cancelled"
    ids = [one["custom_id"] for one in lines_of(client, end.output_file_id)]
    assert len(ids) == end.request_counts.completed == len({*ids})
    assert "row-99" not in ids
    assert end.cancelling_at is not None
    assert client.batches.retrieve(batch.id) == end  # also when it is not read anew


def test_a_request_that_ends_the_models_process_spoils_no_other(world: World) -> None:
    _, _, client, model = world
    rows = [line(number, model, f"e{number}") for number in range(6)]
    rows[3] = line(3, model, "die")
    end = until_end(client, created(client, rows).id)
    counts = end.request_counts
    assert (end.status, counts.completed, counts.failed) == ("completed", 5, 1)
    (error,) = lines_of(client, end.error_file_id)
    assert error["custom_id"] == "row-3"
    says("worker_ended", error["response"]["body"]["error"]["message"])


def test_a_server_that_goes_on_asks_no_answered_request_again(
    tmp_path: Path, stub: Stub, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin = stand_in(tmp_path / "standin", monkeypatch)
    rows = 40
    with serving(tmp_path / "base", python=stub.python) as running:
        client, model = running.client(), tuned_model(running)
        asked = [line(number, model, f"f{number}") for number in range(rows)]
        batch = created(client, [*asked, line(rows, model, "wait")])
        folder = BatchFolder(tmp_path / "base/_service/batches" / batch.id)
        wait_until(lambda: folder.output.exists(), bool)
        client.files.delete(batch.input_file_id)
    before = ids_of_lines(folder.output)
    assert 0 < len(before) <= rows
    with folder.output.open("ab") as file:  # what a kill in the middle of a line leaves
        file.write(b'{"custom_id": "row-39", "resp')
    standin.go()
    with serving(tmp_path / "base", python=stub.python) as running:
        client = running.client()
        end = until_end(client, batch.id)
        ids = [one["custom_id"] for one in lines_of(client, end.output_file_id)]
    assert end.status == "completed"
    assert sorted(ids) == sorted(f"row-{number}" for number in range(rows + 1))
    assert ids[: len(before)] == before
    assert not folder.output.exists()
    texts = standin.asked()
    for name in before:
        assert texts.count(f"f{name.removeprefix('row-')}") == 1


def test_an_expired_batch_says_so_for_each_request_without_an_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, client, model = world
    rows = [line(number, model, "g") for number in range(TOGETHER)]
    with monkeypatch.context() as patch:
        patch.setattr(batch_routes, "WINDOW", timedelta(seconds=2))
        batch = created(client, [*rows, line(TOGETHER, model, "wait")])
    end = until_end(client, batch.id)
    assert (end.status, end.request_counts.completed) == ("expired", TOGETHER)
    (error,) = lines_of(client, end.error_file_id)
    assert (error["custom_id"], error["error"]["code"]) == (f"row-{TOGETHER}", "batch_expired")
    assert end.request_counts.failed == 1
    assert end.expired_at >= end.expires_at


def test_a_batch_takes_no_worker_and_no_share_of_people(world: World) -> None:
    running, standin, client, model = world
    batch = created(client, [line(number, model, f"h{number}") for number in range(4)])
    until_end(client, batch.id)
    loaded = running.app.app.state.workers._loaded
    assert not loaded
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "person"}]
    )
    assert answer.choices[0].message.content == "you said person"
    assert len(loaded) == 1
    assert standin.asked()[-1] == "person"


def test_texts_are_embedded_and_continued_by_batches_too(world: World) -> None:
    _, _, client, model = world
    url: Any
    for url, key in (("/v1/embeddings", "input"), ("/v1/completions", "prompt")):
        row = line(0, model, "", url=url, body={"model": model, key: "i"})
        end = until_end(client, created(client, [row], endpoint=url).id)
        (answer,) = lines_of(client, end.output_file_id)
        body = answer["response"]["body"]
        if key == "input":
            assert body["data"][0]["embedding"] == [1.0, 2.0]
        else:
            assert body["choices"][0]["text"] == "you said i"


def test_a_service_without_workers_for_batches_refuses_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, _, client, model = world
    limits = running.keeper.config.model_copy(update={"batch_models": 0})
    monkeypatch.setattr(running.keeper, "config", limits)
    with pytest.raises(openai.BadRequestError) as caught:
        created(client, [line(0, model, "x")])
    says("batches_unserved", caught.value)


def test_a_batch_of_before_is_cancelled_by_a_service_that_answers_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, standin, client, model = world
    monkeypatch.setattr(batch_runner, "AGAIN_S", 0.2)
    with standin.slowed():
        batch = created(client, [line(number, model, "n") for number in range(400)])
        limits = running.keeper.config.model_copy(update={"batch_models": 0})
        monkeypatch.setattr(running.keeper, "config", limits)
        client.batches.cancel(batch.id)
        assert until_end(client, batch.id).status == "cancelled"


def test_owners_take_turns_and_the_one_who_waited_longest_is_next(tmp_path: Path) -> None:
    runner = batch_runner.BatchRunner(None, BatchFolders(None), None)  # type: ignore[arg-type]

    def batch(owner: str, number: int) -> tuple[Batch, BatchFolder]:
        at = f"2026-01-01T00:00:{number:02}.000+00:00"
        one = Batch(
            id=f"batch_{owner}{number}",
            created_at=at,
            expires_at=at,
            owner=owner,
            role="run",
            endpoint="/v1/embeddings",
            completion_window="24h",
            input_file_id="file-1",
        )
        return one, BatchFolder(tmp_path)

    waiting = [batch("anna", 1), batch("anna", 2), batch("anna", 3), batch("ben", 4)]
    order: list[str] = []
    for number in range(6):
        one = runner._next(waiting)
        assert one is not None
        order.append(one[0].id.removeprefix("batch_"))
        runner._turns[one[0].owner] = number + 1
        runner._last[one[0].id] = number + 1.0
    assert order == ["anna1", "ben4", "anna2", "ben4", "anna3", "ben4"]


def test_a_line_that_the_disk_refuses_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, longer = tmp_path / "output.jsonl", "x" * 5000
    append(path, {"custom_id": "a"})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # Python ignores its signal
    try:
        with pytest.raises(StorageError):
            append(path, {"custom_id": longer})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    append(path, {"custom_id": "b"})
    assert path.read_text() == '{"custom_id": "a"}\n{"custom_id": "b"}\n'


def test_a_line_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "output.jsonl"
    append(path, {"custom_id": "a"})
    with path.open("ab") as file:
        file.write(b'{"custom_id": "b"}')  # its end is missing: it may have been cut off
    assert ids_of_lines(path) == ["a"]
    append(path, {"custom_id": "b"})
    assert ids_of_lines(path) == ["a", "b"]
