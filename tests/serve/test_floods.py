"""A server under floods of one client: what another tenant notices, and the server's memory.

Each test prints one line with its numbers (`pytest -s`).
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from jobs.serve.access import add_token
from tests.serve.conftest import CHAT, Stub, jsonl, wait_until
from tests.serve.test_service_chaos import free_port
from tests.serve.test_service_docs import ROOT, is_up
from tests.serve.test_shares import JOBS, at_once, bearer, rows_form, stream

pytestmark = pytest.mark.long
ROUNDS = 20
NOTICED_S = 2.0  # a person takes it for an answer at once, on a machine that is busy with tests
MEMORY_MB = 300


@dataclass
class Process:
    """A server in a process of its own, with clients who have a token."""

    port: int
    pid: int
    tokens: dict[str, str]

    def client(self, who: str) -> httpx.Client:
        url = f"http://127.0.0.1:{self.port}"
        return httpx.Client(base_url=url, headers=bearer(self.tokens[who]), timeout=120)

    def peak_mb(self) -> float:
        """The most memory that the server had so far."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        match = re.search(r"VmHWM:\s+(\d+) kB", text)
        assert match is not None
        return int(match[1]) / 1000


@contextmanager
def processes(folder: Path, python: Path, count: int = 1) -> Iterator[list[Process]]:
    """Servers of one folder: Anna tunes, Dora within quotas, Rita reads."""
    path, size = folder / "tokens.json", len(jsonl(CHAT))
    tokens = {
        "anna": add_token(path, "anna", "run", {}),
        "dora": add_token(path, "dora", "run", {"jobs": 2, "bytes": 3 * size + 10}),
        "rita": add_token(path, "rita", "read", {}),
    }
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("ab"))
        servers: list[Process] = []
        for _ in range(count):
            port = free_port()
            words = ["serve", "-sb", str(folder / "base"), "--port", str(port), "--allow-dirty"]
            words += ["--token_file", str(path), "--python_binary", str(python)]
            command = [sys.executable, "-m", "jobs", *words]
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            servers.append(Process(port, process.pid, tokens))
        for server in servers:
            url = f"http://127.0.0.1:{server.port}"
            wait_until(lambda url=url: is_up(url), bool, within_s=60)
        yield servers


def waits_of(server: Process) -> dict[str, list[float]]:
    """The seconds that Anna waits for an upload, a job, a page and its list, again and again."""
    waits: dict[str, list[float]] = {}
    with server.client("anna") as anna:
        for _ in range(ROUNDS):

            def timed(name: str, method: str, path: str, **options: object) -> httpx.Response:
                began = time.monotonic()
                answer = anna.request(method, path, **options)  # type: ignore[arg-type]
                waits.setdefault(name, []).append(time.monotonic() - began)
                assert answer.status_code == 200, (name, answer.text)
                return answer

            file = timed("upload", "POST", "/v1/files", **rows_form()).json()
            body = {"model": "tiny-chat", "training_file": file["id"]}
            timed("job", "POST", JOBS, json=body)
            timed("page", "GET", "/live")
            timed("list", "GET", JOBS)
    return waits


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def test_another_tenant_notices_no_600_streams_and_no_520_silent_connections(
    tmp_path: Path, stub: Stub, queue: Path
) -> None:
    with processes(tmp_path, stub.python) as (server,), ExitStack() as stack:
        alone = waits_of(server)
        statuses = Counter(
            stack.enter_context(stream(server.port, server.tokens["rita"]))[0] for _ in range(600)
        )
        assert statuses == {200: 64, 429: 536}
        for _ in range(520):
            address = ("127.0.0.1", server.port)
            stack.enter_context(socket.create_connection(address, timeout=20))
        beside = waits_of(server)
        parts = [
            f"{name} {1000 * p95(values):.0f} ms (alone {1000 * p95(alone[name]):.0f})"
            for name, values in beside.items()
        ]
        print(f"SHOW 600 streams ({dict(statuses)}), 520 silent: p95 of {'; '.join(parts)}")
        assert all(p95(values) < NOTICED_S for values in beside.values())


def test_of_40_creations_at_once_on_two_servers_2_pass_a_quota_of_2(
    tmp_path: Path, stub: Stub, queue: Path
) -> None:
    stub.says("slow")
    with processes(tmp_path, stub.python, 2) as servers, ExitStack() as stack:
        dora = [stack.enter_context(server.client("dora")) for server in servers]
        file = dora[0].post("/v1/files", **rows_form()).json()
        body = {"model": "tiny-chat", "training_file": file["id"]}
        jobs = at_once(40, lambda number: dora[number % 2].post(JOBS, json=body))
        files = at_once(40, lambda number: dora[number % 2].post("/v1/files", **rows_form()))
        counts = [Counter(one.status_code for one in answers) for answers in (jobs, files)]
        print(f"SHOW 40 at once, 2 servers, room for 2: jobs {counts[0]}, uploads {counts[1]}")
        assert counts == [{200: 2, 429: 38}] * 2
        assert len(os.listdir(tmp_path / "base" / "_service" / "tickets")) == 2
        assert len(os.listdir(tmp_path / "base" / "_service" / "uploads")) == 3
        for one in jobs:
            if one.status_code == 200:
                assert dora[0].post(f"{JOBS}/{one.json()['id']}/cancel").status_code == 200


LINE = 8 << 20
LINES = {
    "objects": b'{"text": "a", "x": [' + b"{}," * (LINE // 3 - 20) + b"{}]}\n",
    "keys": b'{"text": "a", "x": [' + b'{"a":1},' * (LINE // 8 - 20) + b"{}]}\n",
    "lists": b'{"text": "a", "x": [' + b"[[[]]]," * (LINE // 7 - 20) + b"[]]}\n",
    "depth": b'{"text": "a", "x": ' + b"[" * (LINE - 100) + b"\n",
    "text": json.dumps({"text": "\U0001f600" * ((LINE - 100) // 12)}).encode() + b"\n",
}


def test_ten_lines_of_8_mb_of_nesting_cost_the_server_little_memory(
    tmp_path: Path, stub: Stub, queue: Path
) -> None:
    with processes(tmp_path, stub.python) as (server,), ExitStack() as stack:
        anna = stack.enter_context(server.client("anna"))
        ask = stack.enter_context(httpx.Client(base_url=anna.base_url))
        before, waits = server.peak_mb(), []
        with ThreadPoolExecutor(2) as pool:
            for lines in LINES.values():
                sent = [pool.submit(anna.post, "/v1/files", **rows_form(lines * 10)) for _ in "ab"]
                while not all(one.done() for one in sent):
                    began = time.monotonic()
                    assert ask.get("/healthz").text.startswith("ok")
                    waits.append(time.monotonic() - began)
                    time.sleep(0.02)
                assert all(one.result().status_code == 200 for one in sent)
        peak = server.peak_mb()
        print(
            f"SHOW ten lines of 8 MB, five kinds, two at once: {before:.0f} -> {peak:.0f} MB; "
            f"/healthz {len(waits)} times, p95 {1000 * p95(waits):.0f} ms, "
            f"at most {1000 * max(waits):.0f} ms"
        )
        assert peak <= MEMORY_MB
        assert max(waits) < 5
