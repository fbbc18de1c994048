"""A job is looked at before it is made: its rows and its plan, by the commands of the trainer."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from jobs.serve.preview import command
from jobs.serve.preview import routes as preview
from tests.serve.conftest import CHAT, Service, jsonl
from tests.serve.page_world import preview_of_commands

PATH = "/lathe/v1/preview"


@pytest.fixture
def here(service: Service) -> TestClient:
    return TestClient(service.app, base_url=service.url)


def sent(here: TestClient, content: bytes) -> str:
    """The id of a file that was uploaded."""
    files = {"file": ("a.jsonl", content)}
    return here.post("/v1/files", files=files, data={"purpose": "fine-tune"}).json()["id"]


def test_a_preview_tells_rows_and_plan_and_makes_no_job(
    here: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "MOST_ROWS", 6)
    words: list[list[str]] = []

    def look(given: list[str], *args: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        words.append(given)
        return preview_of_commands(given, *args, **options)

    monkeypatch.setattr(preview, "look", look)
    ask: dict[str, Any] = {"model": "tiny-chat", "training_file": sent(here, jsonl(CHAT))}
    rows = here.post(PATH, json={**ask, "part": "rows"}).json()
    assert (rows["num_rows"], rows["sample_rows"], rows["kind"]) == (10, 6, "chat")
    assert 0 < rows["splits"]["train"]["rows"] < 6, "some of the sample are held out"
    assert rows["splits"]["valid"]["tokens"] == 99
    assert [one["tokens"] for one in rows["examples"]] == [9, 9]
    ask["hyperparameters"] = {"n_epochs": 2, "batch_size": 4}
    plan = here.post(PATH, json={**ask, "part": "plan"}).json()
    assert (plan["steps"], plan["epochs"], plan["batch"]) == (5, 2, 4)  # of all rows
    assert (plan["peak_bytes"], plan["fits"], plan["time"]["total_s"]) == (3 << 29, None, 3600.0)
    assert [("stats" in one, "plan" in one) for one in words] == [(True, False), (False, True)]
    assert words[1][-4:] == ["--world", "1", "--nodes", "1"]
    offer = service.keeper.config.models["tiny-chat"]
    models = {"tiny-chat": offer.model_copy(update={"device": "1GiB"})}
    service.keeper.config = service.keeper.config.model_copy(update={"models": models})
    assert here.post(PATH, json={**ask, "part": "plan"}).json()["fits"] is False
    assert here.get("/v1/fine_tuning/jobs").json()["data"] == []


def test_a_preview_refuses_what_a_job_would_fail_with(
    here: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.subprocess, "run", lambda words, **_: ended(words))
    wrong = here.post(PATH, json={"model": "tiny-chat", "training_file": sent(here, b"{}\n")})
    assert wrong.status_code == 400
    assert "line 1: got" in wrong.json()["error"]["message"]
    ask = {"model": "tiny-chat", "training_file": sent(here, jsonl(CHAT))}
    failed = here.post(PATH, json=ask)
    assert (failed.status_code, failed.json()["error"]["message"]) == (
        400,
        "ConfigError: train.jsonl",
    )
    with command.ONE_COMMAND:
        busy = here.post(PATH, json=ask)
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "5")


def ended(words: list[str]) -> subprocess.CompletedProcess[str]:
    """What a command says of a mistake; it names the folder of the preview."""
    groups = json.loads(Path(words[-1]).read_text())
    assert [one["task"] for one in groups[words[-3]]] == ["causal_lm"]
    return subprocess.CompletedProcess(
        words, 2, "", f"12:00:00  rows\nConfigError: {Path(words[-1]).parent}/train.jsonl"
    )
