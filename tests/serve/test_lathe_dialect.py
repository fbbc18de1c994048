"""Our own dialect says what lathe-jobs says, and does what it does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from exp_configs import EXP_GROUPS
from jobs.cli import app as command
from jobs.serve.lathe_routes import strange_texts
from tests.serve.conftest import (
    CHAT,
    Service,
    Stub,
    jsonl,
    own_queue,
    serving,
    until_status,
    wait_until,
)
from tests.wording import says
from trainer.config.identity import exp_id

BY_HAND = {"task": "causal_lm", "train": {"steps": 2}}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, TestClient, Any]]:
    """A service with a job that has ended and a run that somebody started by hand."""
    folder = tmp_path_factory.mktemp("lathe")
    stub = Stub(folder / "stub")
    run = folder / "base" / exp_id(BY_HAND)
    run.mkdir(parents=True)
    (run / "exp_dict.json").write_text(json.dumps(BY_HAND))
    (run / "status.json").write_text('{"state": "succeeded", "step": 2, "total": 2}')
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    (run / "memory_plan.json").write_text('{"peak_gib": 1.5}')
    (run / "judge.json").write_text('{"verdict": "better on 1 of 1"}')
    with own_queue(folder / "queue"), serving(folder / "base", python=stub.python) as running:
        client = running.client()
        file = client.files.create(file=("a.jsonl", jsonl(CHAT)), purpose="fine-tune")
        job = client.fine_tuning.jobs.create(model="tiny-chat", training_file=file.id)
        done = until_status(client, job.id, "succeeded")
        here = TestClient(running.app, base_url=running.url)
        wait_until(lambda: states(here), lambda found: found == {"succeeded"})
        yield running, here, done


def states(here: TestClient) -> set[str]:
    return {row["state"] for row in here.get("/lathe/v1/status").json()}


def lathe(*words: str) -> Any:
    done = CliRunner().invoke(command, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_status_and_results_are_those_of_the_command_line(world: Any) -> None:
    running, here, _ = world
    base = ["-sb", str(running.base)]
    rows = here.get("/lathe/v1/status").json()
    assert len(rows) == 2
    assert {row["exp_id"]: row for row in rows} == {
        row["exp_id"]: row for row in lathe("status", *base)
    }
    key = "exp_id"
    assert sorted(here.get("/lathe/v1/results").json(), key=lambda row: row[key]) == sorted(
        lathe("results", *base), key=lambda row: row[key]
    )
    assert [row["by_hand"] for row in here.get("/lathe/v1/status?group=service").json()] == [False]


def test_status_comes_in_pages_and_not_again_while_nothing_changes(world: Any) -> None:
    _, here, _ = world
    status = "/lathe/v1/status"
    first = here.get(f"{status}?limit=1").json()
    second = here.get(f"{status}?limit=1&after={first[0]['exp_id']}").json()
    assert (first[0]["created_at"] or "") >= (second[0]["created_at"] or "")
    assert sorted(row["exp_id"] for row in first + second) == [
        row["exp_id"] for row in here.get(status).json()
    ]
    for wrong in ("limit=0", "limit=1001", "after=none"):
        assert here.get(f"{status}?{wrong}").status_code == 400
    wait_until(lambda: _is_unchanged(here), bool)
    assert here.get(status, headers={"if-none-match": '"another"'}).status_code == 200


def _is_unchanged(here: TestClient) -> bool:
    """Whether an answer that is asked for with the tag of the last one is not sent again."""
    tag = here.get("/lathe/v1/status").headers["etag"]
    again = here.get("/lathe/v1/status", headers={"if-none-match": tag})
    return (again.status_code, again.content) == (304, b"")


def test_a_run_shows_its_dictionary_its_job_its_metrics_and_its_log(world: Any) -> None:
    _, here, job = world
    path = f"/lathe/v1/runs/{job['lathe']['exp_id']}"
    shown = here.get(path).json()
    assert (shown["job"], shown["experiment"]["label"]) == (job["id"], job["id"])
    metrics = here.get(f"{path}/metrics?since=2").json()
    assert [line["step"] for line in metrics["metrics"]] == [3, 4]
    assert here.get(f"{path}/metrics?since=x").status_code == 400
    assert here.get(f"{path}/logs?limit=5").json() == {"lines": []}  # the stand-in prints nothing
    assert here.get(f"{path}/logs?attempt=9").status_code == 404
    assert here.get(f"{path}/memory").status_code == 404
    by_hand = f"/lathe/v1/runs/{exp_id(BY_HAND)}"
    assert here.get(f"{by_hand}/memory").json() == {"peak_gib": 1.5}
    answer = here.get(f"{path}/judge")
    assert answer.status_code == 404
    says("not_judged", answer.json()["error"]["message"], run=job["lathe"]["exp_id"])
    assert here.get(f"{by_hand}/judge").json() == {"verdict": "better on 1 of 1"}
    assert here.get(by_hand).json()["by_hand"] is True
    assert here.post(f"{by_hand}/retry").status_code == 400
    assert here.post(f"{path}/cancel").status_code == 409  # its client decides


def test_a_group_is_planned_submitted_and_shown(world: Any) -> None:
    _, here, _ = world
    ask = {"group": "causal_lm_tiny", "steps": 3}
    (planned,) = here.post("/lathe/v1/experiments", json=ask).json()
    assert (planned["action"], planned["state"]) == ("send", "pending")
    (sent,) = here.post("/lathe/v1/experiments", json={**ask, "action": "submit"}).json()
    assert (sent["exp_id"], sent["state"]) == (planned["exp_id"], "submitted")
    path = f"/lathe/v1/runs/{sent['exp_id']}"
    wait_until(lambda: here.get(path).json().get("state"), lambda state: state == "succeeded")
    assert here.post("/lathe/v1/reconcile").json() == []
    (again,) = here.post(f"{path}/retry").json()
    assert (again["action"], again["text"]) == ("skip", "it is done")


@pytest.mark.long
def test_a_dry_run_says_what_trainval_says(world: Any) -> None:
    running, here, _ = world
    folders = {path.name for path in running.base.iterdir()}
    ask = {"group": "causal_lm_tiny", "steps": 30, "action": "dry_run"}
    good = here.post("/lathe/v1/experiments", json=ask).json()
    assert (good["code"], good["error"]) == (0, None), good
    assert '"steps": 30' in good["text"]
    short = here.post("/lathe/v1/experiments", json={**ask, "steps": 1}).json()
    assert short["code"] == 0, "--steps below the warm-up is a warning"
    values = {**EXP_GROUPS["causal_lm_tiny"][0], "base": "models/mine"}
    ask = {"experiment": values, "steps": 30, "action": "dry_run"}
    bad = here.post("/lathe/v1/experiments", json=ask).json()
    assert bad["code"] == 2
    assert "models/mine" in bad["error"]
    assert {path.name for path in running.base.iterdir()} == folders


def test_the_backend_is_looked_at_and_the_dialect_describes_itself(world: Any) -> None:
    _, here, _ = world
    assert {finding["name"] for finding in here.get("/lathe/v1/doctor").json()} >= {"queue"}
    document = here.get("/lathe/v1/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for path, methods in document["paths"].items():
        for method in methods:
            if path.endswith("/stream"):
                continue  # it has no end
            name = path.replace("{exp_id}", "0" * 32)
            assert here.request(method, name, json={}).status_code != 405, path
            assert methods[method]["summary"], path


def test_a_dictionary_names_no_code_and_no_folder_outside_of_the_roots(tmp_path: Path) -> None:
    root = tmp_path / "models"
    good = {"base": f"{root}/a", "tokenizer": "org/name", "train": {"seed": 1}, "lora": None}
    assert not list(strange_texts(good, [str(root)]))
    assert len(list(strange_texts(good, []))) == 1
    for text in (f"{root}/../secret", "../x", "~/x", "/etc", "file:///etc", "a/../../b", "/a\0"):
        assert list(strange_texts({"data": [{"files": text}]}, [str(root)])), text
    (root / "..").resolve().joinpath("elsewhere").mkdir()
    root.mkdir()
    (root / "link").symlink_to(tmp_path / "elsewhere")
    assert list(strange_texts({"base": f"{root}/link"}, [str(root)]))
    assert list(strange_texts({"base": {"config": {"auto_map": "x"}}}, [str(root)]))
