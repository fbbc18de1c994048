"""Requests of the dialect by people who mean harm, and folders that nobody wrote: each is refused or
passed over, and everybody else is served.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.serve.access import add_token
from jobs.serve.offers import Offer
from jobs.serve.steps import operations, sessions, wire
from jobs.serve.steps.upkeep import expiry
from jobs.serve.steps.upkeep.expiry import sweep
from service import TINY_CHAT
from tests.serve.conftest import Service
from tests.serve.driving import ROWS, Driver, driver, message_of
from tests.serve.unworked import folder_of, new_run, unworked, work
from tests.wording import says
from trainer.operations.operation_log import FOLDER, OperationReader

PROTOBUF = {"content-type": "application/x-protobuf"}
HUGE = 10**400


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with unworked(tmp_path_factory.mktemp("attacks") / "base", body_s=0.5) as running:
        yield running


@pytest.fixture(scope="module")
def run(service: Service) -> tuple[Driver, str]:
    client = driver(service)
    return client, new_run(client, client.session())


def last_error(service: Service, model: str) -> str:
    """What the last operation of a run was refused for."""
    source, last = OperationReader(folder_of(service, model) / FOLDER), None
    while (one := source.next()) is not None:
        last = one
    assert last is not None
    assert last.kind == "refused", last
    return last.fields["error"]


def next_seq(service: Service, model: str) -> int:
    source, count = OperationReader(folder_of(service, model) / FOLDER), 0
    while source.next() is not None:
        count += 1
    return count


PATHS = [
    "tinker://{run}/weights/..",
    "tinker://{run}/weights/../../x",
    "tinker://{run}/weights/a/../../../../etc/passwd",
    "tinker://{run}/weights/%2e%2e",
    "tinker://../weights/a",
    "tinker://{run}/saved/a",
    "tinker://{run}/weights/a\u0000",
    "tinker://{run}/weights/.a",
    "tinker://{run}:0/weights/a",
    "tinker://sess-" + "0" * 24 + ":train:99999999999/weights/a",
    "file:///etc/passwd",
    "/etc/passwd",
    "",
]


@pytest.mark.parametrize("path", PATHS)
def test_no_path_of_weights_leaves_their_run(
    service: Service, run: tuple[Driver, str], path: str
) -> None:
    client, model = run
    text = path.format(run=model)
    answer = client.post("weights_info", {"tinker_path": text})
    assert answer.status_code in (400, 404), answer.text
    seq = next_seq(service, model)
    load = {"model_id": model, "seq_id": seq, "path": text, "optimizer": True}
    assert client.post("load_weights", load).status_code in (200, 400)
    if next_seq(service, model) > seq:
        assert last_error(service, model)


NAMES = ["../up", "..", ".", "", "a/b", "a\\b/..", "-rf", "a" * 101, "a\u0000", "\u202ea", "a\nb"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["save_weights", "save_weights_for_sampler"])
def test_no_name_of_weights_is_a_path(
    service: Service, run: tuple[Driver, str], way: str, name: str
) -> None:
    client, model = run
    body = {"model_id": model, "path": name, "seq_id": next_seq(service, model)}
    answer = client.post(way, body)
    assert answer.status_code in (200, 400)
    if answer.status_code == 200:
        says("steps_name", last_error(service, model))


NUMBERS: list[tuple[str, str, set[int]]] = [
    (
        "optim_step",
        '{{"model_id": "{run}", "seq_id": {seq}, "adam_params": {{"eps": NaN}}}}',
        {400},
    ),
    (
        "optim_step",
        '{{"model_id": "{run}", "seq_id": {seq}, "adam_params": {{"eps": 1e999}}}}',
        {400},
    ),
    (
        "optim_step",
        '{{"model_id": "{run}", "seq_id": {seq}, "adam_params": {{"eps": -Infinity}}}}',
        {400},
    ),
    ("optim_step", '{{"model_id": "{run}", "seq_id": -1}}', {400}),
    ("optim_step", '{{"model_id": "{run}", "seq_id": 1e3}}', {400}),
    ("optim_step", '{{"model_id": "{run}", "seq_id": {huge}}}', {400}),
    (
        "optim_step",
        '{{"model_id": "{run}", "seq_id": {seq}, "adam_params": {{"eps": {huge}}}}}',
        {200, 400},
    ),
    (
        "optim_step",
        '{{"model_id": "{run}", "seq_id": {seq}, "adam_params": {{"eps": [1]}}}}',
        {200},
    ),
    (
        "save_weights",
        '{{"model_id": "{run}", "seq_id": {seq}, "path": "t", "ttl_seconds": {huge}}}',
        {400},
    ),
    ("retrieve_future", '{{"request_id": "{run}:{huge}"}}', {400, 404}),
    ("retrieve_future", '{{"request_id": "{run}:-1"}}', {404}),
    ("retrieve_future", '{{"request_id": "{run}:٣"}}', {404}),
    (
        "sessions/search",
        '{{"cursor": {{"last_created_at": "0001-01-01T00:00:00", "last_session_id": "x"}}}}',
        {200, 400},
    ),
]


@pytest.mark.parametrize(("path", "text", "codes"), NUMBERS)
def test_numbers_that_are_none_or_too_large_are_refused(
    service: Service, run: tuple[Driver, str], path: str, text: str, codes: set[int]
) -> None:
    client, model = run
    seq = next_seq(service, model)
    body = text.format(run=model, seq=seq, huge=HUGE)
    headers = {"content-type": "application/json"}
    answer = client.http.post(f"/api/v1/{path}", content=body.encode(), headers=headers)
    assert answer.status_code in codes, answer.text
    if path == "optim_step" and answer.status_code == 200:
        assert "adam_params.eps" in last_error(service, model)


def rows_of(model: str, seq: int) -> Any:
    return wire.ForwardBackwardRequest.FromString(message_of(model, seq, ROWS[:1]))


def test_a_negative_number_of_an_operation_is_refused(run: tuple[Driver, str]) -> None:
    client, model = run
    answer = client.rows(model, -1)
    assert answer.status_code == 400
    says("steps_seq_negative", answer.text, seq=-1)


def test_a_sparse_tensor_of_few_bytes_is_not_laid_out_beyond_a_bound(
    service: Service, run: tuple[Driver, str]
) -> None:
    client, model = run
    seq = next_seq(service, model)
    message = rows_of(model, seq)
    datum = message.data[0]
    for tensor in datum.loss_fn_inputs.values():
        del tensor.shape[:]
        tensor.shape.extend([3, 5 << 20])
        tensor.sparse_csr.values = b""
        tensor.sparse_csr.crow_indices = np.zeros(4, "<i8").tobytes()
        tensor.sparse_csr.col_indices = b""
    message.data.extend([datum] * 30)  # each of 15 M numbers
    content = message.SerializeToString()
    assert len(content) < 10_000
    answer = client.http.post("/api/v1/forward_backward", content=content, headers=PROTOBUF)
    assert answer.status_code == 200
    says("steps_sparse_large", last_error(service, model), most=16 << 20)


def test_many_empty_parts_are_counted_before_they_are_parsed(
    run: tuple[Driver, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, model = run
    message = rows_of(model, 1)
    empty = bytes([26, 0])  # field 3, data, of no bytes
    chunks = bytes([10, 0]) * (operations.MOST_PARTS + 1)  # a row of empty chunks
    varint = bytes([26]) + _varint(len(chunks))
    parsed: list[int] = []
    monkeypatch.setattr(wire, "ForwardBackwardRequest", _Watched(parsed))
    for tail in (empty * (operations.MOST_PARTS + 1), varint + chunks):
        content = message.SerializeToString() + tail
        answer = client.http.post("/api/v1/forward_backward", content=content, headers=PROTOBUF)
        assert answer.status_code == 413
        says("steps_parts", answer.text, most=operations.MOST_PARTS)
    assert not parsed
    for torn in (b"\x1a\x05a", b"\x1a" + b"\xff" * 11, b"\x1b\x1c", b"\x1a\xff\xff\xff\xff\x7f"):
        answer = client.http.post("/api/v1/forward_backward", content=torn, headers=PROTOBUF)
        assert answer.status_code == 400, torn


def _varint(value: int) -> bytes:
    groups = [value >> shift & 127 for shift in range(0, value.bit_length(), 7)]
    return bytes([*(one | 128 for one in groups[:-1]), groups[-1]])


class _Watched:
    """Makes messages, and notes how large the bodies are that are parsed."""

    def __init__(self, parsed: list[int]) -> None:
        self.parsed, self.kind = parsed, wire.CLASSES["ForwardBackwardRequest"]

    def __call__(self, **values: Any) -> Any:
        parsed, kind = self.parsed, self.kind

        class Message:
            def ParseFromString(self, content: bytes) -> Any:
                parsed.append(len(content))
                return kind.FromString(content)

        return Message()


def test_a_count_of_parts_is_that_of_the_message() -> None:
    content = message_of("m", 1, ROWS * 3)
    message = wire.ForwardBackwardRequest.FromString(content)
    own = len(message.ListFields()) - 1 + len(message.data)
    rows = sum(len(one.model_input) + len(one.loss_fn_inputs) for one in message.data)
    assert wire.num_parts(content, 10_000) == own + rows


def test_a_long_text_among_the_numbers_of_a_loss_is_not_repeated(
    service: Service, run: tuple[Driver, str]
) -> None:
    client, model = run
    message = rows_of(model, next_seq(service, model))
    message.loss_fn = "ppo"
    message.loss_fn_config_v2["clip_low_threshold"].text = "x" * 1_000_000
    content = message.SerializeToString()
    answer = client.http.post("/api/v1/forward_backward", content=content, headers=PROTOBUF)
    assert answer.status_code == 200
    assert len(last_error(service, model)) < 500


def test_compressed_and_deep_bodies_are_refused_and_a_slow_one_is_cut_off(
    service: Service, run: tuple[Driver, str]
) -> None:
    client, _ = run
    zipped = {"content-encoding": "zstd", "content-type": "application/json"}
    frame = b"\x28\xb5\x2f\xfd\x04\x00\x01\x00\x00"
    for path in ("create_session", "get_info", "asample"):
        answer = client.http.post(f"/api/v1/{path}", content=frame, headers=zipped)
        assert answer.status_code == 415
    deep = b'{"user_metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    headers = {"content-type": "application/json"}
    for path in ("create_session", "optim_step"):
        answer = client.http.post(f"/api/v1/{path}", content=deep, headers=headers)
        assert answer.status_code == 400
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as line:
        head = (
            f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: 127.0.0.1:{service.port}\r\n"
            "Content-Type: application/x-protobuf\r\nContent-Length: 1000\r\n\r\n"
        )
        line.sendall(head.encode() + b"x")
        assert b" 408 " in line.recv(4096)


def test_odd_folders_hide_nothing_of_anybody_else(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    tokens = {"anna": add_token(path, "anna", "run", {"bytes": 10**9, "tokens": 10**6})}
    with unworked(tmp_path / "base", tokens=path) as running:
        anna = driver(running, tokens["anna"])
        session = anna.session()
        model = new_run(anna, session)
        anna.post("save_weights", {"model_id": model, "path": "a", "seq_id": 1})
        work(running, model)
        root = running.base / "_service/steps"
        odd = [root / f"sess-{digit * 24}" for digit in "123456"]
        odd[0].write_text("a file")
        odd[1].mkdir()
        (odd[1] / "session.json").write_text("{")
        odd[2].mkdir()
        (odd[2] / "session.json").mkdir()
        odd[3].symlink_to(odd[3].name)
        odd[4].mkdir()
        (odd[4] / "train-0.json").write_text('{"session": 7}')
        (odd[4] / "train-1.json").mkdir()
        (odd[4] / "sample-0.json").write_bytes(b"\xff")
        odd[5].symlink_to("/dev")
        own = root / session
        for name in ("train-7.json", "sample-7.json", "saved-0-9.json", "saved-0-٣.json"):
            (own / name).write_text("[" * 10_000)
        (own / "train-8.json").symlink_to("train-8.json")
        assert anna.get("sessions").json()["sessions"] == [session]
        runs = anna.get("training_runs").json()["training_runs"]
        assert [one["training_run_id"] for one in runs] == [model]
        assert len(anna.get("checkpoints").json()["checkpoints"]) == 1
        assert len(anna.post("sessions/search", {}).json()["sessions"]) == 1
        assert anna.get(f"sessions/{session}").json()["training_run_ids"] == [model]
        assert anna.rows(model, 2).status_code == 200  # its quota is counted over all of them
        ttl = root / session / "saved-0-1-ttl.json"
        ttl.write_text('{"expires_at": "2020-01-01T00:00:00+00:00"}')
        sweep(running.app.app.state.steps)
        assert anna.get("checkpoints").json()["checkpoints"] == []


def test_a_run_whose_results_were_altered_hides_no_other(tmp_path: Path) -> None:
    with unworked(tmp_path / "base") as running:
        client = driver(running)
        session = client.session()
        broken, whole = (new_run(client, session, number) for number in (0, 1))
        for model in (broken, whole):
            client.post("save_weights", {"model_id": model, "path": "a", "seq_id": 1})
            client.step(model, 2)
            work(running, model)
        steps = running.app.app.state.steps
        steps.runs.close()
        path = folder_of(running, broken) / FOLDER / "results-000001.bin"
        content = bytearray(path.read_bytes())
        content[60] ^= 255  # in the header of the first one
        path.write_bytes(content)
        own = f"tinker://{whole}/weights/a"
        listed = client.get("checkpoints").json()["checkpoints"]
        assert [one["tinker_path"] for one in listed] == [own]
        runs = client.get("training_runs").json()["training_runs"]
        assert {one["training_run_id"]: one["corrupted"] for one in runs} == {
            broken: True,
            whole: False,
        }
        (found,) = client.post("sessions/search", {}).json()["sessions"]
        assert found["checkpoints_count"] == 1
        alone = client.get(f"training_runs/{broken}/checkpoints")
        assert alone.status_code == 500
        says("records_altered", alone.text)
        ttl = running.base / "_service/steps" / session / "saved-1-1-ttl.json"
        ttl.write_text('{"expires_at": "2020-01-01T00:00:00+00:00"}')
        sweep(steps)
        assert not (folder_of(running, whole) / "saved/a").exists()


def test_a_run_whose_offer_is_gone_answers_for_what_it_did_and_can_be_ended(tmp_path: Path) -> None:
    base = tmp_path / "base"
    with unworked(base) as running:
        client = driver(running)
        session = client.session()
        model = new_run(client, session)
        step = client.step(model, 1).json()["request_id"]
        work(running, model)
    with unworked(base, models={"other": Offer(experiment=TINY_CHAT)}) as running:
        client = driver(running)
        assert client.retrieve(step).status_code == 200
        assert client.rows(model, 2).status_code == 400
        assert client.get(f"training_runs/{model}").status_code == 200
        finish = {"reason": {"type": "success"}}
        assert client.post(f"sessions/{session}/finish", finish).status_code == 204
        source = OperationReader(folder_of(running, model) / FOLDER, after=1)
        last = source.next()
        assert last is not None
        assert last.kind == "end"


def test_a_quota_counts_what_is_acknowledged_once(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    tokens = {"anna": add_token(path, "anna", "run", {"tokens": 20, "bytes": 60_000})}
    with unworked(tmp_path / "base", tokens=path) as running:
        anna = driver(running, tokens["anna"])
        usage = running.app.app.state.steps.usage
        session = anna.session()
        model = new_run(anna, session)
        assert anna.rows(model, 1).status_code == 200
        assert anna.rows(model, 1).status_code == 200
        assert usage.tokens("anna") == 6
        assert anna.rows(model, 1, ROWS * 2).status_code == 409  # another content
        assert usage.tokens("anna") == 6
        assert anna.rows(model, 2, ROWS * 3).status_code == 403
        assert usage.tokens("anna") == 6
        anna.post("save_weights", {"model_id": model, "path": "a", "seq_id": 2})
        work(running, model)
        copied = anna.post("copy_weights", {"source_path": f"tinker://{model}/weights/a"})
        assert copied.status_code == 200, copied.text
        (copy,) = (running.base / "_service/steps").glob("*/copies/0")
        (copy / "large").write_bytes(bytes(100_000))
        usage._bytes.clear()  # measured anew
        for answer in (
            anna.post("save_weights", {"model_id": model, "path": "b", "seq_id": 3}),
            anna.post("copy_weights", {"source_path": f"tinker://{model}/weights/a"}),
            anna.rows(model, 3, ROWS[:1]),
        ):
            assert answer.status_code == 403, answer.text
            says("steps_bytes_quota", answer.text, owner="anna", most=60_000)
        assert usage.tokens("anna") == 6


def test_a_token_has_so_many_sessions_and_those_without_runs_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 3)
    with unworked(tmp_path / "base") as running:
        client, steps = driver(running), running.app.app.state.steps
        empty, full, fresh = (client.session() for _ in range(3))
        model = new_run(client, full)
        above = client.post("create_session", {"tags": [], "sdk_version": "0.38.0"})
        assert above.status_code == 403
        says("steps_sessions", above.text, owner="local", most=3)
        for session in (empty, full):
            long_ago = time.time() - expiry.SILENT_S - 60
            os.utime(steps.sessions.folder(session) / "alive", (long_ago, long_ago))
        sweep(steps)
        assert client.get(f"sessions/{empty}").status_code == 404
        assert client.get(f"sessions/{fresh}").status_code == 200
        assert client.get(f"training_runs/{model}").status_code == 200
        assert client.session()
