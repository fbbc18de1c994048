"""Driven runs for whoever looks at them: their operations with their times, who drives them, what
they have saved; and put aside, paused, deleted by whoever may.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from jobs.cli import app as command
from jobs.serve.access import add_token
from tests.serve.conftest import Service, serving, wait_until
from tests.serve.driven_stub import DrivenStub
from tests.serve.driving import Driver, driver
from tests.serve.page_world import HOSTILE, by_hand
from tests.serve.test_steps_dialect import offers
from tests.wording import says

WORK_S = 0.05


def exp_id_of(service: Service, model: str) -> str:
    session, _, number = model.split(":")
    facts = service.base / "_service/steps" / session / f"train-{number}.json"
    return json.loads(facts.read_text())["exp_id"]


def some_loop(client: Driver) -> str:
    """A run with seven operations: one of them fails, one saves a state, one weights."""
    body = {"tags": [HOSTILE], "user_metadata": {HOSTILE: HOSTILE}, "sdk_version": "0.38.0"}
    session = client.post("create_session", {**body, "display_name": HOSTILE}).json()["session_id"]
    model = client.run(session, user_metadata={"run": HOSTILE})
    client.rows(model, 1)
    client.step(model, 2)
    client.rows(model, 3, loss="crossentropy")
    client.post("save_weights", {"model_id": model, "path": "one", "seq_id": 4})
    client.post("save_weights_for_sampler", {"model_id": model, "path": "two", "seq_id": 5})
    client.result(client.rows(model, 6, forward=True))
    return model


def asked(service: Service, path: str, token: str = "none", method: str = "GET") -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"}
    return httpx.request(method, f"{service.url}/lathe/v1/{path}", headers=headers, timeout=60)


def shown(service: Service, run: str) -> dict[str, Any]:
    answer = asked(service, f"runs/{run}/operations")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_operations_their_times_and_their_driver_are_the_same_after_a_restart(
    tmp_path: Path, queue: Path
) -> None:
    stub, base = DrivenStub(tmp_path / "stub"), tmp_path / "base"
    stub.says(json.dumps({"work_s": WORK_S}))
    with serving(base, python=stub.python, models=offers()) as running:
        model = some_loop(driver(running))
        run = exp_id_of(running, model)
        first = shown(running, run)
        by_hand(base, "undriven", 3)
        running.keeper.reader.read_runs()
        other = next(one.name for one in base.iterdir() if len(one.name) == 32 and one.name != run)
        assert asked(running, f"runs/{other}/operations").status_code == 404
        result = CliRunner().invoke(command, ["results", "-sb", str(base), "--json"])
        (of_run,) = [one for one in json.loads(result.stdout) if one["exp_id"] == run]
        assert of_run["operations"]["results"] == 7
        text = CliRunner().invoke(command, ["status", "-sb", str(base)]).stdout
        assert "driven run" in text
    with serving(base, python=stub.python, models=offers(), has_keeper=False) as running:
        running.keeper.reader.read_changes()
        again = shown(running, run)
    assert again["last"] == first["last"]
    assert again["totals"] == first["totals"]
    totals = first["totals"]
    assert totals["by_kind"] == {
        "create": 1,
        "forward": 1,
        "forward_backward": 1,
        "optim_step": 1,
        "refused": 1,
        "save_for_sampler": 1,
        "save_state": 1,
    }
    assert (totals["failed"], totals["pending"]) == (1, 0)
    assert totals["working_s"] >= 7 * WORK_S
    assert totals["waiting_s"] > 0  # its worker had to start
    assert sum(totals["shares"].values()) == pytest.approx(1)
    numbers = [(one["seq"], one["rows"], one["tokens"]) for one in first["last"]]
    nothing = (None, None)
    assert numbers[:3] == [(6, 2, 6), (5, *nothing), (4, *nothing)]
    assert numbers[3:] == [(3, *nothing), (2, *nothing), (1, 2, 6), (0, *nothing)]
    for one in first["last"]:
        assert one["worked_s"] >= WORK_S
        assert one["waited_s"] == pytest.approx(one["began"] - one["sent"])
    (failure,) = first["failures"]
    assert failure["category"] == "user"
    says("steps_loss_unknown", failure["error"], name="crossentropy")
    driven_by = first["driver"]
    assert driven_by["token"] == "local"
    assert (driven_by["display_name"], driven_by["tags"]) == (HOSTILE, [HOSTILE])
    assert driven_by["is_alive"]
    paths = {one["tinker_path"].partition("/sess")[0]: one for one in first["saved"]}
    assert len(first["saved"]) == 2, paths
    assert {one["checkpoint_type"] for one in first["saved"]} == {"training", "sampler"}


@pytest.mark.long
def test_a_run_is_put_aside_on_request_and_its_next_operation_wakes_it(
    tmp_path: Path, queue: Path
) -> None:
    stub = DrivenStub(tmp_path / "stub")
    with serving(tmp_path / "base", python=stub.python, models=offers()) as running:
        client = driver(running)
        model = client.run(client.session())
        run = exp_id_of(running, model)
        wait_until(lambda: row_of(running, run), lambda row: row.state == "running")
        answer = asked(running, f"runs/{run}/put_aside", method="POST")
        assert answer.status_code == 200, answer.text
        row = wait_until(lambda: row_of(running, run), lambda row: row.state == "paused")
        assert "put aside" in row.reason
        time.sleep(0.4)  # some turns of the keeper
        assert len(stub.starts()) == 1
        again = asked(running, f"runs/{run}/put_aside", method="POST")
        assert again.status_code == 409
        says("driven_not_active", again.text, state="is paused")
        assert client.result(client.rows(model, 1)).metrics["loss:sum"] == pytest.approx(1.8)
        assert len(stub.starts()) == 2


def row_of(service: Service, run: str) -> Any:
    return service.keeper.reader.rows([run])[run]


def test_a_run_that_has_ended_is_deleted_and_absent_from_then_on(
    tmp_path: Path, queue: Path
) -> None:
    stub, path = DrivenStub(tmp_path / "stub"), tmp_path / "tokens.json"
    tokens = {name: add_token(path, name, "run", {}) for name in ("anna", "ben")}
    tokens["rita"] = add_token(path, "rita", "read", {})
    base = tmp_path / "base"
    with serving(base, python=stub.python, tokens=path, models=offers()) as running:
        anna = driver(running, tokens["anna"])
        session = anna.session()
        model = anna.run(session)
        run = exp_id_of(running, model)
        early = asked(running, f"runs/{run}", tokens["anna"], "DELETE")
        assert early.status_code == 409
        says("driven_goes_on", early.text, status="running")
        anna.result(anna.post("save_weights", {"model_id": model, "path": "a", "seq_id": 1}))
        own = asked(running, f"runs/{run}/operations", tokens["anna"]).json()
        assert [one["tinker_path"] for one in own["saved"]] == [f"tinker://{model}/weights/a"]
        ended = anna.result(anna.post("unload_model", {"model_id": model}))
        assert ended == {"type": "unload_model", "model_id": model}
        wait_until(lambda: row_of(running, run), lambda row: row.state == "succeeded")
        indexed = running.keeper.index.job_of_run(run)
        assert indexed is not None
        job = running.keeper.read_job(indexed["id"])
        assert job is not None
        model_url = f"{running.url}/v1/models/{job['fine_tuned_model']}"
        headers = {"authorization": f"Bearer {tokens['anna']}"}
        part = httpx.delete(model_url, headers=headers)
        assert part.status_code == 409
        says("driven_model", part.text, run=run)
        for who, status in (("ben", 404), ("rita", 403)):
            for way, method in (("", "DELETE"), ("/put_aside", "POST")):
                answer = asked(running, f"runs/{run}{way}", tokens[who], method)
                assert answer.status_code == status, (who, way, answer.text)
        assert asked(running, f"runs/{run}/operations", tokens["ben"]).status_code == 404
        assert asked(running, f"runs/{run}/operations", tokens["rita"]).status_code == 200
        done = asked(running, f"runs/{run}", tokens["anna"], "DELETE")
        assert done.json() == {"id": run, "object": "run", "deleted": True}
        assert not [part for part in ("operations", "saved") if (base / run / part).exists()]
        (aside,) = (base / "deleted").iterdir()
        assert (aside / "operations" / "log-000001.bin").exists()
        for answer in (
            anna.step(model, 3),
            anna.retrieve(f"{model}:1"),
            anna.get(f"training_runs/{model}"),
            anna.post("weights_info", {"tinker_path": f"tinker://{model}/weights/a"}),
            asked(running, f"runs/{run}/operations", tokens["anna"]),
        ):
            assert answer.status_code == 404, answer.text
        assert anna.get("training_runs").json()["cursor"]["total_count"] == 0
        twice = anna.post("create_model", anna.create(session))
        assert twice.status_code == 409
        says("driven_deleted", twice.text, run=model)
        assert not (base / run / "operations").exists()
        assert asked(running, f"runs/{run}", tokens["anna"], "DELETE").status_code == 200
        job = running.keeper.index.job_of_run(run)
        assert job is not None
        assert job["lathe"]["is_deleted"]


def test_odd_records_and_a_file_that_was_cut_hide_nothing_else(tmp_path: Path) -> None:
    from jobs.report.operations import RunOperations
    from trainer.operations.operation_log import OperationLog
    from trainer.operations.results import ResultWriter

    log, results = OperationLog(tmp_path), ResultWriter(tmp_path)
    for seq in range(3):
        log.append("optim_step", seq, {"rows": -1, "tokens": "many"})
    results.append(0, {"error": ["x"]}, work={"kind": 7, "sent": float("1e300"), "began": "now"})
    operations = RunOperations(tmp_path)
    operations.follow()
    view = operations.shown()
    assert [one["seq"] for one in view["waiting"]] == [1, 2]
    assert view["failures"][0]["error"] == "['x']"
    assert view["last"][0]["worked_s"] is None
    results.append(1, {}, work={"kind": "optim_step", "sent": 5.0, "began": 4.0})
    operations.follow()
    size = (tmp_path / "results-000001.bin").stat().st_size
    results.append(2, {})
    operations.follow()
    assert operations.totals.num_results == 3
    results.close()
    with (tmp_path / "results-000001.bin").open("r+b") as file:
        file.truncate(size)
    operations.follow()
    assert operations.totals.num_results == 2
    log.close()
