"""One token, or one address, cannot keep the others out: streams, connections, quotas, memory."""

from __future__ import annotations

import errno
import json
import socket
import sqlite3
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from jobs.serve import offers
from jobs.serve.access import MAX_CLIENTS, add_token, gate
from jobs.serve.faults import disk_trouble
from jobs.serve.index import Index
from jobs.serve.limits.shares import Kind, Shares, address_of
from jobs.serve.requests import Refusal
from jobs.serve.rows import checks as uploaded_rows
from jobs.serve.tickets import ReceivedUpload, ServiceFolder
from tests.serve.conftest import CHAT, Service, jsonl, serving, wait_until
from tests.wording import says
from trainer.errors import StorageError

Tokens = tuple[Path, dict[str, str]]
JOBS = "/v1/fine_tuning/jobs"


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def rows_form(rows: bytes = jsonl(CHAT)) -> dict[str, Any]:
    """A form that uploads rows."""
    return {"files": {"file": ("rows.jsonl", rows)}, "data": {"purpose": "fine-tune"}}


def message_of(answer: httpx.Response) -> str:
    return answer.json()["error"]["message"]


@contextmanager
def stream(port: int, token: str) -> Iterator[tuple[int, socket.socket]]:
    """The status of an event stream that stays open, and its socket."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        head = f"GET /lathe/v1/stream HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        connection.sendall(f"{head}Authorization: Bearer {token}\r\n\r\n".encode())
        yield int(connection.recv(64)[9:12]), connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed a connection."""
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_streams_of_a_token_are_capped_and_others_notice_nothing(
    tmp_path: Path, token_file: Tokens
) -> None:
    path, tokens = token_file
    with (
        serving(tmp_path / "base", tokens=path, has_keeper=False, streams_at_once=3) as running,
        ExitStack() as stack,
    ):
        opened = [stack.enter_context(stream(running.port, tokens["rita"])) for _ in range(8)]
        assert Counter(status for status, _ in opened) == {200: 3, 429: 5}
        ask = httpx.get(f"{running.url}/lathe/v1/stream", headers=bearer(tokens["rita"]))
        assert ask.status_code == 429
        assert ask.headers["retry-after"] == "15"
        says(
            "share_used",
            message_of(ask),
            holder="rita",
            count=3,
            things="open event streams",
            most=3,
        )
        # its other requests, and the streams of another token, go on
        models = httpx.get(f"{running.url}/v1/models", headers=bearer(tokens["rita"]))
        assert models.status_code == 200
        assert stack.enter_context(stream(running.port, tokens["anna"]))[0] == 200
        opened[0][1].close()
        shares: Shares = running.app.shares
        wait_until(lambda: shares.num_held("streams", "rita"), lambda count: count == 2)
        assert stack.enter_context(stream(running.port, tokens["rita"]))[0] == 200


def test_silent_connections_keep_nobody_out(tmp_path: Path) -> None:
    changes = {"idle_connections": 5, "head_s": 30.0}
    with serving(tmp_path / "base", has_keeper=False, **changes) as running, ExitStack() as stack:
        address = ("127.0.0.1", running.port)
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]
        for one in silent[10:]:
            one.sendall(b"GET /v1/models HTTP/1.1\r\nHos")  # begun, and never ended
        assert httpx.get(f"{running.url}/v1/models").status_code == 200
        wait_until(lambda: sum(map(is_closed, silent)), lambda count: count >= 15, within_s=10)
        assert len(running.app.idle) <= 5


def test_a_connection_whose_request_does_not_come_in_time_is_closed(tmp_path: Path) -> None:
    with serving(tmp_path / "base", has_keeper=False, head_s=0.5) as running, ExitStack() as stack:
        address, began = ("127.0.0.1", running.port), time.monotonic()
        silent, slow, answered = (
            stack.enter_context(socket.create_connection(address)) for _ in range(3)
        )
        head = f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n".encode()
        answered.sendall(head + b"\r\n")
        assert answered.recv(1024).startswith(b"HTTP/1.1 200")
        slow.sendall(head)
        answered.sendall(head)
        while not is_closed(slow):
            assert time.monotonic() - began < 10, "a header a moment keeps it open for ever"
            time.sleep(0.05)
            try:
                slow.sendall(b"a: b\r\n")
                answered.sendall(b"a: b\r\n")
            except OSError:
                break
        assert time.monotonic() - began >= 0.4
        wait_until(lambda: is_closed(silent) and is_closed(answered), bool, within_s=10)


def test_a_slow_upload_and_an_open_stream_outlive_the_time_for_a_head(
    tmp_path: Path, token_file: Tokens
) -> None:
    path, tokens = token_file
    changes = {"tokens": path, "has_keeper": False, "head_s": 0.2}
    form = httpx.Request("POST", "http://x", **rows_form())
    content = form.read()

    def blocks() -> Iterator[bytes]:
        for start in range(0, len(content), len(content) // 4 + 1):
            yield content[start : start + len(content) // 4 + 1]
            time.sleep(0.15)

    with (
        serving(tmp_path / "base", **changes) as running,
        stream(running.port, tokens["rita"]) as (_, connection),
    ):
        headers = {**bearer(tokens["anna"]), "content-type": form.headers["content-type"]}
        answer = httpx.post(f"{running.url}/v1/files", content=blocks(), headers=headers)
        assert answer.status_code == 200, answer.text
        assert connection.recv(65536)  # the board
        assert not is_closed(connection)


def shares(**changes: int) -> Shares:
    return Shares(offers.read(None).model_copy(update=changes))


def refusal(held: Shares, kind: Kind, holder: str) -> Refusal:
    """Why the holder may not have one more of a kind."""
    with pytest.raises(Refusal) as caught, held.hold(kind, holder):
        pass
    return caught.value


def test_everybody_together_is_capped_with_503() -> None:
    held = shares(requests_at_once=2, streams_at_once=2, all_at_once=3)
    with held.hold("requests", "anna"), held.hold("streams", "anna"):
        with held.hold("requests", "ben"):
            full = refusal(held, "requests", "carl")
        assert (full.status, full.retry_after_s) == (503, 1)
        says("server_busy", full.message, total=3, most=3)
        with held.hold("requests", "anna"):
            assert refusal(held, "requests", "anna").status == 429
    assert held.num_held("requests") == held.num_held("streams") == 0


def test_a_probe_is_answered_when_everything_else_is_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"requests_per_minute": 2, "all_at_once": 1}
    with (
        serving(tmp_path / "base", has_keeper=False, **changes) as running,
        httpx.Client(base_url=running.url) as client,
    ):
        assert [client.get("/healthz").status_code for _ in range(5)] == [200] * 5
        assert [client.get("/v1/models").status_code for _ in range(3)] == [200, 200, 429]
        with running.app.shares.hold("streams", "anna"):
            assert client.get("/healthz").status_code == 200


def test_questions_to_models_are_a_share_of_their_own() -> None:
    held = shares(answers_at_once=1)
    with held.hold("requests", "anna"), held.hold("answers", "anna"), held.hold("answers", "ben"):
        message = refusal(held, "answers", "anna").message
    says("share_used", message, holder="anna", key="answers_at_once")


def test_an_ipv6_network_is_one_address() -> None:
    first, other = address_of(("2001:db8::1", 1)), address_of(("2001:db8::ffff:1", 2))
    assert first == other == "address 2001:db8::/64"
    assert address_of(("2001:db8:0:1::1", 1)) != first
    assert address_of(("::ffff:10.0.0.1", 1)) == address_of(("10.0.0.1", 1)) == "address 10.0.0.1"
    assert address_of(None) == "address unknown"


def test_many_addresses_reset_the_rate_of_no_token() -> None:
    common: dict[str, Any] = {"token_file": None, "names": [], "origins": []}
    entrance = gate(host="127.0.0.1", port=1, requests_per_minute=1, **common)
    assert entrance.wait_s("anna") == 0
    for number in range(MAX_CLIENTS + 1):
        assert entrance.wait_s(f"address {number}", has_token=False) == 0
    assert entrance.wait_s("anna") > 0
    assert entrance.wait_s(f"address {MAX_CLIENTS}", has_token=False) > 0


# Quotas
# --------------------------------------------------------------------------------------------------


def slowly(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Let a step take a moment, as a network mount does: what is checked before it is old after."""
    step = getattr(owner, name)

    def slow(*arguments: Any) -> Any:
        time.sleep(0.05)
        return step(*arguments)

    monkeypatch.setattr(owner, name, slow)


def at_once(count: int, ask: Callable[[int], httpx.Response]) -> list[httpx.Response]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(ask, range(count)))


@contextmanager
def two_servers(
    folder: Path, quota: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[Service], dict[str, str]]]:
    """Two servers of one folder, each with an index of its own, as two hosts have; and the headers
    of Dora, who has a quota.
    """
    path = folder / "tokens.json"
    headers = bearer(add_token(path, "dora", "run", quota))
    common: dict[str, Any] = {"tokens": path, "has_keeper": False}
    with serving(folder / "base", **common) as first, serving(folder / "base", **common) as second:
        assert first.keeper.index.path.exists()
        with monkeypatch.context() as patch:
            patch.setattr(socket, "gethostname", lambda: "another-host")
            assert second.keeper.index.path != first.keeper.index.path
        yield [first, second], headers


def test_jobs_that_are_created_at_once_stay_within_the_quota_of_all_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch, ServiceFolder, "create")
    with two_servers(tmp_path, {"jobs": 2}, monkeypatch) as (servers, headers):
        file = httpx.post(f"{servers[0].url}/v1/files", headers=headers, **rows_form()).json()
        body = {"model": "tiny-chat", "training_file": file["id"]}

        def create(number: int) -> httpx.Response:
            url = f"{servers[number % 2].url}{JOBS}"
            return httpx.post(url, headers=headers, json=body, timeout=60)

        answers = at_once(10, create)
        assert Counter(one.status_code for one in answers) == {200: 2, 429: 8}
        refused_one = next(one for one in answers if one.status_code == 429)
        says("jobs_above_quota", message_of(refused_one), live=2, owner="dora", most=2)
        assert len(servers[0].keeper.folder.ticket_ids()) == 2
        done = next(one.json()["id"] for one in answers if one.status_code == 200)
        assert httpx.post(f"{servers[0].url}{JOBS}/{done}/cancel", headers=headers).is_success
        assert create(0).status_code == 200  # there is room again
        assert create(1).status_code == 429


def test_files_that_arrive_at_once_stay_within_the_quota_of_all_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch, ReceivedUpload, "keep")
    size = len(jsonl(CHAT))
    with two_servers(tmp_path, {"bytes": 2 * size + 10}, monkeypatch) as (servers, headers):

        def send(number: int) -> httpx.Response:
            url = f"{servers[number % 2].url}/v1/files"
            return httpx.post(url, headers=headers, **rows_form(), timeout=60)

        answers = at_once(10, send)
        assert Counter(one.status_code for one in answers) == {200: 2, 429: 8}
        refused_one = next(one for one in answers if one.status_code == 429)
        says("bytes_above_quota", message_of(refused_one), owner="dora", most=2 * size + 10)
        folder = servers[0].keeper.folder
        assert len(folder.upload_ids()) == len(list(folder.uploads.iterdir())) == 2
        # a file that the other server deleted counts no longer, though the index still has it
        folder_of_file = servers[1].keeper.folder.uploads / folder.upload_ids()[0]
        folder_of_file.rename(tmp_path / "deleted")
        assert send(0).status_code == 200
        assert not any(servers[0].app.shares.arriving.values())


def test_a_file_is_refused_while_it_arrives_when_it_is_above_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []

    def blocks() -> Iterator[bytes]:
        head = b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        yield head
        for _ in range(200):
            sent.append(1)
            yield b"x" * 1000
            time.sleep(0.005)

    with two_servers(tmp_path, {"bytes": 3000}, monkeypatch) as (servers, headers):
        form = {**headers, "content-type": "multipart/form-data; boundary=xx"}
        answer = httpx.post(f"{servers[0].url}/v1/files", headers=form, content=blocks())
        assert answer.status_code == 429
        says("bytes_above_quota", message_of(answer), kept=0, most=3000)
        assert list(servers[0].keeper.folder.uploads.iterdir()) == []


# A full disk
# --------------------------------------------------------------------------------------------------


def test_what_is_durable_is_answered_from_its_files_when_only_the_index_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with serving(tmp_path / "base", has_keeper=False) as running:
        ask = httpx.Client(base_url=running.url, timeout=60)
        file = ask.post("/v1/files", **rows_form())
        body = {"model": "tiny-chat", "training_file": file.json()["id"]}
        older = ask.post(JOBS, json=body).json()
        for name in ("write_job", "write_upload", "drop_uploads"):
            monkeypatch.setattr(Index, name, full)
        file = ask.post("/v1/files", **rows_form())
        assert file.status_code == 200, file.text
        body["training_file"] = file.json()["id"]
        keyed = {"idempotency-key": "monday"}
        jobs = [ask.post(JOBS, json=body, headers=keyed).json() for _ in range(2)]
        assert jobs[0] == jobs[1]
        assert jobs[0]["status"] == "validating_files"
        path = f"{JOBS}/{jobs[0]['id']}"
        assert ask.get(path).json() == jobs[0]
        assert ask.post(f"{path}/pause").json()["lathe"]["is_paused"]
        assert ask.post(f"{JOBS}/{older['id']}/pause").json()["lathe"]["is_paused"]
        assert ask.delete(f"/v1/files/{file.json()['id']}").json()["deleted"]
        monkeypatch.undo()
        running.keeper.turn()
        ids = {one["id"] for one in ask.get(JOBS).json()["data"]}
        assert ids == {older["id"], jobs[0]["id"]}


VERBS = [
    ("GET", JOBS, "jobs"),
    ("GET", "/v1/files", "uploads"),
    ("GET", "/lathe/v1/status", "runs"),
    ("POST", "/lathe/v1/runs/0123456789abcdef0123456789abcdef/retry", "run"),
    ("DELETE", "/v1/models/ft:tiny-chat:lathe::0123", "job_of_model"),
]
FAILURES: list[tuple[Exception, int]] = [
    (OSError(errno.ENOSPC, "No space left on device"), 507),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), 507),
    (OSError(errno.EROFS, "Read-only file system"), 507),
    (sqlite3.OperationalError("database or disk is full"), 507),
    (sqlite3.OperationalError("attempt to write a readonly database"), 507),
    (OSError(errno.EMFILE, "Too many open files"), 503),
    (sqlite3.OperationalError("database is locked"), 503),
    (OSError(errno.EIO, "Input/output error"), 500),
    (sqlite3.OperationalError("no such column: x"), 500),
]


def test_a_full_disk_is_507_on_every_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(tmp_path / "base", has_keeper=False) as running,
        httpx.Client(headers={"connection": "close"}) as client,
    ):
        for error, status in FAILURES:
            for method, path, step in VERBS:
                with monkeypatch.context() as patch:
                    patch.setattr(Index, step, raising(error))
                    answer = client.request(method, f"{running.url}{path}")
                assert answer.status_code == status, (error, method, path, answer.text)
                assert ("retry-after" in answer.headers) == (status == 503)
                if status == 507:
                    says("disk_refuses", message_of(answer))
                elif status == 503:
                    says("ask_later", message_of(answer))
        assert client.get(f"{running.url}{JOBS}").status_code == 200


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    return fail


def test_a_storage_error_says_what_its_cause_says() -> None:
    kinds = {
        errno.EMFILE: "busy",
        errno.ENOSPC: "full",
        errno.EDQUOT: "full",
        errno.EROFS: "full",
        errno.EACCES: None,
        errno.ENOENT: None,
        errno.EIO: None,
    }
    for number, kind in kinds.items():
        error, cause = StorageError("x"), OSError(number, "")
        error.__cause__ = cause
        assert disk_trouble(error) == kind


# JSON
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, number: str) -> None:
    body = f'{{"experiment": {{"optim": {{"lr": {number}}}}}}}'
    with serving(tmp_path / "base", has_keeper=False) as running:
        headers = {"content-type": "application/json"}
        url = f"{running.url}/lathe/v1/experiments"
        answer = httpx.post(url, content=body, headers=headers)
        assert answer.status_code == 400
        if number.endswith("999"):
            says("number_too_large", message_of(answer), number=number)


MANY = 300_000
WIDE = {
    "objects": b"{}," * MANY + b"{}",
    "lists": b"[[],[]]," * MANY + b"[]",
    "keys": b'{"a":1},' * MANY + b"{}",
    "texts without commas": b'""' * MANY + b"," * MANY,
    "escaped quotes without an end": b'"' + b'\\"' * MANY + b"," * MANY,
    "numbers": b"1," * MANY + b"1",
    "after a text that looks like one": b'"\\\\","\\"",' + b"{}," * MANY + b"{}",
}


@pytest.mark.parametrize("inside", WIDE.values(), ids=WIDE.keys())
def test_a_row_of_very_many_values_costs_little_memory(tmp_path: Path, inside: bytes) -> None:
    (tmp_path / "rows").write_bytes(b'{"text": "a", "x": [' + inside + b"]}\n")
    tracemalloc.start()
    try:
        report = uploaded_rows.check(tmp_path / "rows")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.num_mistakes == 1
    assert peak < 20 << 20


def test_a_row_has_at_most_so_many_values(tmp_path: Path) -> None:
    for num_values, is_good in ((99_990, True), (100_001, False)):
        row = {"text": "a", "x": [1] * num_values}
        (tmp_path / "rows").write_text(json.dumps(row) + "\n")
        mistakes = uploaded_rows.check(tmp_path / "rows").mistakes
        assert (not mistakes) == is_good
    says("row_too_wide", str(mistakes[0]), most=100_000)


def test_a_row_that_is_nested_deeply_is_a_mistake(tmp_path: Path) -> None:
    for depth, is_good in ((10, True), (90, True), (110, False), (900, False), (90_000, False)):
        row = b'{"text": "a", "messages": ' + b"[" * depth + b"]" * depth + b"}\n"
        (tmp_path / "rows").write_bytes(row)
        report = uploaded_rows.check(tmp_path / "rows", ["text"])
        assert (not report.mistakes) == is_good, depth


def test_a_text_of_many_commas_and_brackets_is_no_wide_row(tmp_path: Path) -> None:
    text = '[{,"\\' * 100_000
    (tmp_path / "rows").write_text(json.dumps({"text": text}) + "\n")
    assert not uploaded_rows.check(tmp_path / "rows").mistakes
