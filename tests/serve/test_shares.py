"""One token, or one address, cannot keep the others out: streams, connections, quotas, memory."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from jobs.serve import offers
from jobs.serve.access import MAX_CLIENTS, gate
from jobs.serve.limits.shares import Kind, Shares, address_of
from jobs.serve.requests import Refusal
from tests.serve.conftest import CHAT, jsonl, serving, wait_until

Tokens = tuple[Path, dict[str, str]]
JOBS = "/v1/fine_tuning/jobs"


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def rows_form(rows: bytes = jsonl(CHAT)) -> dict[str, Any]:
    """A form that uploads rows."""
    return {"files": {"file": ("rows.jsonl", rows)}, "data": {"purpose": "fine-tune"}}


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
        assert "rita has 3 open event streams; at most 3" in ask.json()["error"]["message"]
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
        wait_until(lambda: sum(map(is_closed, silent)), lambda count: count >= 15)
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
        with held.hold("requests", "anna"):
            assert refusal(held, "requests", "anna").status == 429
    assert held.num_held("requests") == held.num_held("streams") == 0


def test_questions_to_models_are_a_share_of_their_own() -> None:
    held = shares(answers_at_once=1)
    with held.hold("requests", "anna"), held.hold("answers", "anna"), held.hold("answers", "ben"):
        message = refusal(held, "answers", "anna").message
    assert "anna has 1 questions to models" in message


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
