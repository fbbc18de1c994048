"""--test of a run that has reached its end: it is sent once more, to score the test split alone."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from jobs.job_state import Observed
from jobs.record.paths import BaseFolder, RunFolder
from jobs.submit.control import Again, reconcile
from jobs.submit.group import submit
from jobs.submit.request import Request
from tests.jobs.test_sending import Memory, request, rows


@pytest.fixture
def base(tmp_path: Path) -> BaseFolder:
    return BaseFolder(tmp_path / "base")


def finish(folder: RunFolder, model: str = "final") -> None:
    """What a training leaves that has reached its end."""
    (folder.path / model).mkdir(parents=True)
    (folder.path / model / "lathe.json").write_text(f'{{"format": 1, "of": "{model}"}}')
    folder.status.write_text(json.dumps({"state": "succeeded", "step": 1}))


def score(folder: RunFolder, model: str = "final") -> None:
    """What the test of its split leaves."""
    weights = hashlib.sha256((folder.path / model / "lathe.json").read_bytes()).hexdigest()
    (folder.path / "test.json").write_text(json.dumps({"weights": weights}))


def end(folder: RunFolder, scheduler: Memory, code: int, **changes: str) -> None:
    """The end of the last attempt, as its wrapper and its scheduler know it."""
    number = len(list((folder.path / "attempts").iterdir()))
    kind = {0: "succeeded", 75: "preempted"}.get(code, "failed")
    document = {"code": code, "kind": kind, "attempt": number, **changes}
    folder.attempt(number).exit.write_text(json.dumps(document))
    scheduler.states[str(number - 1)] = Observed("succeeded" if not code else "failed")


def action(asked: Request) -> str:
    (result,) = submit(asked)
    return result.action


def test_a_run_that_is_done_is_sent_once_more_for_its_test(base: BaseFolder) -> None:
    scheduler = Memory()
    plain, tested = request(base, scheduler), request(base, scheduler, flags=["--test"])
    (name,) = plain.by_id
    folder = base.run(name)
    assert action(plain) == "send"
    finish(folder)
    end(folder, scheduler, 0)
    assert action(plain) == "skip"
    (result,) = submit(tested)
    assert (result.action, result.is_bad) == ("send", False)
    assert len(scheduler.sent) == 2
    assert action(tested) == "skip", "that one is alive"
    end(folder, scheduler, 75)
    again = Again(base, lambda name: scheduler)
    assert [one.action for one in reconcile(again)] == ["send"], "it was preempted"
    score(folder)
    end(folder, scheduler, 0)
    assert rows(base, scheduler)[0].state == "succeeded"
    assert action(tested) == action(plain) == "skip"
    finish(folder, "best")  # other weights are exported now
    assert action(tested) == "send"


def test_a_run_by_hand_is_sent_for_its_test_and_not_again_where_it_has_no_rows(
    base: BaseFolder,
) -> None:
    scheduler = Memory()
    plain, tested = request(base, scheduler), request(base, scheduler, flags=["--test"])
    (name,) = plain.by_id
    finish(base.run(name))
    assert action(plain) == "skip"
    assert action(tested) == "send"
    end(base.run(name), scheduler, 2, reason="there is no test split")
    (result,) = submit(tested)
    assert result.action == "skip"
    assert "there is no test split" in result.text
    assert action(plain) == "skip"
    assert reconcile(Again(base, lambda name: scheduler)) == []
