"""Driven runs and a disk that is full: what was acknowledged is run when it has room again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.record.paths import BaseFolder
from jobs.record.state_table import BAD_INPUT
from jobs.serve.steps.catalogue import archives
from jobs.serve.steps.upkeep import driven_jobs
from jobs.serve.steps.upkeep.driven_jobs import DrivenJobs, last_operation
from tests.serve.conftest import serving
from tests.serve.driven_stub import DrivenStub
from tests.serve.driving import driver
from tests.serve.test_steps_dialect import offers
from tests.serve.unworked import new_run, unworked, work
from trainer.files.atomic import write_json
from trainer.operations.operation_log import FOLDER, LOG, OperationLog
from trainer.operations.records import RecordFiles
from trainer.operations.results import ResultWriter


def test_a_file_that_the_disk_refused_to_fill_hides_no_operation(tmp_path: Path) -> None:
    """The next file of a log is made before its first record is written."""
    folder = tmp_path / FOLDER
    log = OperationLog(folder)
    log.append("create", 0, {})
    log.append("optim_step", 1, {})
    log.close()
    results = ResultWriter(folder)
    results.append(0, {})
    results.close()
    assert DrivenJobs().has_work(tmp_path)
    RecordFiles(folder, LOG).path(2).touch()
    assert last_operation(folder) == 1
    assert DrivenJobs().has_work(tmp_path)


def test_a_run_that_a_full_disk_ended_rests_until_there_is_room_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, base = DrivenJobs(), BaseFolder(tmp_path)
    row: Any = SimpleNamespace(state="failed", exp_id="run", attempt=1, reason=f"{BAD_INPUT}log")

    def rest(free: int) -> str | None:
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(driven_jobs.shutil, "disk_usage", lambda _: usage)
        return jobs.rest(base, row, reserve=100)

    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "status.json", {"error": "rank 1: StorageError: no space left"})
    assert rest(free=100) == ""
    assert rest(free=101) is None
    write_json(tmp_path / "run" / "status.json", {"error": "ConfigError: no such base"})
    assert rest(free=101) == row.reason


def test_an_archive_that_does_not_fit_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with unworked(tmp_path / "base") as running:
        client = driver(running)
        model = new_run(client, client.session())
        client.post("save_weights", {"model_id": model, "path": "a", "seq_id": 1})
        work(running, model)
        url = f"training_runs/{model}/checkpoints/weights/a/archive"
        assert client.get(url).status_code == 200
        monkeypatch.setattr(archives.tarfile.TarFile, "add", full)
        assert client.get(url).status_code == 507
        assert not [*(running.base / "_service/steps").glob(".archive-*")]


def test_the_next_start_of_a_run_that_a_full_disk_ended_runs_what_waits(
    tmp_path: Path, queue: Path
) -> None:
    stub = DrivenStub(tmp_path / "stub")
    stub.says('{"disk_full_at": "optim_step"}')
    with stub, serving(tmp_path / "base", python=stub.python, models=offers()) as running:
        client = driver(running)
        model = client.run(client.session())
        client.rows(model, 1)
        assert client.result(client.step(model, 2)) == {"metrics": {"w": pytest.approx(0.06)}}
        assert len(stub.starts()) == 2
