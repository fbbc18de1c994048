"""A service whose tenants ask for jobs, some of which nobody can understand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from jobs.record.paths import RunFolder
from jobs.serve import offers
from jobs.serve.access import add_token, gate
from jobs.serve.app import make_app, make_keeper
from jobs.serve.keeper import Keeper, Send
from tests.jobs.odd_folders import Poison, deep_at, folder_at, loop_at, pipe_at, text_at
from tests.serve.conftest import CHAT, Stub, jsonl, our_code

TENANTS = ("anna", "ben", "carl")
GONE = "gone-chat"  # a model that is offered while its job is asked for, and not afterwards
JOBS = "/v1/fine_tuning/jobs"
BASE_URL = "http://127.0.0.1:8100"
HALF = (
    '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\\ud83d"}]}'
)
CREATED = (
    '{"event": "created", "exp_id": "e", "digest": "d", "group": "g", "nonce": "n", "at": "x"}\n'
)


@dataclass(frozen=True)
class Kind:
    """A kind of job that cannot run. where: what is poisoned. told: what its error names.

    row: a line of its file, besides good ones.
    """

    where: str = "run"  # run, ticket, upload
    poison: Poison | None = None
    told: str = ""
    model: str = "tiny-chat"
    row: str | None = None


KINDS: dict[str, Kind] = {
    "half of an emoji in a row": Kind(told="line 11: got", row=HALF),
    "rows nested 100,000 deep": Kind(told="line 11: got", row="[" * 100_000),
    "a record that is a folder": Kind("run", folder_at("job.jsonl"), "job.jsonl"),
    "a record that is nested deeply": Kind("run", deep_at("job.jsonl"), "job.jsonl"),
    "a record of another": Kind("run", text_at("job.jsonl", CREATED), "job.jsonl"),
    "a record that is a pipe": Kind("run", pipe_at("job.jsonl"), "job.jsonl"),
    "metrics that are a pipe": Kind("run", pipe_at("metrics.jsonl"), "metrics.jsonl"),
    "a ticket that is a pipe": Kind("ticket", pipe_at("ticket.json"), "ticket.json"),
    "a wish that is a pipe": Kind("ticket", pipe_at("wish-1.json"), "wish-1.json"),
    "content that is a pipe": Kind("upload", pipe_at("content"), "content"),
    "facts of a file that are a pipe": Kind("upload", pipe_at("file.json"), "file.json"),
    "a dictionary that is a folder": Kind("run", folder_at("exp_dict.json"), "exp_dict.json"),
    "a dictionary of another": Kind("run", text_at("exp_dict.json", '{"task": "t"}'), "exp_dict"),
    "metrics that are a loop": Kind("run", loop_at("metrics.jsonl"), "metrics.jsonl"),
    "an offer that is gone": Kind(told=f"'{GONE}' is offered no more", model=GONE),
    "a check that is a list": Kind("ticket", text_at("checked.json", "[]"), "checked.json"),
    "a check that is nested deeply": Kind("ticket", deep_at("checked.json"), "checked.json"),
    "a check without its time": Kind("ticket", text_at("checked.json", "{}"), "checked.json"),
    "a wish of another shape": Kind("ticket", text_at("wish-1.json", '{"a": 1}'), "wish-1.json"),
    "a wish that is a loop": Kind("ticket", loop_at("wish-1.json"), "wish-1.json"),
    "a ticket that is a folder": Kind("ticket", folder_at("ticket.json"), "ticket.json"),
    "a ticket of 5 MB": Kind(
        "ticket", text_at("ticket.json", " " * 5_000_000), "ticket.json: more"
    ),
    "a ticket that is nested deeply": Kind("ticket", deep_at("ticket.json"), "ticket.json"),
    "data that is a file": Kind("ticket", text_at("data", "x"), "data"),
    "facts of a file that are a folder": Kind("upload", folder_at("file.json"), "file.json"),
    "content that is a folder": Kind("upload", folder_at("content"), "content"),
}


@dataclass
class World:
    """A service in this process; no thread looks after its jobs."""

    base: Path
    keeper: Keeper
    client: TestClient
    tokens: dict[str, str]

    def ask(self, method: str, path: str, who: str = "adam", **options: Any) -> Any:
        """The JSON of an answer, which must be 200."""
        headers = {"authorization": f"Bearer {self.tokens[who]}"}
        answer = self.client.request(method, path, headers=headers, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def asked(self, who: str, kind: Kind | None = None, key: str | None = None) -> dict[str, Any]:
        """A job that a tenant has asked for, not yet poisoned."""
        rows = jsonl(CHAT) + ((kind.row or "").encode() if kind else b"")
        form: dict[str, Any] = {
            "files": {"file": ("a.jsonl", rows)},
            "data": {"purpose": "fine-tune"},
        }
        file = self.ask("POST", "/v1/files", who, **form)
        body = {"model": kind.model if kind else "tiny-chat", "training_file": file["id"]}
        return self.ask("POST", JOBS, who, json=body)

    def poison(self, job: dict[str, Any], kind: Kind) -> None:
        """Make a job one of this kind."""
        places = {
            "run": self.base / job["lathe"]["exp_id"],
            "ticket": self.keeper.folder.tickets / job["id"],
            "upload": self.keeper.folder.uploads / job["training_file"],
        }
        if kind.poison is not None:
            kind.poison(RunFolder(places[kind.where]))

    def jobs(self) -> dict[str, dict[str, Any]]:
        """All jobs by id, as the administrator sees them."""
        return {job["id"]: job for job in self.ask("GET", f"{JOBS}?limit=100")["data"]}

    def turns(self, is_over: Callable[[], bool], most: int = 400) -> int:
        """Let the keeper take turns until something is so; returns how many."""
        for number in range(most):
            if is_over():
                return number
            self.keeper.turn()
        raise AssertionError(f"not so after {most} turns")


def new_world(folder: Path, stub: Stub, *, every_s: float = 0.0) -> World:
    """A service that offers GONE too, with a token for each tenant and one of an administrator."""
    path, base = folder / "tokens.json", folder / "base"
    roles = {**dict.fromkeys(TENANTS, "run"), "adam": "admin"}
    tokens = {name: add_token(path, name, role, {}) for name, role in roles.items()}
    base.mkdir()
    config = offers.read(None)
    models = {**config.models, GONE: config.models["tiny-chat"]}
    return World(base, *application(base, path, stub, every_s, models), tokens)


def application(
    base: Path,
    tokens: Path,
    stub: Stub,
    every_s: float,
    models: dict[str, offers.Offer] | None = None,
) -> tuple[Keeper, TestClient]:
    """A keeper and a client of its application."""
    config = offers.read(None)
    config = config.model_copy(update={"models": models or config.models, "reserve": 0})
    send = Send("local", python_binary=str(stub.python), allow_dirty=True)
    keeper = make_keeper(base, config, send, every_s)
    keeper.snapshot = our_code()
    entrance = gate(
        host="127.0.0.1",
        port=8100,
        token_file=tokens,
        names=[],
        origins=[],
        requests_per_minute=100_000,
    )
    app = make_app(keeper, entrance, has_keeper=False)
    return keeper, TestClient(app, base_url=BASE_URL, raise_server_exceptions=False)


def withdraw(keeper: Keeper) -> None:
    """Offer GONE no more."""
    models = {name: offer for name, offer in keeper.config.models.items() if name != GONE}
    keeper.config = keeper.config.model_copy(update={"models": models})
