"""Operations that are sent again when what they name is no longer as it was: each is the first one,
and has the first result.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.serve.access import add_token
from jobs.serve.offers import Offer
from jobs.serve.steps.experiments import Driven
from jobs.serve.steps.runs import DrivenRuns
from service import TINY_CHAT
from tests.serve.conftest import Service
from tests.serve.driving import ROWS, Driver, driver
from tests.serve.unworked import folder_of, new_run, unworked, work
from tests.wording import says
from trainer.operations.operation_log import FOLDER, OperationReader


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with unworked(tmp_path_factory.mktemp("again") / "base") as running:
        yield running


def kinds_of(service: Service, model: str) -> list[str]:
    source, kinds = OperationReader(folder_of(service, model) / FOLDER), list[str]()
    while (one := source.next()) is not None:
        kinds.append(one.kind)
    return kinds


def saved(client: Driver, service: Service, model: str, seq: int, **more: Any) -> None:
    """Save a state named "a", and let it be there."""
    body = {"model_id": model, "path": "a", "seq_id": seq, **more}
    answer = client.post("save_weights", body)
    assert answer.status_code == 200, answer.text
    work(service, model)


def deleted(client: Driver, model: str) -> None:
    assert client.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/a").is_success


@pytest.mark.parametrize("fate", ["overwritten", "deleted"])
def test_a_load_that_is_sent_again_is_the_first_one_whatever_became_of_its_state(
    service: Service, fate: str
) -> None:
    client = driver(service)
    model = new_run(client, client.session())
    saved(client, service, model, 1)
    path = f"tinker://{model}/weights/a"
    load = {"model_id": model, "seq_id": 2, "path": path, "optimizer": True}
    first = client.post("load_weights", load)
    work(service, model)
    if fate == "overwritten":
        saved(client, service, model, 3, overwrite=True)
    else:
        deleted(client, model)
    again = client.post("load_weights", load)
    assert again.status_code == 200, again.text
    assert client.result(again) == client.result(first)
    assert client.result(first)["type"] == "load_weights"
    for other in ({"optimizer": False}, {"path": f"tinker://{model}/weights/b"}):
        assert client.post("load_weights", {**load, **other}).status_code == 409


def test_a_run_that_begins_with_a_state_is_the_first_one_when_the_state_is_gone(
    service: Service,
) -> None:
    client = driver(service)
    session = client.session()
    model = new_run(client, session)
    saved(client, service, model, 1)
    path = f"tinker://{model}/weights/a"
    begin = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    first = client.post("load_weights", begin)
    deleted(client, model)
    assert client.post("load_weights", begin).json() == first.json()
    assert kinds_of(service, first.json()["model_id"]) == ["create", "load_state"]
    late = client.post("load_weights", {**begin, "model_seq_id": 2})
    assert late.status_code == 404


def test_a_sampler_and_a_copy_are_the_first_ones_when_their_weights_are_gone(
    service: Service,
) -> None:
    client = driver(service)
    session = client.session()
    model = new_run(client, session)
    client.post("save_weights_for_sampler", {"model_id": model, "path": "a", "seq_id": 1})
    work(service, model)
    path = f"tinker://{model}/sampler_weights/a"
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    copy, key = {"source_path": path}, {"x-idempotency-key": "one"}
    first = client.post("create_sampling_session", sampler)
    copied = client.post("copy_weights", copy, **key)
    url = f"/api/v1/training_runs/{model}/checkpoints/sampler_weights/a"
    assert client.http.delete(url).status_code == 204
    assert client.post("create_sampling_session", sampler).json() == first.json()
    assert client.post("copy_weights", copy, **key).json() == copied.json()
    late = {**sampler, "sampling_session_seq_id": 1}
    assert client.post("create_sampling_session", late).status_code == 404
    assert client.post("copy_weights", copy, **{"x-idempotency-key": "two"}).status_code == 404
    base = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny-chat"}
    assert client.post("create_sampling_session", base).status_code == 409


def test_the_number_of_a_sampler_of_saved_weights_begins_none_of_the_base(service: Service) -> None:
    client = driver(service)
    session = client.session()
    model = new_run(client, session)
    body = {"model_id": model, "sampling_session_seq_id": 3, "seq_id": 1}
    assert client.post("save_weights_for_sampler", body).status_code == 200
    base = {"session_id": session, "sampling_session_seq_id": 3, "base_model": "tiny-chat"}
    answer = client.post("create_sampling_session", base)
    assert answer.status_code == 409
    says("steps_sampler_made", answer.text, sampler=f"{session}:sample:3")


def test_what_was_refused_is_refused_again_though_its_reason_is_over(service: Service) -> None:
    client = driver(service)
    model = new_run(client, client.session())
    saved(client, service, model, 1)
    save = {"model_id": model, "path": "a", "seq_id": 2}
    absent = {"model_id": model, "seq_id": 3, "optimizer": True}
    absent["path"] = f"tinker://{model}/weights/b"
    requests = [("save_weights", save), ("load_weights", absent)]
    first = [client.post(*one).json() for one in requests]
    work(service, model)
    deleted(client, model)
    assert client.post("save_weights", {**save, "path": "b", "seq_id": 4}).status_code == 200
    work(service, model)
    assert [client.post(*one).json() for one in requests] == first
    assert kinds_of(service, model) == ["create", "save_state", "refused", "refused", "save_state"]
    for way, body, other in (
        ("save_weights", save, {"path": "c"}),
        ("load_weights", absent, {"optimizer": False}),
    ):
        conflict = client.post(way, {**body, **other})
        assert conflict.status_code == 409
        says("operation_conflict_http", conflict.text, run=model)


def test_rows_that_were_refused_are_refused_again_by_a_server_that_takes_longer_ones(
    tmp_path: Path,
) -> None:
    long = [([1] * 65, {"target_tokens": [2] * 65})]
    with unworked(tmp_path / "base") as running:
        client = driver(running)
        model = new_run(client, client.session())
        first = client.rows(model, 1, long).json()
    longer = Offer(experiment=TINY_CHAT, driven=Driven(max_tokens=100))
    with unworked(tmp_path / "base", models={"tiny-chat": longer}) as running:
        client = driver(running)
        assert client.rows(model, 1, long).json() == first
        assert client.rows(model, 1).status_code == 409
        assert client.rows(model, 2, long).status_code == 200
        assert kinds_of(running, model) == ["create", "refused", "forward_backward"]


def test_rows_that_come_twice_at_once_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokens.json"
    tokens = {"anna": add_token(path, "anna", "run", {"tokens": 20})}
    whole = DrivenRuns._await_turn

    async def slowly(*args: Any) -> None:
        await whole(*args)
        await asyncio.sleep(0.3)

    monkeypatch.setattr(DrivenRuns, "_await_turn", slowly)
    with unworked(tmp_path / "base", tokens=path) as running:
        anna = driver(running, tokens["anna"])
        model = new_run(anna, anna.session())
        codes: list[int] = []
        senders = [
            threading.Thread(target=lambda: codes.append(anna.rows(model, 1).status_code))
            for _ in range(3)
        ]
        for one in senders:
            one.start()
            time.sleep(0.02)
        for one in senders:
            one.join()
        assert codes == [200] * 3
        assert running.app.app.state.steps.usage.tokens("anna") == 6
        assert anna.rows(model, 2, ROWS * 2).status_code == 200
        assert anna.rows(model, 3, ROWS[:1]).status_code == 403
        assert anna.rows(model, 2, ROWS * 2).status_code == 200  # it is there, and needs no room
