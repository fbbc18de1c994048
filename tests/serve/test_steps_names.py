"""Saved weights whose name is used twice: nothing is deleted, loaded or sampled from in the place of
the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.serve.access import add_token
from jobs.serve.steps.catalogue import checkpoints
from jobs.serve.steps.names import MOST_CLIENTS
from jobs.serve.steps.upkeep.expiry import sweep
from tests.serve.conftest import Service
from tests.serve.driving import Driver, driver
from tests.serve.unworked import folder_of, new_run, unworked, work
from tests.wording import says
from trainer.operations.operation_log import FOLDER, OperationReader
from trainer.operations.results import ResultWriter

HOUR = 3600
LONG_AGO = '{"expires_at": "2020-01-01T00:00:00+00:00"}'


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with unworked(tmp_path_factory.mktemp("names") / "base") as running:
        yield running


def new(service: Service) -> tuple[Driver, str]:
    client = driver(service)
    return client, new_run(client, client.session())


def save(client: Driver, model: str, seq: int, way: str = "save_weights", **more: Any) -> None:
    answer = client.post(way, {"model_id": model, "path": "a", "seq_id": seq, **more})
    assert answer.status_code == 200, answer.text


def expire(service: Service, model: str, seq: int) -> None:
    """Let the time of what an operation saves be over."""
    session, _, number = model.split(":")
    folder = service.base / "_service/steps" / session
    (folder / f"saved-{number}-{seq}-ttl.json").write_text(LONG_AGO)
    sweep(service.app.app.state.steps)


def listed(client: Driver, model: str) -> list[str]:
    every = client.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]
    return [one["checkpoint_id"] for one in every]


def fail(service: Service, model: str) -> None:
    """Let every operation that waits fail: the disk is full."""
    run = folder_of(service, model)
    source, results = OperationReader(run / FOLDER), ResultWriter(run / FOLDER)
    while (one := source.next()) is not None:
        if one.seq > results.last_seq:
            results.append(one.seq, {"error": "no space", "category": "server"})
    results.close()


@pytest.mark.parametrize("fate", ["waits", "failed"])
def test_an_hour_that_is_over_deletes_nothing_that_was_saved_before_by_the_same_name(
    service: Service, fate: str
) -> None:
    client, model = new(service)
    save(client, model, 1)
    work(service, model)
    save(client, model, 2, overwrite=True, ttl_seconds=HOUR)
    if fate == "failed":
        fail(service, model)
    expire(service, model, 2)
    assert listed(client, model) == ["weights/a"]
    assert (folder_of(service, model) / "saved/a/weights.bin").exists()
    if fate == "waits":
        work(service, model)
        sweep(service.app.app.state.steps)
        assert listed(client, model) == []
        assert not (folder_of(service, model) / "saved/a").exists()


def test_a_name_whose_hour_is_over_is_free_at_once(service: Service) -> None:
    client, model = new(service)
    save(client, model, 1, ttl_seconds=HOUR)
    work(service, model)
    session, _, number = model.split(":")
    folder = service.base / "_service/steps" / session
    (folder / f"saved-{number}-1-ttl.json").write_text(LONG_AGO)
    save(client, model, 2)  # before the next sweep
    assert not (folder_of(service, model) / "saved/a").exists()  # or its worker would refuse it
    work(service, model)
    assert listed(client, model) == ["weights/a"]


def test_weights_expire_though_saving_them_again_has_failed(service: Service) -> None:
    client, model = new(service)
    save(client, model, 1, ttl_seconds=HOUR)
    work(service, model)
    save(client, model, 2, overwrite=True)
    fail(service, model)
    expire(service, model, 1)
    assert listed(client, model) == []
    assert not (folder_of(service, model) / "saved/a").exists()


def test_a_state_that_is_being_saved_again_is_deleted_when_that_is_done(service: Service) -> None:
    client, model = new(service)
    save(client, model, 1)
    work(service, model)
    save(client, model, 2, overwrite=True)
    url = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
    early = client.http.delete(url)
    assert early.status_code == 409
    assert early.headers["x-should-retry"] == "true"
    says("steps_saved_again", early.text, kind="weights", name="a")
    assert listed(client, model) == ["weights/a"]
    work(service, model)
    assert client.http.delete(url).status_code == 204
    assert listed(client, model) == []


def test_a_sampler_never_samples_from_other_weights_of_the_same_name(service: Service) -> None:
    client, model = new(service)
    session = model.partition(":")[0]
    sampler = {"session_id": session, "model_path": f"tinker://{model}/sampler_weights/a"}
    save(client, model, 1, "save_weights_for_sampler")
    work(service, model)
    first = client.post("create_sampling_session", {**sampler, "sampling_session_seq_id": 0})
    url = f"/api/v1/training_runs/{model}/checkpoints/sampler_weights/a"
    assert client.http.delete(url).status_code == 204
    save(client, model, 2, "save_weights_for_sampler")
    work(service, model)
    second = client.post("create_sampling_session", {**sampler, "sampling_session_seq_id": 1})
    assert second.status_code == 200, second.text
    samplers = service.app.app.state.steps.sessions.samplers(session)
    folders = [str(one.folder) for one in samplers]
    there = [(folder_of(service, model) / folder).is_dir() for folder in folders]
    assert there == [False, True]
    name = first.json()["sampling_session_id"]
    chunk = {"type": "encoded_text", "tokens": [1, 2]}
    ask = {"sampling_session_id": name, "prompt": {"chunks": [chunk]}, "seq_id": 1}
    answer = client.result(client.post("asample", {**ask, "sampling_params": {"max_tokens": 2}}))
    assert answer["category"] == "user"
    says("steps_weights_deleted", answer["error"], sampler=name)


def test_a_token_that_only_reads_opens_no_weights_to_another_one(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    roles = {"anna": "run", "ben": "run", "rita": "read", "root": "admin"}
    tokens = {name: add_token(path, name, role, {}) for name, role in roles.items()}
    with unworked(tmp_path / "base", tokens=path) as running:
        anna, ben = (driver(running, tokens[name]) for name in ("anna", "ben"))
        model, own = new_run(anna, anna.session()), new_run(ben, ben.session())
        save(anna, model, 1)
        work(running, model)
        source = f"tinker://{model}/weights/a"
        load = {"session_id": own.partition(":")[0], "path": source, "optimizer": True}
        for number, (name, code) in enumerate(
            [("rita", 404), ("ben", 404), ("anna", 200), ("root", 200)], start=1
        ):
            access = {"weights_access_token": tokens[name]}
            answer = ben.post("load_weights", {**load, "model_seq_id": number, **access})
            assert answer.status_code == code, (name, answer.text)
            answer = ben.post("copy_weights", {"source_path": source, **access})
            assert answer.status_code == code, (name, answer.text)
        access = {"weights_access_token": "lathe-nobody"}
        answer = ben.post("copy_weights", {"source_path": source, **access})
        assert answer.status_code == 403
        says("steps_token_unknown", answer.text)


def test_a_copy_has_a_number_that_its_path_can_name(service: Service) -> None:
    client, model = new(service)
    save(client, model, 1)
    work(service, model)
    copy = {"session_id": model.partition(":")[0], "source_path": f"tinker://{model}/weights/a"}
    late = client.post("copy_weights", {**copy, "model_seq_id": MOST_CLIENTS})
    assert late.status_code == 400
    says("steps_copy_number", late.text, number=MOST_CLIENTS, most=MOST_CLIENTS)
    copied = client.post("copy_weights", {**copy, "model_seq_id": MOST_CLIENTS - 1}).json()
    info = client.post("weights_info", {"tinker_path": copied["tinker_path"]})
    assert info.status_code == 200, info.text


def test_a_file_that_vanishes_while_weights_are_measured_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").write_bytes(b"1234")
    walk = [(str(tmp_path), [], ["there", "gone"])]
    monkeypatch.setattr(checkpoints.os, "walk", lambda _: iter(walk))
    assert checkpoints.size_of(tmp_path) == 4


def test_a_step_has_one_set_of_numbers_and_no_word_counts_as_one(service: Service) -> None:
    client, model = new(service)
    numbers = {"learning_rate": 0.1}
    for seq, body in enumerate(
        [{"adam_params": numbers, "optim_params": numbers}, {"adam_params": {"eps": True}}], 1
    ):
        step = client.post("optim_step", {"model_id": model, "seq_id": seq, **body})
        assert step.status_code == 200, step.text
    work(service, model)
    errors = [client.result(f"{model}:{seq}")["error"] for seq in (1, 2)]
    says("steps_two_params", errors[0])
    assert errors[1].startswith("adam_params.eps: got 'True'")
