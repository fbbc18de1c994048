"""What an agent can do through `lathe mcp`: what its token may, told in the service's own words."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from jobs.agents.service_client import ServiceClient
from tests.forked import ROOT
from tests.serve.conftest import Service, Stub, serving
from tests.wording import refused

pytest.importorskip("mcp", reason="the extra agents is not installed")
from mcp import Client

from jobs.agents.mcp_server import KINDS, Tools, make_server

TINY = {"group": "causal_lm_tiny", "steps": 20}


def call(service: Service | str, token: str | None, name: str, **given: Any) -> tuple[bool, Any]:
    """Whether a tool refused, and its text or, of an answer in JSON, that."""

    async def ask() -> tuple[bool, Any]:
        url = service if isinstance(service, str) else service.url
        async with Client(make_server(url, token)) as client:
            done = await client.call_tool(name, given)
            texts = [getattr(part, "text", "") for part in done.content]
            if done.is_error:
                return True, "\n".join(texts)
            return False, [json.loads(text) for text in texts]

    return anyio.run(ask)


@pytest.fixture
def guarded(
    tmp_path: Path, stub: Stub, queue: Path, token_file: tuple[Path, dict[str, str]]
) -> Iterator[tuple[Service, dict[str, str]]]:
    tokens, of_name = token_file
    with serving(tmp_path / "results", python=stub.python, tokens=tokens) as service:
        yield service, of_name


def test_every_tool_says_what_it_does_and_whether_it_changes_anything() -> None:
    public = {name for name in vars(Tools) if not name.startswith("_")}
    assert public == KINDS.keys(), "each method is a tool"

    async def listed() -> list[Any]:
        async with Client(make_server("http://127.0.0.1:1", None)) as client:
            return (await client.list_tools()).tools

    tools = anyio.run(listed)
    assert {tool.name for tool in tools} == public
    for tool in tools:
        assert tool.description
        assert tool.annotations.read_only_hint is (KINDS[tool.name].read_only_hint)
    assert [tool.name for tool in tools if tool.annotations.destructive_hint] == ["cancel_run"]


def test_an_admins_agent_plans_submits_follows_and_reads_as_lathe_does(
    guarded: tuple[Service, dict[str, str]],
) -> None:
    service, tokens = guarded
    adam = tokens["adam"]
    planned = told(call(service, adam, "plan_experiment", **TINY))
    assert planned["action"] == "send"
    sent = told(call(service, adam, "submit_experiment", **TINY))
    exp_id = sent["exp_id"]
    assert told(call(service, adam, "show_run", exp_id=exp_id))["exp_id"] == exp_id, "at once"
    started = time.monotonic()
    run = told(call(service, adam, "wait_for_run", exp_id=exp_id, seconds=600))
    assert time.monotonic() - started < 300, "it has ended long before"
    assert (run["state"], run["experiment"]["task"]) == ("succeeded", "causal_lm")
    runs = told(call(service, adam, "list_runs", group="causal_lm_tiny"))
    assert ([one["exp_id"] for one in runs["runs"]], runs["has_more"]) == ([exp_id], False)
    numbers = told(call(service, adam, "read_metrics", exp_id=exp_id, since=1))
    assert [line["step"] for line in numbers["metrics"]][:1] == [2]
    assert told(call(service, adam, "read_logs", exp_id=exp_id, limit=5)) == {"lines": []}
    assert exp_id in json.dumps(told(call(service, adam, "read_results")))
    again = told(call(service, adam, "submit_experiment", **TINY))
    assert again["action"] != "send", "it is not trained twice"


def told(answer: tuple[bool, Any]) -> Any:
    """The JSON of a tool that did not refuse: one value, or all rows of a list."""
    is_error, found = answer
    assert not is_error, found
    return found[0] if len(found) == 1 and isinstance(found[0], dict) else found


@pytest.mark.parametrize(
    ("who", "tool", "given", "said"),
    [
        ("rita", "submit_experiment", TINY, "403"),
        ("anna", "submit_experiment", TINY, "403: Only a token of the role admin"),
        ("anna", "plan_experiment", TINY, "403"),
        ("rita", "retry_run", {"exp_id": "0" * 32}, "403"),
        ("adam", "show_run", {"exp_id": "a?b"}, "404: No such run: 'a?b'"),
        ("adam", "submit_experiment", {}, "400: experiment, group: give one of them"),
        ("nobody", "list_runs", {}, "401"),
    ],
)
def test_a_tool_may_what_its_token_may_and_says_the_services_words(
    guarded: tuple[Service, dict[str, str]], who: str, tool: str, given: dict[str, Any], said: str
) -> None:
    service, tokens = guarded
    is_error, text = call(service, tokens.get(who, "lathe-none"), tool, **given)
    assert is_error
    assert said in text
    assert tokens.get(who, "lathe-none") not in text


def test_an_address_that_is_none_and_a_token_in_the_clear_are_refused() -> None:
    with refused("no_service_address", url="localhost:8100"):
        ServiceClient("localhost:8100")
    with refused("token_in_the_clear", url="http://gpu.example.org:8100"):
        ServiceClient("http://gpu.example.org:8100", "secret")
    ServiceClient("http://gpu.example.org:8100")  # without a token nothing is given away
    assert "secret" not in repr(ServiceClient("https://gpu.example.org", "secret"))


@contextmanager
def answering(status: int, headers: dict[str, str], body: bytes) -> Iterator[tuple[str, list[str]]]:
    """The address of something that answers so, and the tokens that it was sent."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("authorization", ""))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", seen
        finally:
            server.shutdown()
            thread.join()


def test_a_token_is_not_carried_to_where_a_redirect_leads() -> None:
    with (
        answering(200, {}, b"{}") as (elsewhere, stolen),
        answering(302, {"location": elsewhere}, b"") as (url, _),
    ):
        is_error, text = call(url, "secret", "list_runs")
    assert is_error
    assert "302" in text
    assert stolen == []


@pytest.mark.parametrize(
    "url",
    ["here", "ftp://a", "http://", "http://[::1", "http://a:99999", "http://a:b", "http://a b"],
)
def test_an_address_to_which_nothing_can_be_sent_is_refused(url: str) -> None:
    with refused("no_service_address", url=url):
        ServiceClient(url)


def test_an_answer_that_is_cut_off_is_no_service() -> None:
    with (
        answering(200, {"content-length": "99"}, b"{}") as (url, _),
        refused("no_service", url=url),
    ):
        ServiceClient(url).get("/lathe/v1/status")


def test_what_is_no_service_is_told_as_that() -> None:
    page = b"<html>hello</html>"
    with answering(200, {}, page) as (url, _), refused("answer_not_json", url=url):
        ServiceClient(url).get("/lathe/v1/status")
    with refused("no_service", url=url):
        ServiceClient(url).get("/lathe/v1/status")


def test_the_command_speaks_the_protocol_and_nothing_else_on_stdout(service: Service) -> None:
    hello = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        },
    }
    ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    ask = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    lines = "".join(json.dumps(one) + "\n" for one in (hello, ready, ask))
    argv = [sys.executable, "-m", "jobs", "mcp", "--url", service.url]
    with subprocess.Popen(
        argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(lines)
        server.stdin.flush()
        answers = [json.loads(server.stdout.readline()) for _ in range(2)]
        server.stdin.close()
        rest = server.stdout.read()
    assert rest == ""
    assert server.returncode == 0
    assert answers[0]["result"]["serverInfo"]["name"] == "lathe"
    assert {tool["name"] for tool in answers[1]["result"]["tools"]} == KINDS.keys()
