"""A scheduler that hangs keeps nobody else waiting."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import Unreachable
from jobs.job_state import Observed
from jobs.record import patience
from jobs.record.patience import PatientBackends
from jobs.record.times import now
from tests.serve.conftest import serving, wait_until
from tests.wording import refused
from trainer.config.identity import digest, exp_id


class Scheduler:
    """One that answers when it is let."""

    def __init__(self) -> None:
        self.may_answer, self.num_asked = threading.Event(), 0
        self.error: Exception | None = None

    def query(self, ids: Sequence[str]) -> dict[str, Observed]:
        self.num_asked += 1
        self.may_answer.wait(60)
        if self.error is not None:
            raise self.error
        return {one: Observed("running") for one in ids}


def test_the_last_answer_counts_while_the_next_one_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "WAIT_S", 0.05)
    scheduler: Any = Scheduler()
    asked = PatientBackends(lambda name: scheduler)("slurm")
    with refused("backend_silent", backend="slurm"):
        asked.query(["1"])
    with pytest.raises(Unreachable):
        asked.query(["1"])
    assert scheduler.num_asked == 1  # the first question still stands
    scheduler.may_answer.set()

    def seen() -> set[str]:
        with suppress(Unreachable):  # the first question's answer is on its way
            return set(asked.query(["1", "2"]))
        return set()

    wait_until(seen, lambda found: found == {"1", "2"})
    scheduler.may_answer.clear()
    assert asked.query(["2"]).keys() == {"1", "2"}
    with pytest.raises(Unreachable):
        asked.query(["2", "3"])  # of 3 nothing was ever said, which is not that it is lost
    scheduler.error = Unreachable("squeue fell over")
    scheduler.may_answer.set()
    with pytest.raises(Unreachable) as caught:
        wait_until(lambda: asked.query(["2"]), lambda found: False, within_s=5)
    assert str(caught.value) == "squeue fell over"


def sent_to_slurm(base: Path) -> None:
    """A run that Slurm had when its record was written last."""
    values = {"task": "causal_lm", "train": {"steps": 1}}
    folder = base / exp_id(values)
    folder.mkdir(parents=True)
    token = f"ft_{folder.name[:12]}_abcdef_1"
    events: list[dict[str, Any]] = [
        {
            "event": "created",
            "exp_id": folder.name,
            "digest": digest(values),
            "group": "g",
            "nonce": "abcdef",
        },
        {
            "event": "intent",
            "attempt": 1,
            "token": token,
            "name": token,
            "index": None,
            "backend": "slurm",
            "by": "t:1",
        },
        {"event": "submitted", "attempt": 1, "id": "7", "adopted": False},
    ]
    (folder / "exp_dict.json").write_text(json.dumps(values))
    lines = [json.dumps({"at": now(), **event}) + "\n" for event in events]
    (folder / "job.jsonl").write_text("".join(lines))


def test_a_service_goes_on_while_slurm_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: Path
) -> None:
    fifo, programs = tmp_path / "fifo", tmp_path / "bin"
    os.mkfifo(fifo)
    programs.mkdir()
    (programs / "squeue").write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\ncat {fifo}\n")
    (programs / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(patience, "WAIT_S", 0.2)
    base = tmp_path / "base"
    sent_to_slurm(base)
    with serving(base) as service:
        index = service.keeper.index
        wait_until(lambda: (tmp_path / "asked").exists(), bool)
        values = {"task": "causal_lm", "train": {"steps": 2}}
        hand = base / exp_id(values)
        hand.mkdir()
        (hand / "exp_dict.json").write_text(json.dumps(values))
        (hand / "status.json").write_text('{"state": "succeeded", "step": 2, "total": 2}')
        wait_until(lambda: index.run(hand.name), bool)
        wait_until(lambda: "has not answered" in str(index.runs(None)), bool)
        assert (tmp_path / "asked").read_text() == "asked\n"  # the first squeue still hangs
        # whoever asked goes away
        with fifo.open("w") as file:
            file.write("")
