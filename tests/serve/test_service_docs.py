"""docs/service.md does what it says: its commands and its Python run, its examples are valid."""

from __future__ import annotations

import configparser
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from typer.testing import CliRunner

from jobs.cli import app as command
from jobs.serve import app as server
from jobs.serve import offers
from jobs.serve.webhooks.endpoints import EVERY_EVENT
from tests.serve.answering import line
from tests.serve.conftest import CHAT, Stub, jsonl, serving, until_status, wait_until
from tests.serve.test_batches import until_end
from tests.serve.test_preference_jobs import preferences
from tests.serve.test_service_chaos import free_port
from tests.wording import says

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "service.md").read_text()
EXAMPLES = ROOT / "docs" / "examples"


def blocks(language: str) -> list[str]:
    """The page's blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """The words of the page's commands that begin so."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(program)]


@contextmanager
def served(words: list[str], log: Path) -> Iterator[None]:
    """`lathe-jobs WORDS` as a process that serves."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jobs", *words], cwd=ROOT, stdout=output, stderr=output
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


def is_up(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/healthz", timeout=5).read() == b"ok\n"
    except OSError:
        return False


def test_the_pages_commands_and_python_run_as_they_stand(
    tmp_path: Path,
    stub: Stub,
    queue: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_bytes(jsonl(CHAT))
    Path("pairs.jsonl").write_bytes(jsonl(preferences()))
    Path("questions.jsonl").write_bytes(jsonl([line(0, "none", "What is 1?")]))
    (serve,) = commands("lathe-jobs serve")
    port = free_port()
    words = [word if word != "results" else str(tmp_path / "results") for word in serve[1:]]
    words += ["--port", str(port), "--python_binary", str(stub.python), "--allow-dirty"]
    url = f"http://127.0.0.1:{port}"
    names: dict[str, Any] = {}
    with served(words, tmp_path / "log"):
        wait_until(lambda: is_up(url), bool)
        first, again, _, preferred, batch, _ = blocks("python")
        for block in (first, again, preferred, batch):
            exec(block.replace("http://127.0.0.1:8100", url), names)
        for name in ("job", "again", "preferred"):
            until_status(names["client"], names[name].id, "succeeded")
        assert until_end(names["client"], names["batch"].id).status == "failed"  # of no model
        (curl,) = commands("curl")
        listed = curl[-1].replace("http://127.0.0.1:8100", url)  # as of the server's last turn
        wait_until(lambda: urllib.request.urlopen(listed).read(), lambda text: b"succeeded" in text)
    assert "Created fine-tuning job: ftjob-" in capsys.readouterr().out
    assert names["job"].id != names["again"].id
    assert len(stub.starts()) == 3


def test_the_pages_token_lets_its_owner_in_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (token,) = commands("lathe-jobs token")
    done = CliRunner().invoke(command, token[1:])
    assert done.exit_code == 0, done.output
    with serving(tmp_path / "base", tokens=tmp_path / "tokens.json", has_keeper=False) as running:
        assert running.client(done.stdout.strip()).models.list().data
        with pytest.raises(openai.AuthenticationError) as caught:
            running.client("none").models.list()
        says("service_token_wanted", caught.value)


def test_the_pages_own_offer_is_read(tmp_path: Path) -> None:
    path = tmp_path / "offers.py"
    path.write_text(blocks("python")[2])
    config = offers.read(path)
    assert list(config.models) == ["acme-chat"]
    assert (config.organization, config.reserve) == ("acme", 0)


def test_the_pages_webhook_is_read_and_every_event_named(tmp_path: Path) -> None:
    path = tmp_path / "hooks.py"
    path.write_text(blocks("python")[5])
    (webhook,) = offers.read(path).webhooks
    assert webhook.url == "https://acme.org/tuned"
    section = PAGE.partition("## Webhooks")[2].partition("\n## ")[0]
    for event in EVERY_EVENT:
        assert event.rpartition(".")[2] in section
    for key in ("batch_models", "batch_lines", "batch_bytes", "batches_at_once"):
        assert f"`{key}`" in PAGE


def test_the_page_names_every_kind_of_row_with_its_keys() -> None:
    for name, kind in offers.KINDS.items():
        (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {name} |")]
        assert all(f"`{key}`" in row for key in kind.needs), name
        assert all(f"`{task}`" in row for task in kind.data), name


def serve_options(words: list[str]) -> set[str]:
    """The options of a command that serves, which the program must know."""
    assert words[:2] == ["lathe-jobs", "serve"], words
    return {word for word in words[2:] if word.startswith("-")}


def known_options() -> set[str]:
    import typer

    program = typer.Typer()
    program.command()(server.serve)
    made = typer.main.get_command(program)
    return {name for parameter in made.params for name in parameter.opts}


def test_the_unit_of_systemd_starts_the_server_with_options_that_exist() -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(EXAMPLES / "lathe-serve.service")
    words = shlex.split(unit["Service"]["ExecStart"])
    assert serve_options(["lathe-jobs", *words[1:]]) <= known_options()
    assert words[0].endswith("/lathe-jobs")
    assert unit["Service"]["KillMode"] == "process"  # jobs outlive the server


def test_the_manifest_of_kubernetes_is_valid_and_starts_the_server() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    found = list(yaml.safe_load_all((EXAMPLES / "lathe-serve.yaml").read_text()))
    for manifest in found:
        validate.validate(manifest, validate.latest_version(), strict=True)
    (container,) = found[0]["spec"]["template"]["spec"]["containers"]
    assert serve_options([*container["command"], *container["args"]]) <= known_options()
