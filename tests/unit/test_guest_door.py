"""Whom the worker of several driven runs sends away, and whether they are to come again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.driven_runs import driven_values
from trainer.errors import EXIT_BAD_INPUT, EXIT_PREEMPTED, LatheError, ResumeError
from trainer.launch.driving import shared_worker
from trainer.launch.driving.shared_worker import GuestDoor
from trainer.training.options import Options
from trainer.training.run_plan import plan


def _changed(*_: Any) -> None:
    raise ResumeError("its base has changed")


FOR_ANOTHER = (EXIT_PREEMPTED, "began with other kernels than")


@pytest.mark.parametrize(
    ("began", "answer"),
    [
        ('{"identity": {}, "cpu_kernels": true}', (EXIT_BAD_INPUT, "its base has changed")),
        ('{"identity": {}}', FOR_ANOTHER),
        ("{", (EXIT_BAD_INPUT, "want which data and base the run began with")),
    ],
)
def test_only_what_another_worker_can_compute_is_to_be_run_again(
    began: str, answer: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose base had changed was sent away as preempted, and came again without end. So was
    one with a damaged data.json and no saved step.
    """
    options = Options(tmp_path / "runs", data_path=tmp_path, cache_dir=tmp_path / "cache")
    of_both = [driven_values(tmp_path, data={"together": 3}, train={"seed": n}) for n in (1, 2)]
    host, guest = (plan(values, options, world=1, rank=0) for values in of_both)
    for one, note in ((host, '{"identity": {}, "cpu_kernels": true}'), (guest, began)):
        one.folder.mkdir(parents=True)
        (one.folder / "data.json").write_text(note)
        (one.folder / "exp_dict.json").write_text(json.dumps(one.values))
    sent_away: list[tuple[int, str]] = []

    def out(_: Any, token: str, code: int, error: LatheError) -> None:
        sent_away.append((code, str(error)))

    monkeypatch.setattr(GuestDoor, "_out", out)
    monkeypatch.setattr(shared_worker, "prepared", _changed)
    monkeypatch.setattr(shared_worker.watch, "record_by", lambda _: None)
    makes: Any = SimpleNamespace(host=SimpleNamespace(plan=host), options=options)
    record: Any = SimpleNamespace(fail=None)
    assert GuestDoor(makes, record).admit({"id": guest.id, "token": "t"}) is None
    ((code, text),) = sent_away
    assert code == answer[0]
    assert answer[1] in text
