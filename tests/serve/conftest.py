"""A service on the loopback, with a `python` that acts like a training in milliseconds."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from openai import DefaultHttpxClient, OpenAI

from jobs.serve import offers
from jobs.serve.access import Gate, add_token, gate
from jobs.serve.app import Server, make_app, make_keeper, options_of
from jobs.serve.keeper import Keeper, Send
from tests.jobs.conftest import queue, wait_until
from tests.jobs.stored_code import our_code
from tests.serve.browser import Browser, browsing, missing

__all__ = ["queue", "wait_until"]

# What a training leaves behind. The loss at a step depends on the step alone, as a resumed run's
# does. The file `what` says how it ends: "ok", "slow" (stands at the third step until SIGTERM, then
# saves and exits with 75), or an exit code. Each start adds a line to `starts`.
STUB = """#!{python} -S
import json, os, signal, sys, time
flags = dict(word[2:].split("=", 1) for word in sys.argv[2:] if "=" in word)
folder = os.path.join(flags["savedir_base"], flags["exp_id"])
train = json.load(open(os.path.join(folder, "exp_dict.json")))["train"]
total = train.get("steps")
if total is None:  # a request says epochs
    rows = len(open(os.path.join(flags["data_path"], "train.jsonl")).readlines())
    total = -(-train["epochs"] * rows // train["global_batch"])
with open({starts!r}, "a") as file:
    file.write(flags["exp_id"] + "\\n")
def say(state, step):
    with open(os.path.join(folder, "status.json.new"), "w") as file:
        json.dump({{"state": state, "step": step, "total": total}}, file)
    os.replace(os.path.join(folder, "status.json.new"), os.path.join(folder, "status.json"))
def save(step):
    path = os.path.join(folder, "checkpoints", "step-%d" % step)
    os.makedirs(path, exist_ok=True)
    manifest = json.dumps({{"version": 2, "step": step, "files": []}})
    open(os.path.join(path, "manifest.json"), "w").write(manifest)
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
what = open({what!r}).read().strip()
metrics = os.path.join(folder, "metrics.jsonl")
done = len(open(metrics).read().splitlines()) if os.path.exists(metrics) else 0
say("running", done)
for step in range(done + 1, total + 1):
    if what == "slow" and step == 3:
        while not stop:
            time.sleep(0.01)
    if stop:
        save(step - 1)
        say("preempted", step - 1)
        sys.exit(75)
    with open(metrics, "a") as file:
        file.write(json.dumps({{"step": step, "loss": 8.0 / step, "tokens": 10 * step}}) + "\\n")
if what not in ("ok", "slow"):
    sys.exit(int(what))
save(total)
os.makedirs(os.path.join(folder, "final"), exist_ok=True)
open(os.path.join(folder, "final", "config.json"), "w").write("{{}}")
say("succeeded", total)
"""
CHAT = [
    {
        "messages": [
            {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "content": f"It is {number}."},
        ]
    }
    for number in range(10)
]
TRIPLES = [
    {"query": f"query {number}", "positive": f"yes {number}", "negative": f"no {number}"}
    for number in range(10)
]
T = TypeVar("T")


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    """Rows as the content of a file."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@dataclass
class Stub:
    """The stand-in for the training."""

    folder: Path

    def __post_init__(self) -> None:
        self.what, self.python = self.folder / "what", self.folder / "bin" / "python"
        self.python.parent.mkdir(parents=True)
        names = {"what": str(self.what), "starts": str(self.folder / "starts")}
        self.python.write_text(STUB.format(python=sys.executable, **names))
        self.python.chmod(0o755)
        self.says("ok")

    def says(self, text: str) -> None:
        """How trainings go from now on."""
        self.what.write_text(text)

    def starts(self) -> list[str]:
        """Ids of experiments, in the order in which their trainings began."""
        path = self.folder / "starts"
        return path.read_text().split() if path.exists() else []


@dataclass
class Service:
    """A server that runs in this process, and its parts."""

    base: Path
    keeper: Keeper
    gate: Gate
    app: Any
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, token: str = "none", **options: Any) -> OpenAI:
        """OpenAI's own client, which accepts nothing but its own types."""
        options = {"max_retries": 0, "timeout": 400, **options}
        # no certificate is looked at, and the system's are not read for each client
        options.setdefault("http_client", DefaultHttpxClient(verify=False))
        return OpenAI(
            base_url=f"{self.url}/v1",
            api_key=token,
            _strict_response_validation=True,
            **options,
        )


@contextmanager
def serving(
    base: Path,
    *,
    python: Path | None = None,
    tokens: Path | None = None,
    has_keeper: bool = True,
    certificate: tuple[Path, Path] | None = None,
    **changes: Any,
) -> Iterator[Service]:
    """A service over a savedir_base. certificate: PEM files of it and of its key. changes: keys of
    the configuration.
    """
    config = offers.read(None).model_copy(update=changes)
    send = Send("local", python_binary=str(python or ""), allow_dirty=True)
    base.mkdir(parents=True, exist_ok=True)
    keeper = make_keeper(base, config, send, every_s=0.1)
    if python is not None:  # a stand-in runs no code of ours
        keeper.snapshot = our_code()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        entrance = gate(
            host="127.0.0.1",
            port=port,
            token_file=tokens,
            names=config.hosts,
            origins=config.origins,
            requests_per_minute=config.requests_per_minute,
        )
        app = make_app(keeper, entrance, has_keeper=has_keeper)
        files = dict(zip(("ssl_certfile", "ssl_keyfile"), certificate or (), strict=False))
        server = Server(options_of(app, **files), keeper)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield Service(base, keeper, entrance, app, port)
        finally:
            server.should_exit = True
            thread.join(30)


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    """The stand-in for the training."""
    return Stub(tmp_path / "stub")


@pytest.fixture
def service(tmp_path: Path, stub: Stub, queue: Path) -> Iterator[Service]:
    """A service without tokens, for this test alone."""
    with serving(tmp_path / "base", python=stub.python) as running:
        yield running


@pytest.fixture
def token_file(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A file with a token of each kind, and the tokens."""
    path = tmp_path / "tokens.json"
    roles = {"anna": "run", "ben": "run", "rita": "read", "adam": "admin"}
    return path, {name: add_token(path, name, role, {}) for name, role in roles.items()}


def until_status(
    client: OpenAI, job_id: str, *wanted: str, within_s: float = 120
) -> dict[str, Any]:
    """The job as soon as it has one of these statuses."""

    def look() -> dict[str, Any]:
        return client.fine_tuning.jobs.retrieve(job_id).model_dump()

    return wait_until(look, lambda job: job["status"] in wanted, within_s=within_s)


@contextmanager
def own_queue(folder: Path) -> Iterator[None]:
    """Inside, jobs of this machine wait in a queue of their own, four processors wide."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LATHE_QUEUE", str(folder))
        patch.setenv("LATHE_QUEUE_CPUS", "4")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def offered() -> list[str]:
    """Names of the models that the repository's own file offers."""
    return sorted(offers.read(None).models)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    reason = missing()
    if reason is not None:
        must = os.environ.get("LATHE_REQUIRE_CHROMIUM") == "1"
        (pytest.fail if must else pytest.skip)(reason)
    with browsing(tmp_path_factory.mktemp("browser")) as running:
        yield running
