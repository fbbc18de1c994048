"""Folders that cannot be read, beside others: `status`, `results` and `reconcile` tell of each by
name, and deal with the others as if it were not there.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from jobs.cli import app
from jobs.job_state import Observed
from jobs.record.paths import BaseFolder, RunFolder
from jobs.record.status import survey
from jobs.report import table
from jobs.report.html import report
from jobs.report.scores import gather
from jobs.submit import control
from jobs.submit.group import preview, submit
from tests.jobs.odd_folders import (
    as_stranger,
    deep_at,
    folder_at,
    huge_at,
    loop_at,
    pipe_at,
    status_of,
    text_at,
    together,
)
from tests.jobs.test_sending import Memory, request
from tests.jobs.test_status import Scheduler, submitted, write

STARTED = text_at("attempts/1/started-1.json", '{"at": "2026-11-23T07:00:00+00:00"}')
CREATED = (
    '{"event": "created", "exp_id": "%s", "digest": "d", "group": %s, "nonce": "n", "at": "x"}\n'
)
# name -> what lies in the folder of an experiment that was submitted. All are rows in state "held".
SUBMITTED = {
    "job.jsonl is a folder": folder_at("job.jsonl"),
    "job.jsonl is a link to itself": loop_at("job.jsonl"),
    "job.jsonl is a pipe": pipe_at("job.jsonl"),
    "exit.json is a pipe": together(STARTED, pipe_at("attempts/1/exit.json")),
    "heartbeat.json is a pipe": together(STARTED, pipe_at("attempts/1/heartbeat.json")),
    "metrics.jsonl is a pipe": together(STARTED, pipe_at("metrics.jsonl")),
    "job.jsonl has a terabyte": huge_at("job.jsonl"),
    "exit.json has a terabyte": together(STARTED, huge_at("attempts/1/exit.json")),
    "job.jsonl is nested deeply": deep_at("job.jsonl"),
    "job.jsonl is of another program": text_at("job.jsonl", "\0\0\n{}\n"),
    "the record of another experiment": text_at("job.jsonl", CREATED % ("e" * 32, '"g"')),
    "a group that is a number": lambda run: run.record.write_text(
        CREATED % (run.path.name, "5")
    ) and None,
    "metrics.jsonl is a link to itself": together(STARTED, loop_at("metrics.jsonl")),
    "metrics.jsonl is a folder": together(STARTED, folder_at("metrics.jsonl")),
    "a spec whose job is a list": together(
        STARTED, text_at("attempts/1/spec.json", '{"job": [1]}')
    ),
    "a spec without end": together(
        STARTED, text_at("attempts/1/spec.json", '{"job": {"resources": {"gpu": 1}, "nodes": 1e999}}')
    ),
    "a host that is a list": text_at("attempts/1/started-1.json", '{"at": 5, "host": [1]}'),
    "a reason that is a list": together(
        STARTED, text_at("attempts/1/exit.json", '{"code": 1, "kind": "failed", "reason": [1]}')
    ),
}  # fmt: skip
# The same of an experiment that was run by hand.
BY_HAND = {
    "status.json is a folder": folder_at("status.json"),
    "status.json is a link to itself": loop_at("status.json"),
    "status.json is a pipe": pipe_at("status.json"),
    "metrics.jsonl is a pipe, by hand": pipe_at("metrics.jsonl"),
    "status.json has a terabyte": huge_at("status.json"),
    "status.json is nested deeply": deep_at("status.json"),
    "a time that is a number": text_at("status.json", status_of(updated_at=5)),
    "a host that is a number": text_at("status.json", status_of(host=5)),
    "metrics.jsonl is a link to itself": loop_at("metrics.jsonl"),
    "score_list.json is a folder": together(
        folder_at("score_list.json"), text_at("metrics.jsonl", '{"a": "%s"}\n' % ("x" * 300_000))
    ),
}
# What is odd but does not keep its row from being shown as it is.
HARMLESS = {
    "exp_dict.json is a folder": folder_at("exp_dict.json"),
    "exp_dict.json is a pipe": pipe_at("exp_dict.json"),
    "exp_dict.json is nested deeply": deep_at("exp_dict.json"),
    "exp_dict.json is nested as deeply as Python reads": text_at(
        "exp_dict.json", '{"a":' * 900 + "1" + "}" * 900
    ),
    "metrics.jsonl has a terabyte": huge_at("metrics.jsonl"),
    "metrics.jsonl is nested deeply": deep_at("metrics.jsonl"),
    "a process that is a text": text_at("status.json", status_of(state="running", process="x")),
    "a number of steps without end": text_at("status.json", status_of(total=10**400)),
    "half of an emoji": text_at("status.json", status_of(state="failed", error="\ud83d")),
}
GOOD = 2


@pytest.fixture
def base(tmp_path: Path) -> BaseFolder:
    return BaseFolder(tmp_path / "results")


def by_hand(base: BaseFolder, exp_id: str) -> RunFolder:
    folder = base.run(exp_id)
    write(folder.exp_dict, {"task": "t", "train": {"seed": int(exp_id, 16)}})
    folder.status.write_text(status_of())
    folder.metrics.write_text('{"step": 1, "loss": 1.0}\n')
    return folder


def world(base: BaseFolder, *, has_odd: bool = True) -> dict[str, str]:
    """Two good experiments of each kind, and one odd one for each poison: exp_id -> its poison."""
    odd: dict[str, str] = {}
    for number in range(GOOD):
        submitted(base, f"{number:032x}", str(number))
        by_hand(base, f"{100 + number:032x}")
    if not has_odd:
        return odd
    for number, (name, poison) in enumerate(SUBMITTED.items()):
        exp_id = f"{200 + number:032x}"
        write(base.run(exp_id).exp_dict, {"task": "t"})
        poison(submitted(base, exp_id, "9"))
        odd[exp_id] = name
    for number, (name, poison) in enumerate({**BY_HAND, **HARMLESS}.items()):
        exp_id = f"{300 + number:032x}"
        poison(by_hand(base, exp_id))
        odd[exp_id] = name
    return odd


def test_status_shows_every_odd_folder_by_name_and_the_others_as_if_it_were_not_there(
    base: BaseFolder, tmp_path: Path
) -> None:
    alone = BaseFolder(tmp_path / "alone")
    world(alone, has_odd=False)
    odd = world(base)
    for record_changes in (True, False, True):  # what is odd must not get on record, either
        rows = {
            row.exp_id: row
            for row in survey(
                base,
                backend_of=Scheduler(),
                include_unsubmitted=True,
                record_changes=record_changes,
            )
        }
        held = {odd[exp_id] for exp_id, row in rows.items() if row.read_error is not None}
        assert held == {*SUBMITTED, *BY_HAND}
        assert {name for exp_id, name in odd.items() if exp_id in rows} == set(odd.values())
    for row in rows.values():
        if row.read_error is not None:
            assert (row.state, row.read_error) == ("held", "permanent")
            assert row.exp_id in (row.reason or ""), row.reason  # it names the file or the folder
    others = survey(alone, backend_of=Scheduler(), include_unsubmitted=True)
    assert len(others) == 2 * GOOD
    for row in others:
        same = rows[row.exp_id]
        assert (same.state, same.step, same.metrics) == (row.state, row.step, row.metrics)
    # nobody waits for what cannot be read
    assert not any(row.is_live for row in rows.values() if row.read_error is not None)
    results = gather(base)
    screen = Console(file=io.StringIO(), width=100)
    table.show(list(rows.values()), screen)
    json.dumps(table.as_json(list(rows.values())))
    assert "cannot be read" in report(base, list(rows.values()), results)


def test_results_name_every_odd_folder_and_hold_the_others(base: BaseFolder) -> None:
    odd = world(base)
    results = gather(base)
    good = {f"{100 + number:032x}" for number in range(GOOD)}
    assert good <= {result.exp_id for result in results.results}
    told = {odd[exp_id]: reason for exp_id, reason in results.unreadable.items()}
    for name in ("exp_dict.json is a folder", "exp_dict.json is nested deeply"):
        assert "exp_dict.json" in told[name]
    assert "job.jsonl" in told["job.jsonl is a folder"]
    assert all(exp_id in reason for exp_id, reason in results.unreadable.items()), (
        results.unreadable
    )


def test_reconcile_tells_of_every_odd_folder_and_acts_on_the_others(base: BaseFolder) -> None:
    odd = world(base)
    scheduler = Memory()
    sent = [result.exp_id for result in submit(request(base, scheduler, count=GOOD))]
    scheduler.states = dict.fromkeys(scheduler.states, Observed("preempted"))
    done = control.reconcile(control.Again(base, lambda name: scheduler))
    results = {result.exp_id: result for result in done}
    assert {odd[name] for name, one in results.items() if one.action == "unread"} == {*SUBMITTED}
    assert [(results[name].action, results[name].is_bad) for name in sent] == [("send", False)] * 2
    assert len(scheduler.sent) == 2 * GOOD


def test_a_submission_sends_no_second_copy_of_what_it_cannot_read(base: BaseFolder) -> None:
    scheduler = Memory()
    first, *others = submit(request(base, scheduler, count=GOOD + 1))
    SUBMITTED["metrics.jsonl is a link to itself"](base.run(first.exp_id))
    for use_array in (False, True):
        asked = request(base, scheduler, count=GOOD + 1, use_array=use_array)
        for results in (preview(asked), submit(asked)):
            actions = {result.exp_id: result.action for result in results}
            assert actions == {first.exp_id: "failed", **{one.exp_id: "skip" for one in others}}
            (text,) = [result.text for result in results if result.is_bad]
            assert f"{first.exp_id}/metrics.jsonl: Too many levels of symbolic links" in text
    assert len(scheduler.sent) == GOOD + 1


@pytest.fixture
def shared_base() -> Iterator[BaseFolder]:
    """A folder that everybody may enter."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield BaseFolder(path)
    shutil.rmtree(path)


def lathe(*words: str) -> Any:
    return CliRunner().invoke(app, [*words])


def test_a_colleagues_private_run_folder_ends_no_command(shared_base: BaseFolder) -> None:
    by_hand(shared_base, f"{1:032x}")
    private = by_hand(shared_base, f"{2:032x}")
    words = ("-sb", str(shared_base.path))
    for command in ("status", "results", "reconcile"):  # so that nothing is imported as a stranger
        lathe(command, *words)
    with as_stranger(private.path):
        done = {name: lathe(name, *words) for name in ("status", "results", "reconcile")}
    assert {name: one.exit_code for name, one in done.items()} == dict.fromkeys(done, 0)
    for one in done.values():
        assert "Permission denied" in one.output, one.output
    assert "succeeded" in done["status"].output
