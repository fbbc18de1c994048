"""Every route of the dialect with another tenant's token and ids: all of them answer as if the ids
named nothing, and nothing of the tenant changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from jobs.serve.access import add_token
from jobs.serve.steps import dialect
from jobs.serve.steps.catalogue.not_offered import NOT_OFFERED
from tests.serve.conftest import Service
from tests.serve.driving import Driver, driver, message_of
from tests.serve.unworked import folder_of, new_run, unworked, work

NOBODY = f"sess-{'0' * 24}"


@dataclass(frozen=True)
class Ids:
    """What a request names. own: the session of whoever asks."""

    session: str
    own: str
    number: int = 0

    @property
    def run(self) -> str:
        return f"{self.session}:train:{self.number}"

    @property
    def sampler(self) -> str:
        return f"{self.session}:sample:{self.number}"

    def path(self, kind: str = "weights", name: str = "a") -> str:
        return f"tinker://{self.run}/{kind}/{name}"


@dataclass
class World:
    service: Service
    anna: Driver
    ben: Driver
    rita: Driver
    ids: Ids  # of Anna's, asked for by Ben


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("isolation")
    path = folder / "tokens.json"
    roles = {"anna": "run", "ben": "run", "rita": "read"}
    tokens = {name: add_token(path, name, role, {}) for name, role in roles.items()}
    with unworked(folder / "base", tokens=path) as running:
        anna, ben, rita = (driver(running, tokens[name]) for name in roles)
        session = anna.session()
        model = new_run(anna, session)
        anna.rows(model, 1)
        for seq, (way, name) in enumerate(
            [("save_weights", "a"), ("save_weights_for_sampler", "s")], start=2
        ):
            anna.post(way, {"model_id": model, "path": name, "seq_id": seq})
        work(running, model)
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny-chat"}
        made = anna.post("create_sampling_session", sampler).json()["sampling_session_id"]
        assert anna.post("join_sampling_session", {"sampling_session_id": made}).status_code == 200
        yield World(running, anna, ben, rita, Ids(session, ben.session()))


Bodies = dict[str, list[Callable[[Ids], dict[str, Any]]]]
ADAM = {"learning_rate": 0.1}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
LORA = {"rank": 4, "seed": 3}
# Of each route that takes ids in its body: the bodies that name another tenant's.
BODIES: Bodies = {
    "create_model": [
        lambda ids: {
            "session_id": ids.session,
            "model_seq_id": 7,
            "base_model": "tiny-chat",
            "lora_config": LORA,
        }
    ],
    "load_weights": [
        lambda ids: {"model_id": ids.run, "seq_id": 9, "path": ids.path(), "optimizer": True},
        lambda ids: {
            "session_id": ids.own,
            "model_seq_id": 7,
            "path": ids.path(),
            "optimizer": False,
        },
        lambda ids: {
            "session_id": ids.session,
            "model_seq_id": 7,
            "path": ids.path(),
            "optimizer": False,
        },
    ],
    "optim_step": [lambda ids: {"model_id": ids.run, "seq_id": 9, "adam_params": ADAM}],
    "save_weights": [lambda ids: {"model_id": ids.run, "seq_id": 9, "path": "b"}],
    "save_weights_for_sampler": [lambda ids: {"model_id": ids.run, "seq_id": 9, "path": "b"}],
    "save_weights_external": [lambda ids: {"model_id": ids.run, "seq_id": 9, "path": "b"}],
    "get_info": [lambda ids: {"model_id": ids.run}],
    "unload_model": [lambda ids: {"model_id": ids.run}],
    "retrieve_future": [
        lambda ids: {"request_id": f"{ids.run}:1"},
        lambda ids: {"request_id": f"{ids.sampler}:0"},
    ],
    "retrieve_futures": [lambda ids: {"target": {"sampling_session_id": ids.sampler}}],
    "cancel_future": [
        lambda ids: {"request_id": f"{ids.run}:1"},
        lambda ids: {"request_id": f"{ids.sampler}:0"},
    ],
    "create_sampling_session": [
        lambda ids: {
            "session_id": ids.session,
            "sampling_session_seq_id": 7,
            "base_model": "tiny-chat",
        },
        lambda ids: {
            "session_id": ids.own,
            "sampling_session_seq_id": 7,
            "model_path": ids.path("sampler_weights", "s"),
        },
    ],
    "join_sampling_session": [lambda ids: {"sampling_session_id": ids.sampler}],
    "asample": [
        lambda ids: {
            "sampling_session_id": ids.sampler,
            "seq_id": 1,
            "prompt": PROMPT,
            "sampling_params": {"max_tokens": 1},
        }
    ],
    "session_heartbeat": [lambda ids: {"session_id": ids.session}],
    "sessions/{session}/finish": [lambda ids: {"reason": {"type": "success"}}],
    "weights_info": [lambda ids: {"tinker_path": ids.path()}],
    "copy_weights": [
        lambda ids: {"source_path": ids.path()},
        lambda ids: {"source_path": ids.path(), "session_id": ids.own, "model_seq_id": 7},
        lambda ids: {"source_path": ids.path(), "session_id": ids.session, "model_seq_id": 7},
    ],
    "training_runs/{run}/checkpoints/{kind}/{name}/ttl": [lambda ids: {"ttl_seconds": 3600}],
}
# Routes that name nothing of anybody. search: what it names is none of the client's.
OPEN = {
    "client/config",
    "client/dynamic_config",
    "get_server_capabilities",
    "healthz",
    "telemetry",
    "create_session",
}
LISTS = {"training_runs", "sessions", "checkpoints"}
SEARCH, ROWS, FILE = "sessions/search", "forward_backward", "files/{run}/{kind}/{name}/{file:path}"


def routes() -> list[tuple[str, str]]:
    """(method, path below /api/v1/) of every route of the dialect that is offered."""
    of_dialect: list[Any] = dialect.ROUTES
    every = [(method, one.path) for one in of_dialect for method in one.methods - {"HEAD"}]
    offered = [one for one in every if one not in NOT_OFFERED]
    return [(method, path.removeprefix(dialect.PREFIX)) for method, path in offered]


def ask(client: Driver, method: str, path: str, ids: Ids) -> list[httpx.Response]:
    """The answers to every request of a route that names these ids."""
    place = path.format(
        run=ids.run, session=ids.session, sampler=ids.sampler, kind="weights", name="a"
    )
    url = f"/api/v1/{place}"
    if path == ROWS:
        rows = [([1], {"target_tokens": [2]})]
        headers = {"content-type": "application/x-protobuf"}
        return [client.http.post(url, content=message_of(ids.run, 9, rows), headers=headers)]
    if method in ("GET", "DELETE"):
        return [client.http.request(method, url)]
    return [client.http.request(method, url, json=body(ids)) for body in BODIES[path]]


def tree(world: World) -> dict[str, tuple[int, int]]:
    """Everything on the disk that is Anna's."""
    run, session = folder_of(world.service, world.ids.run), world.ids.session
    folders = (run, world.service.base / "_service/steps" / session)
    files = [path for folder in folders for path in folder.rglob("*")]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def test_every_route_answers_another_tenants_ids_as_it_answers_unknown_ones(world: World) -> None:
    before, ids = tree(world), world.ids
    unknown = Ids(NOBODY, ids.own)
    walked: set[tuple[str, str]] = set()
    for method, path in routes():
        walked.add((method, path))
        if path in OPEN | LISTS or path in (SEARCH, FILE):
            continue
        answers, absent = ask(world.ben, method, path, ids), ask(world.ben, method, path, unknown)
        for answer, other in zip(answers, absent, strict=True):
            assert answer.status_code == 404, (method, path, answer.text)
            assert answer.text.replace(ids.session, NOBODY) == other.text, (method, path)
    for path in LISTS:
        listed = world.ben.get(path)
        assert listed.status_code == 200
        assert ids.session not in listed.text
    for owner in ("own", "accessible", "user"):
        query = {"session_id": ids.session, "owner": {"type": owner, "owner_urns": ["anna"]}}
        assert world.ben.post(SEARCH, query).json()["sessions"] == []
    unsigned = world.ben.get(f"files/{ids.run}/weights/a/weights.bin?expires=99999999999&sign=0")
    assert unsigned.status_code == 403
    assert tree(world) == before
    assert {path for _, path in walked} >= BODIES.keys() | OPEN | LISTS | {SEARCH, ROWS, FILE}


def test_a_token_that_only_reads_changes_nothing_on_any_route(world: World) -> None:
    before, ids = tree(world), world.ids
    codes: dict[tuple[str, str], int] = {}
    for method, path in routes():
        if path in OPEN | LISTS or path in (SEARCH, FILE) or path == "retrieve_futures":
            continue
        for answer in ask(world.rita, method, path, ids):
            codes[method, path] = answer.status_code
    assert tree(world) == before
    readable = {path for (_, path), code in codes.items() if code == 200}
    assert readable >= {"get_info", "weights_info", "training_runs/{run}", "sessions/{session}"}
    weights = "training_runs/{run}/checkpoints/{kind}/{name}"
    for way in ("archive", "external_weights_urls"):  # who only reads sees no content of files
        assert codes["GET", f"{weights}/{way}"] == 403
    writes = {path for (method, path), code in codes.items() if method != "GET" and code == 403}
    named = {path for path in BODIES if path not in ("get_info", "weights_info", *READS)}
    assert writes >= named


READS = ("retrieve_future", "retrieve_futures")


def test_the_page_and_our_own_routes_show_nothing_of_another_tenants_run(world: World) -> None:
    world.service.keeper.reader.read_changes()
    run = folder_of(world.service, world.ids.run).name
    headers = {"authorization": world.ben.http.headers["x-api-key"].replace("tml-", "Bearer ")}
    for way in ("", "/operations", "/metrics", "/logs", "/curves"):
        url = f"{world.service.url}/lathe/v1/runs/{run}{way}"
        assert httpx.get(url, headers=headers).status_code == 404, way
    for method, way in (("POST", "/put_aside"), ("DELETE", "")):
        url = f"{world.service.url}/lathe/v1/runs/{run}{way}"
        assert httpx.request(method, url, headers=headers).status_code == 404
