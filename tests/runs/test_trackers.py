"""--trackers: TensorBoard and MLflow get what metrics.jsonl gets, over a preemption as well."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.facts import experiment, write_facts
from tests.ranks import run_alone
from tests.wording import refused
from trainer.telemetry.trackers import MlflowRun, tracker_names

NOT_TOLD = ("step", "time", "at")  # of a line of metrics.jsonl


def of_mlflow(tmp_path: Path) -> dict[str, str]:
    """The variables that lead to a store of files."""
    return {
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_EXPERIMENT_NAME": "ours",
    }


def _train(tmp_path: Path, steps: int, environment: dict[str, str]) -> Path:
    """A run of so many steps."""
    os.environ |= environment
    from trainer.launch.run import run
    from trainer.runtime import distributed
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    distributed.init()
    folder = tmp_path / "facts"
    if not folder.is_dir():
        write_facts(folder)
    train = {"steps": steps, "log_every": 1, "eval_every": 3, "save_every": 3}
    values = experiment("causal_lm", folder, train=train)
    given = Options(
        tmp_path / "runs",
        data_path=folder,
        cache_dir=tmp_path / "cache",
        trackers="tensorboard,mlflow",
    )
    planned = plan(values, given, world=1, rank=0)
    assert run(planned, given, Preemption()) == 0
    return planned.folder


def told(folder: Path) -> dict[str, dict[int, float]]:
    """By name and step, what metrics.jsonl says."""
    found: dict[str, dict[int, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        for name, value in values.items():
            if name not in NOT_TOLD and not isinstance(value, str):
                found.setdefault(name, {})[values["step"]] = value
    return found


def test_tensorboard_and_mlflow_get_what_metrics_jsonl_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = of_mlflow(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    folder = run_alone(_train, tmp_path, 6, environment)
    wanted = told(folder)
    assert {"loss", "valid/loss"} <= set(wanted)
    same(in_tensorboard(folder), wanted)
    run, history = in_mlflow()
    same(history, wanted)
    assert run.info.status == "FINISHED"
    assert run.data.tags["lathe.exp_id"] == folder.name
    assert run.data.params["train.steps"] == "6"


def in_tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        name: {one.step: one.value for one in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }


def in_mlflow() -> tuple[Any, dict[str, dict[int, float]]]:
    from mlflow import MlflowClient

    client = MlflowClient()
    known = client.get_experiment_by_name("ours")
    assert known is not None
    (run,) = client.search_runs([known.experiment_id])
    return run, {
        name: {one.step: one.value for one in client.get_metric_history(run.info.run_id, name)}
        for name in run.data.metrics
    }


def same(found: dict[str, dict[int, float]], wanted: dict[str, dict[int, float]]) -> None:
    """The same numbers, as far as fp32 tells (TensorBoard's)."""
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].keys() == values.keys(), name
        assert all(
            math.isclose(found[name][step], value, rel_tol=1e-6, abs_tol=1e-12)
            for step, value in values.items()
        ), name


def test_a_resumed_run_goes_on_in_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = of_mlflow(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run_alone(_in_two_parts, tmp_path, environment)
    assert in_tensorboard(tmp_path)["loss"] == {1: 3.0, 2: 2.0, 3: 1.0}
    run, history = in_mlflow()
    assert history["loss"] == {1: 3.0, 2: 2.0, 3: 1.0}
    assert run.info.status == "FINISHED"


def _in_two_parts(folder: Path, environment: dict[str, str]) -> None:
    """Three steps, stopped by a signal; step 3 is lost, and done again with another loss."""
    os.environ |= environment
    from trainer.telemetry.run_record import RunRecord
    from trainer.telemetry.trackers import TRACKERS, tracked_runs

    def record() -> RunRecord:
        return RunRecord(
            folder,
            total=3,
            others=lambda: tracked_runs(TRACKERS, folder, name="n", exp_id="1" * 32, values={}),
        )

    first = record()
    for step, loss in ((1, 3.0), (2, 2.0), (3, 9.0)):
        first.log(step, loss=loss)
    first.status("preempted")
    first.close()
    second = record()
    second.resume(2)
    second.log(3, loss=1.0)
    second.status("succeeded")
    second.close()


def test_a_tracker_that_is_away_costs_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = MlflowRun("name", "1" * 32, {})
    run.log(1, {"loss": 1.0})
    run.close(0)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    ours = [record for record in warnings if record.name.startswith("trainer")]
    assert len(ours) == 1
    assert "MlflowRun: " in ours[0].getMessage()
    assert "Training goes on without it." in ours[0].getMessage()


def test_an_unknown_tracker_is_refused() -> None:
    assert tracker_names(None) == ()
    assert tracker_names("mlflow, tensorboard") == ("mlflow", "tensorboard")
    with refused("tracker_unknown", tracker="tensorbord", nearest="tensorboard"):
        tracker_names("tensorbord")
