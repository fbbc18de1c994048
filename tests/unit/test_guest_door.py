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


@pytest.mark.parametrize("has_kernels", [True, False])
def test_only_what_another_worker_can_compute_is_to_be_run_again(
    has_kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose base had changed was sent away as preempted, and came again without end."""
    options = Options(tmp_path / "runs", data_path=tmp_path, cache_dir=tmp_path / "cache")
    of_both = [driven_values(tmp_path, data={"together": 3}, train={"seed": n}) for n in (1, 2)]
    host, guest = (plan(values, options, world=1, rank=0) for values in of_both)
    for one, has in ((host, True), (guest, has_kernels)):
        one.folder.mkdir(parents=True)
        began = {"identity": {}, **({"cpu_kernels": True} if has else {})}
        (one.folder / "data.json").write_text(json.dumps(began))
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
    assert code == (EXIT_BAD_INPUT if has_kernels else EXIT_PREEMPTED)
    assert ("its base has changed" if has_kernels else "began with other kernels than") in text
