"""The Tinker dialect by its requests, over a worker that computes sums: every operation once, in
order, and its result for ever; no token sees what is another's.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from jobs.record.times import now
from jobs.serve.access import add_token
from jobs.serve.offers import Offer
from jobs.serve.steps import runs as runs_of_server
from jobs.serve.steps import wire
from jobs.serve.steps.experiments import Driven
from jobs.serve.steps.names import client_id
from jobs.serve.steps.sessions import SavedFacts
from jobs.serve.steps.upkeep.expiry import SILENT_S, sweep
from service import TINY_CHAT
from tests.serve.conftest import Service, own_queue, serving, wait_until
from tests.serve.driven_stub import DrivenStub
from tests.serve.driving import ROWS, Driver, driver
from tests.wording import fault, says
from trainer.operations.operation_log import FOLDER, OperationReader

# sha256 of the descriptor in proto/tinker_public_pb2.py of tinker 0.38.0
DESCRIPTOR = "23aa2b4fe4f2aa0d94fd3cec1d3c145a302412b7f54bff606ae31e065f86386c"
World = tuple[Service, DrivenStub]


def offers(**driven: Any) -> dict[str, Offer]:
    return {"tiny-chat": Offer(experiment=TINY_CHAT, driven=Driven(max_tokens=64, **driven))}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A service with two tokens of the role run, and one that may only read."""
    folder = tmp_path_factory.mktemp("steps")
    with (
        DrivenStub(folder / "stub") as stub,
        own_queue(folder / "queue"),
        serving(folder / "base", python=stub.python, models=offers()) as running,
    ):
        yield running, stub


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[DrivenStub]:
    """The workers of a test that has a service of its own."""
    with DrivenStub(tmp_path / "stub") as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def run(world: World) -> tuple[Driver, str]:
    """A client with a run of its own, which most tests only look at."""
    client = driver(world[0])
    return client, client.run(client.session())


def operations(service: Service, model: str) -> list[str]:
    """The kinds of the operations in the log of a run, in order."""
    session, _, number = model.split(":")
    facts = service.base / "_service/steps" / session / f"train-{number}.json"
    folder = service.base / json.loads(facts.read_text())["exp_id"] / FOLDER
    source, kinds = OperationReader(folder), list[str]()
    while (one := source.next()) is not None:
        kinds.append(one.kind)
    return kinds


def test_the_messages_are_those_of_the_sdk_byte_for_byte() -> None:
    content = wire.file_descriptor().SerializeToString(deterministic=True)
    assert hashlib.sha256(content).hexdigest() == DESCRIPTOR


def test_a_loop_gets_losses_outputs_and_steps(run: tuple[Driver, str]) -> None:
    client, model = run
    output = client.result(client.rows(model, 1))
    assert output.metrics["loss:sum"] == pytest.approx(2 * (0.4 + 0.5))
    (record,) = output.loss_fn_outputs
    logprobs = np.frombuffer(record.fields["logprobs"].data, "<f4")
    assert logprobs.tolist() == pytest.approx([-0.3, -0.4, -0.5] * 2)
    assert np.frombuffer(record.fields["logprobs"].offsets, "<i8").tolist() == [0, 12, 24]
    assert client.result(client.step(model, 2)) == {"metrics": {"w": pytest.approx(0.06)}}
    forward = client.result(client.rows(model, 3, forward=True))
    assert forward.metrics["loss:sum"] == pytest.approx(2 * (0.46 + 0.56))


def test_a_repeated_operation_is_one_and_gives_the_first_result(world: World) -> None:
    client = driver(world[0])
    model = client.run(client.session())
    first, second = client.rows(model, 1), client.rows(model, 1)
    assert first.json() == second.json()
    step = client.step(model, 2)
    before = client.result(step)
    assert client.result(client.step(model, 2)) == before
    assert operations(world[0], model) == ["create", "forward_backward", "optim_step"]
    other = client.step(model, 2, lr=0.5)
    assert other.status_code == 409
    says("operation_conflict_http", other.text, run=model)
    client.finish(model)


def test_an_operation_waits_for_the_one_before_it_and_is_refused_without(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = driver(world[0])
    model = client.run(client.session())
    late: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: late.append(client.rows(model, 2)))
    thread.start()
    time.sleep(0.1)
    client.rows(model, 1)
    thread.join()
    assert late[0].status_code == 200
    monkeypatch.setattr(runs_of_server, "GAP_S", 0.05)
    gap = client.step(model, 9)
    assert gap.status_code == 409
    says("operation_gap_http", gap.text, seq=9, run=model, next=3)
    assert operations(world[0], model) == ["create", *["forward_backward"] * 2]
    client.finish(model)


WRONG = [
    ([([1, 2], {"target_tokens": [2]})], "cross_entropy", fault("steps_target_shape")),
    (
        [([1], {"target_tokens": [2], "weights": [np.nan]})],
        "cross_entropy",
        fault("steps_not_finite"),
    ),
    ([([1], {"target_tokens": np.zeros((1, 0), int)})], "cross_entropy", fault("steps_no_target")),
    ([([1], {"target_tokens": [2]})], "ppo", fault("steps_input_missing")),
    ([([1], {"target_tokens": [2], "mask": [1]})], "cross_entropy", fault("steps_input_unknown")),
    ([([1] * 65, {"target_tokens": [2] * 65})], "cross_entropy", fault("steps_row_length")),
    ([([1], {"target_tokens": [2]})], "custom", fault("steps_graph_refused")),
    ([([1], {"target_tokens": [2]})], "crossentropy", fault("steps_loss_unknown")),
]


def test_what_is_wrong_with_rows_is_told_by_the_future_and_the_loop_goes_on(world: World) -> None:
    client = driver(world[0])
    model = client.run(client.session())
    for seq, (rows, loss, code) in enumerate(WRONG, start=1):
        result = client.result(client.rows(model, seq, rows, loss=loss))
        assert result["category"] == "user"
        says(code, result["error"])
    last = len(WRONG) + 1
    assert client.result(client.step(model, last, lr=0.5)) == {"metrics": {"w": 0.0}}
    assert operations(world[0], model) == ["create", *["refused"] * len(WRONG), "optim_step"]
    client.finish(model)


def test_a_killed_worker_begins_again_and_a_restarted_server_knows_its_futures(
    tmp_path: Path, queue: Path, stub: DrivenStub
) -> None:
    stub.says('{"dies_at": "optim_step"}')
    base = tmp_path / "base"
    with serving(base, python=stub.python, models=offers()) as running:
        client = driver(running)
        model = client.run(client.session())
        first, step = client.rows(model, 1).json(), client.step(model, 2).json()
    with serving(base, python=stub.python, models=offers()) as running:
        client = driver(running)
        assert client.result(step["request_id"]) == {"metrics": {"w": pytest.approx(0.06)}}
        assert client.result(first["request_id"]).metrics["loss:sum"] == pytest.approx(1.8)
        assert client.retrieve(f"{model}:9").status_code == 404
        assert len(stub.starts()) == 2
        assert client.result(client.rows(model, 3)).metrics["loss:sum"] > 1.8


def test_a_run_is_put_aside_and_its_next_operation_wakes_it(
    tmp_path: Path, queue: Path, stub: DrivenStub
) -> None:
    stub.says('{"put_aside_s": 0.1}')
    with serving(tmp_path / "base", python=stub.python, models=offers()) as running:
        client = driver(running)
        model = client.run(client.session())
        row = wait_until(
            lambda: next(iter(running.keeper.reader.rows(stub.starts()).values())),
            lambda row: row.state == "paused",
        )
        time.sleep(0.5)  # some turns of the keeper
        assert len(stub.starts()) == 1
        assert row.reason is not None
        assert client.result(client.rows(model, 1)).metrics["loss:sum"] == pytest.approx(1.8)
        assert len(stub.starts()) == 2


def test_saved_states_are_listed_loaded_downloaded_and_deleted(world: World) -> None:
    client = driver(world[0])
    session = client.session()
    model = client.run(session)
    client.rows(model, 1)
    client.step(model, 2)
    save = {"model_id": model, "path": "one", "seq_id": 3, "user_metadata": {"k": "v"}}
    saved = client.result(client.post("save_weights", save))
    assert saved == {"type": "save_weights", "path": f"tinker://{model}/weights/one"}
    assert client.result(client.post("save_weights", save)) == saved
    twice = client.result(client.post("save_weights", {**save, "seq_id": 4}))
    says("steps_saved_before", twice["error"], name="one")
    again = client.post("save_weights", {**save, "seq_id": 5, "overwrite": True})
    assert client.result(again) == saved
    external = {"model_id": model, "path": "out", "seq_id": 6}
    client.result(client.post("save_weights_external", external))
    (one, two) = client.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]
    assert (one["checkpoint_id"], one["user_metadata"]) == ("weights/one", {"k": "v"})
    assert client.get("checkpoints?limit=500").json()["cursor"]["total_count"] >= 2
    load = {"session_id": session, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
    other = client.result(client.post("load_weights", load))["model_id"]
    forward = client.result(client.rows(other, 1, forward=True))
    assert forward.metrics["loss:sum"] == pytest.approx(2 * (0.46 + 0.56))
    no_state = {"path": f"tinker://{model}/external_weights/out", "model_seq_id": 2}
    assert client.post("load_weights", {**load, **no_state}).status_code == 400
    assert client.get(f"training_runs/{session}:train:2").status_code == 404  # no run was begun
    urls = client.get(
        f"training_runs/{model}/checkpoints/{two['checkpoint_id']}/external_weights_urls"
    )
    address = urls.json()["urls"]["adapter_model.safetensors"]
    assert httpx.get(address).content == b"0.06"
    assert httpx.get(address.replace("adapter_model", "adapter_config")).status_code == 403
    archive = client.get(f"training_runs/{model}/checkpoints/weights/one/archive")
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        assert tar.getnames() == ["step-1/state.json"]
    place = f"/api/v1/training_runs/{model}/checkpoints/weights/one"
    assert client.http.put(f"{place}/ttl", json={"ttl_seconds": 3600}).status_code == 204
    assert client.get(f"training_runs/{model}/checkpoints").json()["checkpoints"][0]["expires_at"]
    assert client.http.delete(place).status_code == 204
    assert client.http.delete(place).status_code == 404
    copied = client.post(
        "copy_weights", {"source_path": two["tinker_path"], "destination_project_id": "default"}
    )
    path = copied.json()["tinker_path"]
    assert client.post("weights_info", {"tinker_path": path}).json()["lora_rank"] == 4
    client.finish(model)


def test_a_token_sees_nothing_of_another_ones(
    tmp_path: Path, queue: Path, stub: DrivenStub
) -> None:
    path = tmp_path / "tokens.json"
    quota = {"tokens": 20, "jobs": 1}
    tokens = {name: add_token(path, name, "run", quota) for name in ("anna", "ben")}
    tokens["rita"] = add_token(path, "rita", "read", {})
    with serving(tmp_path / "base", python=stub.python, tokens=path, models=offers()) as running:
        anna, ben, rita = (driver(running, tokens[name]) for name in ("anna", "ben", "rita"))
        assert driver(running, "lathe-nobody").get("get_server_capabilities").status_code == 401
        session = anna.session()
        model = anna.run(session)
        future = anna.rows(model, 1).json()["request_id"]
        anna.result(future)
        state = anna.result(
            anna.post("save_weights", {"model_id": model, "path": "a", "seq_id": 2})
        )
        answers = [
            ben.retrieve(future),
            ben.rows(model, 3),
            ben.step(model, 3),
            ben.post("get_info", {"model_id": model}),
            ben.post("session_heartbeat", {"session_id": session}),
            ben.post("create_model", ben.create(session, 1)),
            ben.post("weights_info", {"tinker_path": state["path"]}),
            ben.get(f"training_runs/{model}"),
            ben.get(f"training_runs/{model}/checkpoints"),
            ben.get(f"training_runs/{model}/checkpoints/weights/a/archive"),
            ben.get(f"sessions/{session}"),
            ben.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/a"),
        ]
        unknown = ben.retrieve(f"sess-{'0' * 24}:train:0:1")
        assert {answer.status_code for answer in [*answers, unknown]} == {404}
        assert ben.get("sessions").json() == {"sessions": []}
        assert ben.get("training_runs").json()["cursor"]["total_count"] == 0
        assert ben.get("checkpoints").json()["checkpoints"] == []
        assert rita.get(f"training_runs/{model}").status_code == 200
        assert rita.rows(model, 3).status_code == 403
        above = anna.rows(model, 3, ROWS * 3)
        assert above.status_code == 403
        says("steps_token_quota", above.text, owner="anna")
        assert anna.post("create_model", anna.create(session, 1)).status_code == 403


def test_what_is_not_offered_is_refused_by_name(world: World) -> None:
    client = driver(world[0])
    for answer in (
        client.get("audit"),
        client.get("billing/usage/events"),
        client.post("create_custom_loss", {}),
        client.http.put("/api/v1/sessions/x/project", json={}),
        client.post("training_runs/x/checkpoints/weights/y/publish", {}),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "not_offered"
    assert client.get("healthz").json() == {"status": "ok"}
    config = client.post("client/config", {"sdk_version": "0.38.0"}).json()
    assert config["custom_loss_server_side"] is False
    assert config["parallel_fwdbwd_chunks"] is False


def test_sizes_names_and_kinds_of_requests_are_bounded(
    tmp_path: Path, queue: Path, stub: DrivenStub
) -> None:
    models = offers(log_bytes=3000)
    with serving(
        tmp_path / "base", python=stub.python, models=models, max_operation=2000
    ) as running:
        client = driver(running)
        model = client.run(client.session())
        assert client.rows(model, 1, ROWS * 40).status_code == 413
        headers = {"content-type": "application/x-protobuf"}
        bad = client.http.post("/api/v1/forward_backward", content=b"\xff" * 9, headers=headers)
        assert bad.status_code == 400
        zipped = {**headers, "content-encoding": "zstd"}
        answer = client.http.post("/api/v1/forward_backward", content=b"x", headers=zipped)
        assert answer.status_code == 415
        wrong = client.post("save_weights", {"model_id": model, "path": "../up", "seq_id": 1})
        says("steps_name", client.result(wrong)["error"])
        answers = (client.rows(model, seq, ROWS * 5) for seq in range(2, 9))
        last = next(answer for answer in answers if answer.status_code != 200)
        assert last.status_code == 507
        says("steps_log_full", last.text, run=model)
        kinds = client.create(client.session(), lora_config={"rank": 4, "train_all": True})
        assert client.post("create_model", kinds).status_code == 400


def test_a_session_that_was_finished_ends_its_runs_and_takes_nothing_more(world: World) -> None:
    client = driver(world[0])
    session = client.session()
    model = client.run(session)
    finish = {"reason": {"type": "success"}, "detail": "done"}
    assert client.post(f"sessions/{session}/finish", finish).status_code == 204
    assert client.post("session_heartbeat", {"session_id": session}).status_code == 410
    assert client.step(model, 1).status_code == 400
    kinds = operations(world[0], model)
    assert kinds == ["create", "end"]
    search = client.post(
        "sessions/search", {"display_name": "LOOP first", "owner": {"type": "own"}}
    )
    statuses = {one["session_id"]: one["status"] for one in search.json()["sessions"]}
    assert statuses[session]["type"] == "client_finished"


def test_a_session_lives_while_its_runs_are_driven_by_a_client_that_was_started_again(
    world: World,
) -> None:
    """That client beats in its own session. After a week the weights of samplers were removed."""
    client = driver(world[0])
    session = client.session()
    model = client.run(session)
    steps = world[0].app.app.state.steps
    week_ago = time.time() - SILENT_S - 60
    os.utime(steps.sessions.folder(session) / "alive", (week_ago, week_ago))
    client.result(
        client.post(
            "save_weights_for_sampler",
            {"model_id": model, "sampling_session_seq_id": 0, "seq_id": 1},
        )
    )
    sweep(steps)
    run = steps.sessions.run(client_id(model, "train"))
    assert (steps.runs.folder(run) / "sampler" / "session.0").is_dir()
    client.finish(model)


def test_a_number_that_was_used_saves_nothing_else(world: World) -> None:
    client = driver(world[0])
    model = client.run(client.session())
    save = {"model_id": model, "path": "one", "seq_id": 1}
    saved = client.result(client.post("save_weights", save))
    for changed in ({"path": "two"}, {"overwrite": True}):
        assert client.post("save_weights", {**save, **changed}).status_code == 409
    assert client.result(client.post("save_weights", save)) == saved
    sampler = {"model_id": model, "sampling_session_seq_id": 5}
    client.result(client.post("save_weights_for_sampler", {**sampler, "seq_id": 2}))
    other = client.result(client.post("save_weights_for_sampler", {**sampler, "seq_id": 3}))
    says("steps_sampler_of_others", other["error"], number=5)


def test_what_a_killed_server_was_about_to_save_was_not_saved(world: World) -> None:
    """It had noted what an operation saves, and not the operation; the client sent another one."""
    client = driver(world[0])
    model = client.run(client.session())
    steps = world[0].app.app.state.steps
    run = steps.sessions.run(client_id(model, "train"))
    for seq in (2, 3):
        facts = {"run": model, "seq": seq, "kind": "weights", "name": f"s{seq}"}
        facts |= {"folder": f"saved/s{seq}", "created_at": now()}
        steps.sessions.add_saved(run.id, SavedFacts.model_validate(facts))
    client.rows(model, 1)
    assert set(client.result(client.step(model, 2))) == {"metrics"}
    save = {"model_id": model, "path": "other", "seq_id": 3}
    path = f"tinker://{model}/weights/other"
    assert client.result(client.post("save_weights", save))["path"] == path
    (one,) = client.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]
    assert one["checkpoint_id"] == "weights/other"
    save = {"model_id": model, "path": "s2", "seq_id": 4}
    assert client.result(client.post("save_weights", save))["path"].endswith("/s2")
