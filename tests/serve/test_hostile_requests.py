"""Requests of people who mean harm: none gets through, nothing of them stays, the server stays up.

They go to the application itself, without a socket, but for those that are about sockets.
"""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from jobs.serve import offers
from jobs.serve.access import add_token, gate, read_tokens
from jobs.serve.app import HEADERS, make_app, make_keeper
from jobs.serve.keeper import Keeper, Send
from tests.serve.conftest import CHAT, jsonl, serving
from tests.wording import refused

ROLES = {"anna": "run", "ben": "run", "rita": "read", "adam": "admin"}
MAX_BODY = 64 << 10
MAX_FILE = 256 << 10
SCRIPT = "<script>alert(1)</script>\"';--${7*7}"


@dataclass
class Fort:
    """An application with tokens, a file and a job of Anna's; no thread moves jobs on."""

    base: Path
    keeper: Keeper
    client: TestClient
    tokens: dict[str, str]
    file_id: str
    job_id: str
    run_id: str = ""

    def ask(
        self, method: str, path: str, *, who: str | None = "anna", **options: Any
    ) -> tuple[int, Any, Any]:
        """(status, JSON, headers) of an answer to somebody's request."""
        headers = dict(options.pop("headers", {}))
        if who is not None:
            headers.setdefault("authorization", f"Bearer {self.tokens[who]}")
        answer = self.client.request(method, path, headers=headers, **options)
        return answer.status_code, _json(answer.text), answer.headers

    def files(self) -> list[str]:
        """Everything that lies below the service's folder, but for the index."""
        paths = [str(path.relative_to(self.base)) for path in self.base.rglob("*")]
        return sorted(path for path in paths if "/index-" not in path)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def form(
    content: bytes = b'{"text": "a"}\n', *, name: str = "a.jsonl", purpose: str = "fine-tune"
) -> dict[str, Any]:
    """A form as a client sends one."""
    return {"files": {"file": (name, content)}, "data": {"purpose": purpose}}


def raw_form(body: bytes, boundary: str = "xx") -> dict[str, Any]:
    """A body that calls itself a form."""
    return {
        "content": body,
        "headers": {"content-type": f"multipart/form-data; boundary={boundary}"},
    }


@pytest.fixture(scope="module")
def fort(tmp_path_factory: pytest.TempPathFactory) -> Fort:
    folder = tmp_path_factory.mktemp("fort")
    path = folder / "tokens.json"
    tokens = {name: add_token(path, name, role, {}) for name, role in ROLES.items()}
    base = folder / "base"
    base.mkdir()
    changes = {"max_body": MAX_BODY, "max_file": MAX_FILE, "body_s": 0.2, "silence_s": 0.2}
    config = offers.read(None).model_copy(update=changes)
    keeper = make_keeper(base, config, Send("local"), every_s=1)
    entrance = gate(
        host="127.0.0.1",
        port=8100,
        token_file=path,
        names=[],
        origins=[],
        requests_per_minute=100_000,
    )
    app = make_app(keeper, entrance, has_keeper=False)
    client = TestClient(app, base_url="http://127.0.0.1:8100", raise_server_exceptions=False)
    here = Fort(base, keeper, client, tokens, "", "")
    status, file, _ = here.ask("POST", "/v1/files", **form(jsonl(CHAT)))
    assert status == 200, file
    here.file_id = file["id"]
    body = {"model": "tiny-chat", "training_file": here.file_id, "seed": 1}
    status, job, _ = here.ask("POST", "/v1/fine_tuning/jobs", json=body)
    assert status == 200, job
    here.job_id, here.run_id = job["id"], job["lathe"]["exp_id"]
    ran = keeper.folder.base.run(here.run_id)
    ran.path.mkdir()
    for file, values in ((ran.exp_dict, {"task": "causal_lm"}), (ran.status, {"state": "failed"})):
        file.write_text(json.dumps(values))
    keeper.turn()
    return here


Case = tuple[str, str, str, dict[str, Any], set[int]]
JOBS = "/v1/fine_tuning/jobs"
GOOD = {"model": "tiny-chat", "training_file": "FILE", "seed": 1}
NEW_LINE = "x\r\nset-cookie: a=b"
PART = b'--xx\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
FILE_PART = b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n'
CASES: list[Case] = [
    # Names that lead elsewhere
    ("a path as a file id", "GET", "/v1/files/..%2f..%2fetc%2fpasswd", {}, {404}),
    ("a double-encoded path", "GET", "/v1/files/%252e%252e%252fetc", {}, {404}),
    ("dots as a job", "GET", f"{JOBS}/..", {}, {404}),
    ("a path as a job id", "GET", f"{JOBS}/..%2f..%2fjob", {}, {404}),
    ("a NUL in an id", "GET", "/v1/files/file-%00" + "0" * 23, {}, {404}),
    ("an id in capitals", "GET", "/v1/files/FILE-" + "A" * 24, {}, {404}),
    ("an id that is too long", "GET", "/v1/files/file-" + "0" * 4000, {}, {404}),
    ("the id of a temporary upload", "GET", "/v1/files/.file-000000000000000000000000.tmp", {}, {404}),
    ("a ticket as an upload", "GET", "/v1/files/ftjob-" + "0" * 24, {}, {404}),
    ("SQL in an id", "GET", f"{JOBS}/ftjob-' or '1'='1", {}, {404}),
    ("SQL in a cursor", "GET", f"{JOBS}?after=' or 1=1 --", {}, {400}),
    ("SQL in a purpose", "GET", "/v1/files?purpose=' or '1'='1", {}, {200}),
    ("SQL in the key of metadata", "GET", f"{JOBS}?metadata[a'%20or%201%3D1%20--]=b", {}, {200}),
    ("a filter that is broken", "GET", f"{JOBS}?metadata[a'%20or%201=1%20--]=b", {}, {400}),
    ("a path as a model", "GET", "/v1/models/..%2f..%2fservice.py", {}, {404}),
    ("a script as a model", "GET", f"/v1/models/{SCRIPT.replace('/', '%2f')}", {}, {404}),
    ("a path as a training file", "POST", JOBS, {"json": {**GOOD, "training_file": "../x"}}, {400}),
    ("an absolute training file", "POST", JOBS, {"json": {**GOOD, "training_file": "/etc/passwd"}}, {400}),
    ("a path as a suffix", "POST", JOBS, {"json": {**GOOD, "suffix": "../../x"}}, {400}),
    ("an option as a suffix of a shell", "POST", JOBS, {"json": {**GOOD, "suffix": "$(touch x)"}}, {400}),
    ("a script as a suffix", "POST", JOBS, {"json": {**GOOD, "suffix": SCRIPT}}, {400}),
    ("a folder as a model", "POST", JOBS, {"json": {**GOOD, "model": "/some/model"}}, {404}),
    ("a Hub id as a model", "POST", JOBS, {"json": {**GOOD, "model": "evil/with-code"}}, {404}),
    # What a request may not state
    ("an experiment", "POST", JOBS, {"json": {**GOOD, "experiment": {"base": "/x"}}}, {400}),
    ("trust_remote_code", "POST", JOBS, {"json": {**GOOD, "trust_remote_code": True}}, {400}),
    ("an owner", "POST", JOBS, {"json": {**GOOD, "owner": "adam"}}, {400}),
    ("a pickle in place of a number", "POST", JOBS, {"json": {**GOOD, "seed": "gASVAAAA"}}, {400}),
    ("a seed that is a list", "POST", JOBS, {"json": {**GOOD, "seed": [1]}}, {400}),
    ("a seed beyond 31 bits", "POST", JOBS, {"json": {**GOOD, "seed": 2**63}}, {400}),
    ("a number of 5,000 digits", "POST", JOBS, {"content": b'{"seed":' + b"9" * 5000 + b"}"}, {400}),
    ("NaN", "POST", JOBS, {"content": b'{"seed": NaN}'}, {400}),
    ("infinitely many epochs", "POST", JOBS, {"json": {**GOOD, "hyperparameters": {"n_epochs": 10**9}}}, {400}),
    ("a learning rate below 0", "POST", JOBS, {"json": {**GOOD, "hyperparameters": {"learning_rate_multiplier": -1}}}, {400}),
    ("metadata of 17 entries", "POST", JOBS, {"json": {**GOOD, "metadata": {str(n): "" for n in range(17)}}}, {400}),
    ("metadata that is deep", "POST", JOBS, {"json": {**GOOD, "metadata": {"a": {"b": "c"}}}}, {400}),
    ("half of a surrogate pair", "POST", JOBS, {"content": b'{"model":"tiny-chat","training_file":"FILE","metadata":{"a":"\\ud800"}}'}, {400}),
    # Bodies
    ("a bomb of brackets", "POST", JOBS, {"content": b"[" * 60_000}, {400}),
    ("a bomb of objects", "POST", JOBS, {"content": b'{"a":' * 9000 + b"1" + b"}" * 9000}, {400}),
    ("40 levels", "POST", JOBS, {"content": b'{"a":' * 40 + b"1" + b"}" * 40}, {400}),
    ("a body that is too long", "POST", JOBS, {"content": b" " * (MAX_BODY + 1)}, {413}),
    ("a key that stands twice", "POST", JOBS, {"content": b'{"model":"tiny-chat","model":"x"}'}, {400}),
    ("no JSON", "POST", JOBS, {"content": b"model=tiny-chat"}, {400}),
    ("bytes that are no UTF-8", "POST", JOBS, {"content": b'{"model":"\xff"}'}, {400}),
    ("UTF-16", "POST", JOBS, {"content": '{"model":"a"}'.encode("utf-16")}, {400}),
    ("a list", "POST", JOBS, {"content": b"[]"}, {400}),
    ("an empty body", "POST", JOBS, {"content": b""}, {400}),
    ("a form of a web page", "POST", JOBS, {"content": b"{}", "headers": {"content-type": "text/plain"}}, {415}),
    ("a packed body", "POST", JOBS, {"content": b"x", "headers": {"content-encoding": "gzip"}}, {415}),
    # Uploads
    ("a purpose that is not offered", "POST", "/v1/files", form(purpose="assistants"), {400}),
    ("no purpose", "POST", "/v1/files", {"files": {"file": ("a", b"{}")}}, {400}),
    ("no file", "POST", "/v1/files", {"files": {"purpose": (None, b"fine-tune")}}, {400}),
    ("a file that is too large", "POST", "/v1/files", form(b"x" * (MAX_FILE + 1)), {413}),
    ("a name of 300 letters", "POST", "/v1/files", form(name="a" * 300), {400}),
    ("a name with a line break", "POST", "/v1/files", raw_form(b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a\x0bb"\r\n\r\n{}\r\n' + PART % (b"purpose", b"fine-tune") + b"--xx--\r\n"), {400}),
    ("a form that ends in the middle", "POST", "/v1/files", raw_form(PART % (b"purpose", b"fine-tune") + FILE_PART), {400}),
    ("a form without its boundary", "POST", "/v1/files", raw_form(b"hello"), {400}),
    ("a boundary of 500 letters", "POST", "/v1/files", raw_form(b"", "x" * 500), {415}),
    ("no boundary", "POST", "/v1/files", {"content": b"", "headers": {"content-type": "multipart/form-data"}}, {415}),
    ("JSON as a form", "POST", "/v1/files", {"json": {"file": "a"}}, {415}),
    ("two files", "POST", "/v1/files", raw_form(FILE_PART + FILE_PART + b"--xx--\r\n"), {400}),
    ("two purposes", "POST", "/v1/files", raw_form(PART % (b"purpose", b"a") + PART % (b"purpose", b"b") + b"--xx--\r\n"), {400}),
    ("a hundred parts", "POST", "/v1/files", raw_form(b"".join(PART % (b"a%d" % n, b"") for n in range(100)) + b"--xx--\r\n"), {400}),
    ("a field that is long", "POST", "/v1/files", raw_form(PART % (b"purpose", b"x" * 5000) + b"--xx--\r\n"), {400}),
    ("a header of a part that is long", "POST", "/v1/files", raw_form(b"--xx\r\nX: " + b"a" * 9000 + b"\r\n\r\n\r\n--xx--\r\n"), {400}),
    ("a field of another name", "POST", "/v1/files", {"files": {"file": ("a", b"{}")}, "data": {"purpose": "fine-tune", "path": "/etc"}}, {400}),
    # Headers
    ("another Host (DNS rebinding)", "GET", "/v1/models", {"headers": {"host": "evil.example:8100"}}, {421}),
    ("our Host without its port", "GET", "/v1/models", {"headers": {"host": "127.0.0.1"}}, {421}),
    ("a Host that begins like ours", "GET", "/v1/models", {"headers": {"host": "127.0.0.1:8100.evil.example"}}, {421}),
    ("an empty Host", "GET", "/v1/models", {"headers": {"host": ""}}, {421}),
    ("the Origin of another page", "POST", JOBS, {"json": GOOD, "headers": {"origin": "https://evil.example"}}, {403}),
    ("the Origin null", "POST", JOBS, {"json": GOOD, "headers": {"origin": "null"}}, {403}),
    ("an Origin that begins like ours", "GET", "/v1/models", {"headers": {"origin": "http://127.0.0.1:8100.evil.example"}}, {403}),
    ("a page elsewhere that reads", "GET", "/v1/models", {"headers": {"sec-fetch-site": "cross-site"}}, {403}),
    ("another port of this machine", "GET", "/v1/models", {"headers": {"sec-fetch-site": "same-site"}}, {403}),
    ("a forwarded host", "GET", "/v1/models", {"headers": {"x-forwarded-host": "evil.example", "host": "evil.example"}}, {421}),
    ("no token", "GET", "/v1/models", {"headers": {"authorization": ""}}, {401}),
    ("a wrong token", "GET", "/v1/models", {"headers": {"authorization": "Bearer lathe-wrong"}}, {401}),
    ("the hash in place of the token", "GET", "/v1/models", {"headers": {"authorization": "Bearer HASH"}}, {401}),
    ("a token as a password", "GET", "/v1/models", {"headers": {"authorization": "Basic TOKEN"}}, {401}),
    ("a token in the address", "GET", "/v1/models?token=TOKEN&api_key=TOKEN", {"headers": {"authorization": ""}}, {401}),
    ("an Idempotency-Key of 1,000 letters", "POST", JOBS, {"json": GOOD, "headers": {"idempotency-key": "k" * 1000}}, {400}),
    # Lists
    ("a limit of 0", "GET", f"{JOBS}?limit=0", {}, {400}),
    ("a limit below 0", "GET", f"{JOBS}?limit=-1", {}, {400}),
    ("a limit of a million", "GET", f"{JOBS}?limit=1000000", {}, {400}),
    ("a limit in other digits", "GET", f"{JOBS}?limit=%D9%A1", {}, {400}),
    ("a limit that is a script", "GET", f"{JOBS}?limit={SCRIPT}", {}, {400}),
    ("a cursor of another job", "GET", f"{JOBS}/JOB/events?after=ftevent-" + "0" * 24 + "-created", {}, {400}),
    ("another order", "GET", "/v1/files?order=random()", {}, {400}),
    # Ways that do not exist
    ("a method that is not offered", "PUT", "/v1/files", {}, {405}),
    ("TRACE", "TRACE", "/v1/models", {}, {405}),
    ("a debug page", "GET", "/debug", {}, {404}),
    ("a static file", "GET", "/static/../service.py", {}, {404}),
]  # fmt: skip


def _filled(value: Any, fort: Fort) -> Any:
    """A case with the ids, tokens and hashes of this server in it."""
    if isinstance(value, dict):
        return {name: _filled(one, fort) for name, one in value.items()}
    if value == "FILE":
        return fort.file_id
    if isinstance(value, bytes):
        return value.replace(b"FILE", fort.file_id.encode())
    if isinstance(value, str):
        own = next(token for token in read_tokens(fort_tokens(fort)) if token.name == "anna")
        value = value.replace("HASH", own.sha256).replace("TOKEN", fort.tokens["anna"])
        return value.replace("/JOB/", f"/{fort.job_id}/")
    return value


def fort_tokens(fort: Fort) -> Path:
    return fort.base.parent / "tokens.json"


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_hostile_request_is_refused_and_nothing_of_it_stays(fort: Fort, case: Case) -> None:
    _, method, path, options, wanted = case
    before = fort.files()
    options = _filled(options, fort)
    if method == "POST" and path == JOBS:
        options["headers"] = {"content-type": "application/json", **options.get("headers", {})}
    status, answer, headers = fort.ask(method, _filled(path, fort), **options)
    assert status in wanted, answer
    assert fort.files() == before
    assert headers["content-type"].startswith("application/json")
    assert {name: headers[name] for name in HEADERS} == HEADERS
    if status != 200:
        assert set(answer) == {"error"}
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert fort.tokens["anna"] not in json.dumps(answer)
    else:  # a filter that fits nothing
        assert answer["data"] == []
    assert fort.ask("GET", "/v1/models")[0] == 200


def test_there_are_at_least_sixty_of_them() -> None:
    assert len({case[0] for case in CASES}) == len(CASES) >= 60


ASK = "/lathe/v1/experiments"
OTHERS: list[tuple[str, str, str, dict[str, Any], int]] = [
    ("ben", "GET", "/v1/files/FILE_ID", {}, 404),
    ("ben", "GET", "/v1/files/FILE_ID/content", {}, 404),
    ("ben", "DELETE", "/v1/files/FILE_ID", {}, 404),
    ("ben", "GET", f"{JOBS}/JOB_ID", {}, 404),
    ("ben", "GET", f"{JOBS}/JOB_ID/events", {}, 404),
    ("ben", "GET", f"{JOBS}/JOB_ID/checkpoints", {}, 404),
    ("ben", "POST", f"{JOBS}/JOB_ID/cancel", {}, 404),
    ("ben", "POST", f"{JOBS}/JOB_ID/pause", {}, 404),
    ("ben", "POST", JOBS, {"json": GOOD}, 400),
    ("rita", "POST", JOBS, {"json": GOOD}, 403),
    ("rita", "POST", "/v1/files", form(), 403),
    ("rita", "DELETE", "/v1/files/FILE_ID", {}, 403),
    ("rita", "GET", "/v1/files/FILE_ID/content", {}, 403),
    ("rita", "POST", f"{JOBS}/JOB_ID/cancel", {}, 403),
    ("rita", "DELETE", "/v1/models/tiny-chat", {}, 403),
    ("adam", "DELETE", "/v1/models/tiny-chat", {}, 403),
    ("rita", "POST", "/lathe/v1/reconcile", {}, 403),
    ("anna", "POST", "/lathe/v1/reconcile", {}, 403),
    ("anna", "POST", ASK, {"json": {"group": "causal_lm_tiny"}}, 403),
    ("adam", "POST", ASK, {"json": {"experiment": {"base": "/etc"}}}, 403),
    ("adam", "POST", ASK, {"json": {"experiment": {"base": "../model"}}}, 403),
    ("adam", "POST", ASK, {"json": {"experiment": {"trust_remote_code": True}}}, 403),
    ("adam", "POST", ASK, {"json": {"experiment": {"metrics": "mine.py:style"}}}, 403),
    ("adam", "POST", ASK, {"json": {"group": "causal_lm_tiny", "data_path": "/root"}}, 403),
    ("adam", "POST", ASK, {"json": {"group": "no_such_group"}}, 400),
    ("adam", "POST", ASK, {"json": {"experiment": {"task": "causal_lm"}}}, 400),
    ("adam", "POST", ASK, {"json": {}}, 400),
    ("adam", "GET", "/lathe/v1/runs/..%2f..", {}, 404),
    ("adam", "GET", "/lathe/v1/runs/" + "0" * 32 + "/logs", {}, 404),
    ("ben", "GET", "/lathe/v1/runs/RUN_ID/curves", {}, 404),
    ("ben", "GET", "/lathe/v1/runs/RUN_ID/answers", {}, 404),
    ("ben", "GET", "/lathe/v1/differences?runs=RUN_ID", {}, 404),
    ("ben", "GET", "/lathe/v1/stream?watch=RUN_ID:0.0", {}, 404),
    ("anna", "GET", "/lathe/v1/runs/RUN_ID/curves", {}, 200),
    ("anna", "GET", "/lathe/v1/runs/RUN_ID/answers?step=-1", {}, 400),
    ("anna", "GET", "/lathe/v1/stream?since=1%20or%201", {}, 400),
    ("anna", "GET", "/lathe/v1/stream?watch=RUN_ID:0.0/../x", {}, 400),
    ("anna", "GET", "/lathe/v1/stream?watch=..%2f..:0.0", {}, 404),
    ("anna", "GET", "/lathe/v1/differences?runs=" + "RUN_ID," * 13, {}, 400),
    ("anna", "GET", "/live/..%2f..%2f..%2fservice.py", {}, 404),
    ("anna", "GET", "/live/routes.py", {}, 404),
    ("ben", "POST", "/lathe/v1/score", {"json": {"model": "ft:x", "statements": ["a"]}}, 404),
    ("rita", "GET", f"{JOBS}/JOB_ID", {}, 200),
    ("adam", "GET", "/v1/files/FILE_ID/content", {}, 200),
    ("anna", "GET", f"{JOBS}/JOB_ID", {}, 200),
]


@pytest.mark.parametrize(("who", "method", "path", "options", "wanted"), OTHERS)
def test_a_token_reaches_what_its_role_and_its_owner_allow(
    fort: Fort, who: str, method: str, path: str, options: dict[str, Any], wanted: int
) -> None:
    before = fort.files()
    path = path.replace("FILE_ID", fort.file_id).replace("JOB_ID", fort.job_id)
    path = path.replace("RUN_ID", fort.run_id)
    status, answer, _ = fort.ask(method, path, who=who, **_filled(options, fort))
    assert status == wanted, answer
    assert fort.files() == before


def test_lists_hold_what_the_token_may_see(fort: Fort) -> None:
    def seen(who: str) -> tuple[int, int]:
        files, jobs = (fort.ask("GET", path, who=who)[1] for path in ("/v1/files", JOBS))
        return len(files["data"]), len(jobs["data"])

    assert [seen(who) for who in ROLES] == [(1, 1), (0, 0), (1, 1), (1, 1)]


def test_a_script_in_a_string_comes_back_as_data(fort: Fort) -> None:
    options = form(jsonl([{"text": SCRIPT}]), name=SCRIPT.replace('"', ""))
    status, file, headers = fort.ask("POST", "/v1/files", who="adam", **options)
    assert status == 200
    assert file["filename"] == SCRIPT.replace('"', "")
    assert headers["content-type"] == "application/json"
    _, content, headers = fort.ask("GET", f"/v1/files/{file['id']}/content", who="adam")
    assert headers["content-type"] == "application/octet-stream"
    assert headers["content-disposition"] == "attachment"
    assert content["text"] == SCRIPT
    assert fort.ask("DELETE", f"/v1/files/{file['id']}", who="adam")[0] == 200


def asgi(fort: Fort, headers: list[tuple[bytes, bytes]], blocks: list[bytes | None]) -> int:
    """The status of POST /v1/files or of a job, sent to the application piece by piece; None: the
    client sends nothing for half a second.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": JOBS if (b"content-type", b"application/json") in headers else "/v1/files",
        "raw_path": b"/",
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"127.0.0.1:8100"),
            (b"authorization", f"Bearer {fort.tokens['anna']}".encode()),
            *headers,
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8100),
    }
    rest, statuses = list(blocks), []

    async def receive() -> dict[str, Any]:
        if not rest:
            return {"type": "http.disconnect"}
        block = rest.pop(0)
        if block is None:
            await asyncio.sleep(0.5)
            block = b""
        return {"type": "http.request", "body": block, "more_body": True}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    asyncio.run(fort.client.app(scope, receive, send))
    (status,) = statuses
    return status


FORM = (b"content-type", b"multipart/form-data; boundary=xx")
JSON = (b"content-type", b"application/json")


def test_a_body_that_comes_too_slowly_is_given_up(fort: Fort) -> None:
    before = fort.files()
    assert asgi(fort, [JSON], [b"{", None, b"}"]) == 408
    assert asgi(fort, [FORM], [FILE_PART, None]) == 408
    assert fort.files() == before


def test_an_upload_whose_client_leaves_stays_in_no_part(fort: Fort) -> None:
    before = fort.files()
    assert asgi(fort, [FORM], [FILE_PART]) == 400
    assert fort.files() == before


def test_a_length_that_lies_does_not_count(fort: Fort) -> None:
    before = fort.files()
    too_long = [b"x" * (1 << 16)] * 10
    assert asgi(fort, [JSON, (b"content-length", b"5")], [b" " * (MAX_BODY + 1)]) == 413
    assert asgi(fort, [FORM, (b"content-length", b"5")], [FILE_PART[:-4], *too_long]) == 413
    assert asgi(fort, [FORM, (b"content-length", b"9" * 15)], []) == 413
    assert fort.files() == before


@pytest.mark.parametrize("name", [b"host", b"authorization", b"content-length", b"origin"])
def test_a_header_that_stands_twice_is_refused(fort: Fort, name: bytes) -> None:
    pair = (name, b"127.0.0.1:8100")
    assert asgi(fort, [JSON, pair, pair], [b"{}"]) == 400


def test_an_upload_that_would_fill_the_disk_is_refused_with_507(
    fort: Fort, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = fort.keeper.config.model_copy(update={"reserve": 1 << 60})
    monkeypatch.setattr(fort.keeper, "config", full)
    before = fort.files()
    status, answer, headers = fort.ask("POST", "/v1/files", **form())
    assert (status, answer["error"]["code"]) == (507, "insufficient_storage")
    assert headers["x-should-retry"] == "false"
    assert fort.ask("POST", JOBS, json={**GOOD, "training_file": fort.file_id})[0] == 507
    assert fort.ask("GET", f"{JOBS}/{fort.job_id}")[0] == 200  # nothing is lost
    assert fort.files() == before


def test_a_token_that_is_taken_out_of_the_file_is_refused_at_once(fort: Fort) -> None:
    path = fort_tokens(fort)
    fort.tokens["carl"] = add_token(path, "carl", "read", {})
    assert fort.ask("GET", "/v1/models", who="carl")[0] == 200
    values = json.loads(path.read_text())
    values["tokens"] = [one for one in values["tokens"] if one["name"] != "carl"]
    path.write_text(json.dumps(values))
    assert fort.ask("GET", "/v1/models", who="carl")[0] == 401


def test_quotas_of_a_token_are_kept(fort: Fort) -> None:
    path = fort_tokens(fort)
    fort.tokens["dora"] = add_token(path, "dora", "run", {"jobs": 1, "bytes": 3000})
    status, file, _ = fort.ask("POST", "/v1/files", who="dora", **form(jsonl(CHAT)))
    assert status == 200
    body = {"model": "tiny-chat", "training_file": file["id"]}
    status, job, _ = fort.ask("POST", JOBS, who="dora", json=body)
    assert status == 200
    status, answer, headers = fort.ask("POST", JOBS, who="dora", json=body)
    assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    assert headers["retry-after"] == "60"
    status, answer, _ = fort.ask("POST", "/v1/files", who="dora", **form(jsonl(CHAT) * 3))
    assert (status, answer["error"]["code"]) == (429, "insufficient_quota")
    assert fort.ask("POST", f"{JOBS}/{job['id']}/cancel", who="dora")[0] == 200
    assert fort.ask("POST", JOBS, who="dora", json=body)[0] == 200


def test_an_open_address_needs_tokens_and_the_file_of_tokens_is_private(tmp_path: Path) -> None:
    common: dict[str, Any] = {"port": 1, "names": [], "origins": [], "requests_per_minute": 1}
    with refused("open_address"):
        gate(host="0.0.0.0", token_file=None, **common)
    path = tmp_path / "tokens.json"
    text = add_token(path, "anna", "run", {})
    assert text not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with refused("token_file_mode"):
        gate(host="0.0.0.0", token_file=path, **common)


def test_too_many_requests_are_told_when_to_come_again(tmp_path: Path) -> None:
    entrance = gate(
        host="127.0.0.1",
        port=1,
        token_file=None,
        names=[],
        origins=[],
        requests_per_minute=60,
    )
    waits = [entrance.wait_s("anna") for _ in range(62)]
    assert waits[:60] == [0.0] * 60
    assert 0 < waits[-1] <= 1
    assert entrance.wait_s("ben") == 0


def test_broken_requests_on_a_socket_leave_the_server_up(tmp_path: Path) -> None:
    attacks = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/files HTTP/1.1\r\nHost: HOST\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\n",
        b"POST /v1/files HTTP/1.1\r\nHost: HOST\r\nContent-Length: -5\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: HOST\r\nX: a\x00b\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
    with serving(tmp_path / "base", has_keeper=False) as running:
        for attack in attacks:
            with socket.create_connection(("127.0.0.1", running.port), timeout=10) as connection:
                connection.sendall(attack.replace(b"HOST", f"127.0.0.1:{running.port}".encode()))
                answer = connection.recv(65536)
            status = answer.split(b" ")[1:2]
            assert not answer or status[0] in (b"400", b"415", b"421", b"431"), answer[:200]
        assert running.client().models.retrieve("tiny-chat").id == "tiny-chat"
