"""OpenAI's own client, with its strict types, against the service: jobs, files, events, models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import ValidationError

from jobs.serve.requests import CreateJob
from tests.serve.answering import tuned_model
from tests.serve.conftest import (
    CHAT,
    TRIPLES,
    Service,
    Stub,
    jsonl,
    offered,
    own_queue,
    serving,
    until_status,
    wait_until,
)
from tests.wording import Fault, fault, says

# One job that has ended, which most tests look at; those that change something make their own.


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Stub, OpenAI, Any]]:
    folder = tmp_path_factory.mktemp("service")
    stub = Stub(folder / "stub")
    with own_queue(folder / "queue"), serving(folder / "base", python=stub.python) as running:
        client = running.client()
        file = client.files.create(file=("chat.jsonl", jsonl(CHAT)), purpose="fine-tune")
        job = client.fine_tuning.jobs.create(
            model="tiny-chat",
            training_file=file.id,
            suffix="first",
            seed=7,
            metadata={"team": "lathe", "run": "1"},
            method={
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}},
            },
        )
        until_status(client, job.id, "succeeded")
        yield running, stub, client, job


def uploaded(client: OpenAI, rows: list[dict[str, Any]] = CHAT) -> str:
    return client.files.create(file=("rows.jsonl", jsonl(rows)), purpose="fine-tune").id


def test_a_finished_job_names_its_model_its_numbers_and_its_result_file(world: Any) -> None:
    _, _, client, made = world
    job = client.fine_tuning.jobs.retrieve(made.id)
    assert made.status in ("validating_files", "queued")
    assert job.status == "succeeded"
    assert job.fine_tuned_model == f"ft:tiny-chat:lathe:first:{job.id.removeprefix('ftjob-')[:12]}"
    assert (job.seed, job.model, job.metadata) == (7, "tiny-chat", {"team": "lathe", "run": "1"})
    used = job.method.supervised.hyperparameters
    # 9 of 10 rows, 8 at a time, twice
    assert (used.n_epochs, used.batch_size, used.learning_rate_multiplier) == (2, 8, 1.0)
    assert job.lathe["total"] == 3
    assert job.finished_at >= job.created_at
    assert job.trained_tokens == 30
    (results,) = job.result_files
    assert client.files.retrieve(results).purpose == "fine-tune-results"
    assert client.files.content(results).text.splitlines()[:2] == [
        "step,train_loss,valid_loss",
        "1,8.0,",
    ]


def test_events_tell_every_state_and_every_step_once_and_page_by_cursor(world: Any) -> None:
    _, _, client, job = world
    everything = list(client.fine_tuning.jobs.list_events(job.id, limit=2))  # pages of two
    assert len({event.id for event in everything}) == len(everything)
    texts = [event.message for event in reversed(everything)]
    assert texts == [
        f"Created fine-tuning job: {job.id}",
        f"Validating training file: {job.training_file}",
        "Files validated, moving job to queued state",
        "Fine-tuning job started",
        "Step 1/3: training loss=8.0000",
        "Step 2/3: training loss=4.0000",
        "Step 3/3: training loss=2.6667",
        f"New fine-tuned model created: {client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model}",
        "The job has successfully completed",
    ]
    metrics = [event for event in everything if event.type == "metrics"]
    assert metrics[0].data == {
        "step": 3,
        "total_steps": 3,
        "train_loss": 8 / 3,
        "loss": 8 / 3,
        "tokens": 30,
    }
    first = client.fine_tuning.jobs.list_events(job.id, limit=100)
    assert first.has_more is False
    with pytest.raises(openai.BadRequestError) as caught:
        client.fine_tuning.jobs.list_events(job.id, after="ftevent-none")
    says("event_unknown", caught.value)


def test_checkpoints_are_those_on_the_disk_with_their_losses(world: Any) -> None:
    _, _, client, job = world
    (found,) = client.fine_tuning.jobs.checkpoints.list(job.id)
    assert (found.step_number, found.metrics.train_loss) == (3, 8 / 3)
    assert found.fine_tuned_model_checkpoint.endswith(":ckpt-step-3")
    assert found.fine_tuning_job_id == job.id


def test_jobs_are_listed_newest_first_by_page_and_by_metadata(world: Any) -> None:
    _, _, client, first = world
    jobs = client.fine_tuning.jobs
    second = jobs.create(model="tiny-retriever", training_file=uploaded(client, TRIPLES))
    ids = [job.id for job in jobs.list(limit=1)]  # pages of one
    assert ids[:1] == [second.id]
    assert ids[-1] == first.id
    assert len(set(ids)) == len(ids)
    assert [job.id for job in jobs.list(metadata={"team": "lathe"})] == [first.id]
    assert not jobs.list(metadata={"team": "lathe", "run": "2"}).data
    assert first.id not in [job.id for job in jobs.list(extra_query={"metadata": "null"})]
    until_status(client, second.id, "succeeded")


def test_models_are_the_offered_ones_and_those_that_were_tuned(world: Any) -> None:
    _, _, client, job = world
    name = client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
    names = [model.id for model in client.models.list()]
    assert names[: len(offered())] == offered()
    assert name in names
    assert client.models.retrieve(name).owned_by == "local"
    assert client.models.retrieve("tiny-chat").owned_by == "system"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4o-mini")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.PermissionDeniedError):
        client.models.delete("tiny-chat")


def test_a_job_may_begin_with_the_model_of_an_earlier_one(world: Any) -> None:
    running, _, client, job = world
    first = client.fine_tuning.jobs.retrieve(job.id)
    lathe_json = running.base / first.lathe["exp_id"] / "final" / "lathe.json"
    lathe_json.write_text(json.dumps({"files": {"model.safetensors": "a" * 64}}))
    more = client.fine_tuning.jobs.create(
        model=first.fine_tuned_model, training_file=uploaded(client), suffix="second"
    )
    assert more.model == first.fine_tuned_model
    done = until_status(client, more.id, "succeeded")
    digits = more.id.removeprefix("ftjob-")[:12]
    assert done["fine_tuned_model"] == f"ft:tiny-chat:lathe:second:{digits}"
    values = json.loads((running.base / done["lathe"]["exp_id"] / "exp_dict.json").read_text())
    before = json.loads((running.base / first.lathe["exp_id"] / "exp_dict.json").read_text())
    assert values["base"] == {"experiment": before, "sha256": "a" * 64}


def test_a_job_begins_with_no_model_of_another_token(
    tmp_path: Path, stub: Stub, queue: Path, token_file: tuple[Path, dict[str, str]]
) -> None:
    path, tokens = token_file
    with serving(tmp_path / "base", python=stub.python, tokens=path) as running:
        anna, ben = (running.client(tokens[name]) for name in ("anna", "ben"))
        job = anna.fine_tuning.jobs.create(model="tiny-chat", training_file=uploaded(anna))
        name = until_status(anna, job.id, "succeeded")["fine_tuned_model"]
        with pytest.raises(openai.NotFoundError) as caught:
            ben.fine_tuning.jobs.create(model=name, training_file=uploaded(ben))
        assert caught.value.code == "model_not_found"
        assert anna.fine_tuning.jobs.create(model=name, training_file=uploaded(anna)).id


def test_a_deleted_model_is_moved_aside_and_its_job_stays(world: Any) -> None:
    running, _, client, _ = world
    job = client.fine_tuning.jobs.create(model="tiny-chat", training_file=uploaded(client))
    done = until_status(client, job.id, "succeeded")
    assert client.models.delete(done["fine_tuned_model"]).deleted
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(done["fine_tuned_model"])
    run = running.base / done["lathe"]["exp_id"]
    assert not (run / "final").exists()
    assert len(list((running.base / "deleted").glob(f"{run.name}-*-model/final/config.json"))) == 1
    assert client.fine_tuning.jobs.retrieve(job.id).status == "succeeded"


def test_a_model_with_which_a_job_begins_is_not_deleted_before_that_has_ended(
    service: Service, stub: Stub
) -> None:
    client, model = service.client(), tuned_model(service)
    stub.says("slow")
    file = client.files.create(file=("chat.jsonl", jsonl(CHAT)), purpose="fine-tune")
    later = client.fine_tuning.jobs.create(model=model, training_file=file.id)
    with pytest.raises(openai.ConflictError) as caught:
        client.models.delete(model)
    says("model_in_use", caught.value, model=model, jobs=later.id)
    client.fine_tuning.jobs.cancel(later.id)
    assert client.models.delete(model).deleted


def test_files_come_back_byte_for_byte_and_can_be_deleted(world: Any) -> None:
    running, _, client, _ = world
    content = jsonl(CHAT) * 3000  # more than one block of the upload
    file = client.files.create(file=("so/../many.jsonl", content), purpose="fine-tune")
    assert (file.filename, file.bytes, file.status) == (
        "so/../many.jsonl",
        len(content),
        "processed",
    )
    assert client.files.content(file.id).content == content
    assert client.files.retrieve(file.id) == file
    assert file.id in [one.id for one in client.files.list(limit=1)]
    oldest = client.files.list(order="asc", limit=1).data[0]
    assert oldest.filename == "chat.jsonl"
    assert not client.files.list(purpose="batch").data
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    left = sorted(path.name for path in (running.base / "_service/uploads").iterdir())
    assert all(name.startswith("file-") for name in left)


def test_the_first_twenty_mistakes_of_a_file_are_the_error_of_its_job(world: Any) -> None:
    running, stub, client, _ = world
    bad = [{"messages": [{"role": "robot", "content": 5}]}, {"prompt": "a"}, *CHAT, []] * 10
    lines = b"{not json\n" + jsonl(bad)  # type: ignore[arg-type]
    file = client.files.create(file=("bad.jsonl", lines), purpose="fine-tune")
    assert file.status == "error"
    before = len(stub.starts())
    job = client.fine_tuning.jobs.create(model="tiny-chat", training_file=file.id)
    job = until_status(client, job.id, "failed")
    assert (job["error"]["code"], job["error"]["param"]) == (
        "invalid_training_file",
        "training_file",
    )
    told = job["error"]["message"].splitlines()
    # the first line, then three of the first row, one of the row without a kind, one of the list
    assert told[0].endswith(f"{1 + 10 * 5} mistake(s)")
    assert told[1].startswith("  line 1: got malformed JSON")
    assert told[2] == (
        "  line 2: got messages[0].role='robot', "
        "want system, user, assistant or tool. Did you mean 'bot'?"
    )
    assert told[3] == "  line 2: got messages[0].content=5, want text"
    assert told[4].startswith("  line 2: got no turn of the assistant counts")
    assert told[5] == "  line 3: got the keys prompt, want chat rows with messages"
    assert told[6].startswith("  line 14: got a JSON list")
    assert len(told) == 22
    assert told[-1] == "  and 31 more"
    assert len(stub.starts()) == before  # nothing was sent
    assert not (running.base / job["lathe"]["exp_id"]).exists()


def test_rows_of_another_kind_than_the_model_takes_fail_the_job(world: Any) -> None:
    _, _, client, _ = world
    job = client.fine_tuning.jobs.create(model="tiny-retriever", training_file=uploaded(client))
    job = until_status(client, job.id, "failed")
    assert (
        "got the keys messages, want triple rows with query, positive, negative"
        in (job["error"]["message"])
    )


REFUSED: list[tuple[dict[str, Any], type[openai.APIStatusError], Fault]] = [
    (
        {"model": "gpt-4o-mini"},
        openai.NotFoundError,
        fault("model_unknown", model="gpt-4o-mini", models="tiny-chat, tiny-retriever"),
    ),
    (
        {"training_file": "file-" + "0" * 24},
        openai.BadRequestError,
        fault("upload_unknown", key="training_file", file="file-" + "0" * 24),
    ),
    (
        {"training_file": "../../etc/passwd"},
        openai.BadRequestError,
        fault("upload_unknown", key="training_file", file="../../etc/passwd"),
    ),
    (
        {"validation_file": "file-x"},
        openai.BadRequestError,
        fault("upload_unknown", key="validation_file", file="file-x"),
    ),
    ({"seed": -1}, openai.BadRequestError, fault("request_value", key="seed", value="-1")),
    ({"suffix": "a b"}, openai.BadRequestError, fault("request_value", key="suffix", value="a b")),
    (
        {"hyperparameters": {"n_epochs": 0}},
        openai.BadRequestError,
        fault("request_value", key="hyperparameters.n_epochs", value="0"),
    ),
    (
        {"hyperparameters": {"batch_size": "big"}},
        openai.BadRequestError,
        fault("request_value", key="hyperparameters.batch_size", value="big"),
    ),
    (
        {"metadata": {"k": "v" * 513}},
        openai.BadRequestError,
        fault("request_value", key="metadata.k"),
    ),
    (
        {"method": {"type": "reinforcement", "reinforcement": {"grader": {}}}},
        openai.BadRequestError,
        fault("method_not_served", name="reinforcement"),
    ),
    (
        {"method": {"type": "dpo", "supervised": {}}},
        openai.BadRequestError,
        fault("method_block_twice", block="supervised", name="dpo"),
    ),
    (
        {"model": "tiny-retriever", "method": {"type": "dpo"}},
        openai.BadRequestError,
        fault("method_not_taken", model="tiny-retriever", name="dpo"),
    ),
    (
        {"integrations": [{"type": "wandb"}]},
        openai.BadRequestError,
        fault("request_value", key="integrations"),
    ),
    (
        {"extra_body": {"code": "import os"}},
        openai.BadRequestError,
        fault("request_key_unknown", key="code"),
    ),
]


@pytest.mark.parametrize(("changes", "error", "text"), REFUSED)
def test_a_bad_request_is_one_error_that_says_what_is_wanted(
    world: Any, changes: dict[str, Any], error: type[openai.APIStatusError], text: Fault
) -> None:
    running, _, client, job = world
    tickets = len(list((running.base / "_service/tickets").iterdir()))
    with pytest.raises(error) as caught:
        client.fine_tuning.jobs.create(
            **{"model": "tiny-chat", "training_file": job.training_file, **changes}
        )
    says(text, caught.value)
    assert set(caught.value.body) == {"message", "type", "param", "code"}  # type: ignore[call-overload]
    assert len(list((running.base / "_service/tickets").iterdir())) == tickets


def test_a_number_that_stands_twice_is_no_silent_choice(world: Any) -> None:
    body = {"model": "tiny-chat", "training_file": "file-x"}
    inside = {"type": "supervised", "supervised": {"hyperparameters": {"batch_size": 2}}}
    same, other = {"batch_size": 2, "n_epochs": "auto"}, {"n_epochs": 3}
    CreateJob.model_validate({**body, "hyperparameters": same, "method": inside})
    with pytest.raises(ValidationError) as caught:
        CreateJob.model_validate({**body, "hyperparameters": other, "method": inside})
    says("two_values", str(caught.value), name="n_epochs", beside="3", inside="None")


def test_the_asynchronous_client_gets_the_same(world: Any) -> None:
    running, _, client, job = world

    async def look() -> tuple[Any, ...]:
        async with AsyncOpenAI(
            base_url=f"{running.url}/v1", api_key="x", _strict_response_validation=True
        ) as there:
            file = await there.files.create(file=("a.jsonl", jsonl(CHAT)), purpose="fine-tune")
            made = await there.fine_tuning.jobs.create(model="tiny-chat", training_file=file.id)
            cancelled = await there.fine_tuning.jobs.cancel(made.id)
            events = [one.id async for one in there.fine_tuning.jobs.list_events(job.id, limit=3)]
            found = await there.fine_tuning.jobs.retrieve(job.id)
            points = [one async for one in there.fine_tuning.jobs.checkpoints.list(job.id)]
            models = [one.id async for one in there.models.list()]
            gone = await there.files.delete(file.id)
            return cancelled.status, events, found, points, models, gone.deleted

    status, events, found, points, models, is_gone = asyncio.run(look())
    assert status == "cancelled"
    assert events == [event.id for event in client.fine_tuning.jobs.list_events(job.id)]
    assert found == client.fine_tuning.jobs.retrieve(job.id)
    assert points == list(client.fine_tuning.jobs.checkpoints.list(job.id))
    assert models == [one.id for one in client.models.list()]
    assert is_gone


def test_the_same_idempotency_key_never_makes_two_jobs(service: Service, stub: Stub) -> None:
    client = service.client()
    file = uploaded(client)

    def create(key: str, **changes: Any) -> Any:
        return client.fine_tuning.jobs.create(
            model="tiny-chat",
            training_file=file,
            extra_headers={"Idempotency-Key": key},
            **changes,
        )

    first = create("once")
    assert create("once").id == first.id
    assert create("twice").id != first.id
    until_status(client, first.id, "succeeded")
    assert create("once").id == first.id
    with pytest.raises(openai.ConflictError) as caught:
        create("once", seed=5)
    says("job_of_another_request", caught.value)
    assert caught.value.response.headers["x-should-retry"] == "false"
    wait_until(lambda: {job.status for job in client.fine_tuning.jobs.list()}, {"succeeded"}.__eq__)
    assert len(stub.starts()) == 2


def test_pause_saves_and_stops_and_resume_goes_on_where_it_was(
    service: Service, stub: Stub
) -> None:
    client = service.client()
    jobs = client.fine_tuning.jobs
    stub.says("slow")
    job = jobs.create(
        model="tiny-chat", training_file=uploaded(client), hyperparameters={"n_epochs": 4}
    )
    wait_until(lambda: jobs.retrieve(job.id).lathe["step"], lambda step: step == 2)
    with pytest.raises(openai.BadRequestError) as caught:
        jobs.resume(job.id)
    says("job_not_paused", caught.value)
    assert jobs.pause(job.id).lathe["is_paused"]
    assert jobs.pause(job.id).lathe["is_paused"]  # asked twice, done once
    paused = until_status(client, job.id, "queued")
    assert (paused["lathe"]["state"], paused["lathe"]["step"]) == ("paused", 2)
    stub.says("ok")
    jobs.resume(job.id)
    done = until_status(client, job.id, "succeeded")
    assert (done["lathe"]["attempts"], done["lathe"]["step"]) == (2, 5)
    texts = [event.message for event in jobs.list_events(job.id)][::-1]
    assert [text for text in texts if not text.startswith(("Step", "New"))] == [
        f"Created fine-tuning job: {job.id}",
        f"Validating training file: {job.training_file}",
        "Files validated, moving job to queued state",
        "Fine-tuning job started",
        "Pause requested",
        "The training saved and stopped",
        "Resumption requested",
        "Fine-tuning job resumed",
        "The job has successfully completed",
    ]
    steps = [text.split("/")[0] for text in texts if text.startswith("Step")]
    assert steps == [f"Step {number}" for number in range(1, 6)]
    with pytest.raises(openai.BadRequestError) as caught:
        jobs.cancel(job.id)
    says("job_over", caught.value, state="succeeded")


def test_cancel_ends_a_training_and_stays_cancelled(service: Service, stub: Stub) -> None:
    client = service.client()
    jobs = client.fine_tuning.jobs
    stub.says("slow")
    job = jobs.create(model="tiny-chat", training_file=uploaded(client))
    wait_until(stub.starts, bool)
    assert jobs.cancel(job.id).status == "cancelled"
    wait_until(lambda: jobs.retrieve(job.id).lathe["state"], "cancelled".__eq__)
    found = jobs.retrieve(job.id)
    assert (found.status, found.fine_tuned_model, found.result_files) == ("cancelled", None, [])
    assert found.finished_at is not None
    assert stub.starts() == [found.lathe["exp_id"]]


def test_a_training_that_fails_fails_its_job_with_its_reason(service: Service, stub: Stub) -> None:
    client = service.client()
    stub.says("7")
    job = client.fine_tuning.jobs.create(model="tiny-chat", training_file=uploaded(client))
    failed = until_status(client, job.id, "failed")
    assert failed["error"]["code"] == "training_failed"
    assert "exit code 7" in failed["error"]["message"]


def test_a_preempted_job_is_queued_again_and_ends(service: Service, stub: Stub) -> None:
    client = service.client()
    stub.says("75")
    job = client.fine_tuning.jobs.create(model="tiny-chat", training_file=uploaded(client))
    wait_until(stub.starts, lambda starts: len(starts) >= 1)
    stub.says("ok")
    done = until_status(client, job.id, "succeeded")
    assert done["lathe"]["attempts"] >= 2


def test_the_index_can_be_deleted_while_the_server_runs(service: Service) -> None:
    client = service.client()
    job = client.fine_tuning.jobs.create(model="tiny-chat", training_file=uploaded(client))
    until_status(client, job.id, "succeeded")

    def events() -> list[str]:
        return [event.id for event in client.fine_tuning.jobs.list_events(job.id)]

    before = events()
    for path in service.keeper.folder.path.glob("index-*"):
        path.unlink()
    wait_until(lambda: [one.id for one in client.fine_tuning.jobs.list()], [job.id].__eq__)
    wait_until(events, before.__eq__)  # those of a run's lines follow within a turn
    assert [file.id for file in client.files.list()] == [job.training_file]


def test_another_server_over_the_same_folders_says_the_same(
    service: Service, stub: Stub, tmp_path: Path
) -> None:
    client = service.client()
    file = uploaded(client)
    with serving(service.base, python=stub.python) as other:
        there = other.client()
        keys = [str(number) for number in range(4)]
        made = [
            side.fine_tuning.jobs.create(
                model="tiny-chat", training_file=file, extra_headers={"Idempotency-Key": key}
            ).id
            for key in keys
            for side in (client, there)
        ]
        assert made[::2] == made[1::2]
        for job_id in made[::2]:
            until_status(there, job_id, "succeeded")
            found = [one.model_dump() for one in client.fine_tuning.jobs.list_events(job_id)]
            again = [one.model_dump() for one in there.fine_tuning.jobs.list_events(job_id)]
            assert found == again
    assert len(stub.starts()) == 4
