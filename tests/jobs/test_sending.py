"""Sending, adopting, giving up: against a scheduler that lives in memory and loses what it is told
to lose.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from jobs.config import JobConfig
from jobs.errors import NotYet, Refused, Unreachable
from jobs.job_state import ENDED_BADLY, Observed
from jobs.protocol import Finding, JobSpec, Rendered, Traits
from jobs.record import events as record
from jobs.record.paths import BaseFolder
from jobs.record.row import Row
from jobs.record.status import survey
from jobs.submit.control import Again, again, cancel, reconcile, reset
from jobs.submit.group import submit
from jobs.submit.policy import Limits
from jobs.submit.request import Request
from tests.wording import refused

TINY = {
    "task": "causal_lm",
    "base": "x",
    "train": {"steps": 1, "global_batch": 1, "micro_batch": 1, "precision": "fp32"},
    "optim": {"lr": 1.0},
    "data": {"source": "stdlib_docs", "max_tokens": 8},
}


@dataclass
class Memory:
    """A scheduler: names it has accepted, what became of them, and what goes wrong next."""

    name: ClassVar[str] = "local"
    traits: ClassVar[Traits] = Traits(runs_here=True, shares_disk=True)
    validation: ClassVar[str] = "in memory"
    ids: dict[str, str] = field(default_factory=dict)  # token -> id
    states: dict[str, Observed] = field(default_factory=dict)  # id -> what it says
    sent: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    lose_replies: int = 0
    lose_requests: int = 0
    refuse: str | None = None
    room: int | None = None  # how many more jobs it takes for now

    def check(self) -> list[Finding]:
        return []

    def render(self, spec: JobSpec) -> Rendered:
        return Rendered(spec.token, "rendered.txt", spec.token)

    def render_array(
        self, specs: Sequence[JobSpec], *, token: str, index_file: str, max_parallel: Any
    ) -> Rendered:
        return Rendered(token, "rendered.txt", token)

    def max_array(self) -> int:
        return 100

    def element(self, array_id: str, index: int) -> str:
        return f"{array_id}_{index}"

    def rehearse(self, rendered: Rendered) -> str | None:
        return None

    def submit(self, rendered: Rendered) -> str:
        if self.refuse is not None:
            raise Refused(self.refuse)
        if self.room == 0:
            raise NotYet("QOSMaxSubmitJobPerUserLimit")
        if self.room is not None:
            self.room -= 1
        self.sent.append(rendered.token)
        if self.lose_requests:
            self.lose_requests -= 1
            raise Unreachable("no answer")
        job_id = self.ids.setdefault(rendered.token, str(len(self.ids)))
        self.states.setdefault(job_id, Observed("queued"))
        if self.lose_replies:
            self.lose_replies -= 1
            raise Unreachable("no answer")
        return job_id

    def find(self, token: str) -> list[str]:
        return [self.ids[token]] if token in self.ids else []

    def query(self, ids: Sequence[str]) -> dict[str, Observed]:
        return {job_id: self.states[job_id] for job_id in ids if job_id in self.states}

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)

    def logs(self, job_id: str, *, follow: bool) -> Iterator[str]:
        return iter(())


@pytest.fixture
def scheduler() -> Memory:
    return Memory()


@pytest.fixture
def base(tmp_path: Path) -> BaseFolder:
    return BaseFolder(tmp_path / "base")


def request(base: BaseFolder, scheduler: Memory, count: int = 1, **changes: Any) -> Request:
    experiments = [{**TINY, "train": {**TINY["train"], "seed": seed}} for seed in range(count)]  # type: ignore[dict-item]
    asked = Request(
        base=base,
        group="g",
        experiments=experiments,
        job=JobConfig(),
        backend=scheduler,
        backend_of=lambda name: scheduler,
        workdir=base.path,
        snapshot=None,
        python="python",
        resend_s=0.0,
    )
    return replace(asked, **changes)


def rows(base: BaseFolder, scheduler: Memory) -> list[Row]:
    return survey(base, backend_of=lambda name: scheduler)


@pytest.mark.parametrize("use_array", [False, True], ids=["alone", "array"])
def test_the_intent_and_the_spec_are_on_the_disk_before_anything_is_sent(
    base: BaseFolder, monkeypatch: pytest.MonkeyPatch, use_array: bool
) -> None:
    durable: dict[str, str] = {}
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        durable[path.name] = path.read_text()

    @dataclass
    class Watched(Memory):
        """A scheduler that looks at what a power cut at this moment would leave behind."""

        def submit(self, rendered: Rendered) -> str:
            (line,) = [line for line in durable["job.jsonl"].splitlines() if '"intent"' in line]
            assert json.loads(line)["name"] == rendered.token
            assert any(name.startswith(".spec.json.") for name in durable)
            return super().submit(rendered)

    monkeypatch.setattr(os, "fsync", recorded)
    (result,) = submit(request(base, Watched(), use_array=use_array))
    assert (result.action, result.is_bad) == ("send", False), result.text


def test_a_lost_reply_is_adopted_and_nothing_is_sent_twice(
    base: BaseFolder, scheduler: Memory
) -> None:
    scheduler.lose_replies = 1
    (result,) = submit(request(base, scheduler))
    assert (result.action, result.is_bad) == ("settle", False)
    assert len(scheduler.sent) == 1
    (row,) = rows(base, scheduler)
    assert (row.job_id, row.history[0].was_adopted) == ("0", True)


def test_what_was_run_to_its_end_by_hand_is_left_alone_and_gets_no_record(
    base: BaseFolder, scheduler: Memory
) -> None:
    asked = request(base, scheduler)
    folder = base.run(next(iter(asked.by_id)))
    folder.path.mkdir(parents=True)
    folder.exp_dict.write_text(json.dumps(asked.experiments[0]))
    folder.status.write_text(json.dumps({"state": "succeeded", "step": 1, "total": 1}))
    (result,) = submit(asked)
    assert (result.action, result.state, scheduler.sent) == ("skip", "succeeded", [])
    assert not folder.record.exists()


def test_a_lost_request_is_sent_again_under_the_same_name(
    base: BaseFolder, scheduler: Memory
) -> None:
    scheduler.lose_requests = 2
    submit(request(base, scheduler, resend_s=0.05))
    assert len(scheduler.sent) == 3
    assert len(set(scheduler.sent)) == 1
    events = [json.loads(line)["event"] for line in rows_record(base)]
    assert events.count("resent") == 2


def rows_record(base: BaseFolder) -> list[str]:
    return base.submitted_runs()[0].record.read_text().splitlines()


def test_nothing_is_sent_again_before_its_time(base: BaseFolder, scheduler: Memory) -> None:
    scheduler.lose_requests = 99
    submit(
        request(base, scheduler, resend_s=0.5)
    )  # gives up after three times as long and a second
    assert 2 <= len(scheduler.sent) <= 6


def test_a_refused_job_is_sent_anew_when_the_cause_is_mended(
    base: BaseFolder, scheduler: Memory
) -> None:
    scheduler.refuse = "no such partition"
    (result,) = submit(request(base, scheduler))
    assert (result.is_bad, result.text) == (True, "refused: no such partition")
    scheduler.refuse = None
    (result,) = submit(request(base, scheduler))
    assert not result.is_bad
    assert [sent.number for sent in rows(base, scheduler)[0].history] == [1, 2]
    assert reconcile(Again(base, lambda name: scheduler)) == []


@pytest.mark.parametrize("use_array", [False, True], ids=["alone", "array"])
def test_what_a_full_scheduler_has_no_room_for_waits_and_reconcile_sends_it(
    base: BaseFolder, scheduler: Memory, use_array: bool
) -> None:
    scheduler.room = 0 if use_array else 2
    results = submit(request(base, scheduler, 5, use_array=use_array, max_parallel=9))
    assert sum(result.action == "wait" for result in results) == (5 if use_array else 3)
    assert not any(result.is_bad for result in results)
    scheduler.room = 0
    before = {folder.path: folder.record.read_bytes() for folder in base.submitted_runs()}
    asked = len(scheduler.sent)
    for _ in range(3):
        done = reconcile(Again(base, lambda name: scheduler))
        assert {result.action for result in done} == {"wait"}
    after = {folder.path: folder.record.read_bytes() for folder in base.submitted_runs()}
    # the one that asks first in each round may learn so for the first time
    grown = [after[path].count(b"\n") - before[path].count(b"\n") for path in after]
    assert sum(grown) <= 2  # of an array, an attempt of its own begins; three rounds add no more
    assert len(scheduler.sent) == asked
    scheduler.room = None
    done = reconcile(Again(base, lambda name: scheduler))
    assert {result.action for result in done} == {"send"}
    found = rows(base, scheduler)
    assert [row.state for row in found] == ["queued"] * 5
    assert len(scheduler.ids) == 5
    assert all(len(row.history) <= 2 for row in found)


def test_the_reason_of_what_waits_for_its_turn_is_shown(
    base: BaseFolder, scheduler: Memory
) -> None:
    scheduler.room = 0
    submit(request(base, scheduler))
    (row,) = rows(base, scheduler)
    assert (row.state, row.reason) == (
        "pending",
        "waits for its turn: QOSMaxSubmitJobPerUserLimit",
    )


def test_a_job_that_arrived_although_it_was_told_to_wait_is_adopted(
    base: BaseFolder, scheduler: Memory
) -> None:
    scheduler.room = 0
    submit(request(base, scheduler))
    folder = base.submitted_runs()[0]
    job = record.read(folder)
    assert job is not None
    assert job.last is not None
    scheduler.ids[job.last.token] = "7"
    scheduler.states["7"] = Observed("running")
    (done,) = reconcile(Again(base, lambda name: scheduler))
    assert done.text == "adopted 7: an earlier submission had sent it"
    assert scheduler.sent == []


def test_an_array_whose_reply_was_lost_is_adopted_element_by_element(
    base: BaseFolder, scheduler: Memory
) -> None:
    scheduler.lose_replies = 1
    submit(request(base, scheduler, 3, use_array=True))
    assert sorted(str(row.job_id) for row in rows(base, scheduler)) == ["0_0", "0_1", "0_2"]
    assert len(scheduler.sent) == 1


def test_an_array_that_never_arrived_is_given_up_before_its_experiments_go_alone(
    base: BaseFolder, scheduler: Memory
) -> None:
    scheduler.lose_requests = 1
    submit(request(base, scheduler, 2, use_array=True))
    assert len(scheduler.sent) == 3
    for folder in base.submitted_runs():
        assert folder.attempt(1).give_up_file.exists()
        assert not folder.attempt(2).give_up_file.exists()


def test_to_cancel_one_element_of_an_unanswered_array_leaves_the_others_alone(
    base: BaseFolder, scheduler: Memory
) -> None:
    scheduler.lose_replies = 1
    submit(
        request(base, scheduler, 3, use_array=True, resend_s=0.0),
    )
    for folder in base.submitted_runs():  # as if the adoption had not been written
        lines = [
            line for line in folder.record.read_text().splitlines(True) if '"submitted"' not in line
        ]
        folder.record.write_text("".join(lines))
    one = rows(base, scheduler)[1]
    cancel(base, [one], lambda name: scheduler)
    index = one.history[0].index
    assert scheduler.cancelled == [f"0_{index}"]


def test_a_cancelled_submission_that_nobody_has_seen_must_not_start_later(
    base: BaseFolder, scheduler: Memory
) -> None:
    scheduler.lose_requests = 99
    submit(request(base, scheduler, resend_s=0.01))
    (row,) = rows(base, scheduler)
    sends = len(scheduler.sent)
    cancel(base, [row], lambda name: scheduler)
    folder = base.submitted_runs()[0]
    assert folder.attempt(1).give_up_file.exists()
    submit(request(base, scheduler))
    reconcile(Again(base, lambda name: scheduler, resend_s=0.0))
    assert len(scheduler.sent) == sends


def test_a_job_that_ends_while_the_scheduler_is_asked_has_not_failed(
    base: BaseFolder, scheduler: Memory
) -> None:
    submit(request(base, scheduler))
    folder = base.submitted_runs()[0]
    query = scheduler.query

    def ends_meanwhile(ids: Sequence[str]) -> dict[str, Observed]:
        folder.attempt(1).exit.write_text(json.dumps({"code": 0, "kind": "succeeded"}))
        scheduler.states["0"] = Observed("succeeded")
        return query(ids)

    scheduler.query = ends_meanwhile  # type: ignore[method-assign]
    assert rows(base, scheduler)[0].state == "succeeded"


def test_an_attempt_that_was_thought_lost_may_not_start_once_another_is_sent(
    base: BaseFolder, scheduler: Memory
) -> None:
    submit(request(base, scheduler))
    scheduler.states["0"] = Observed("failed")
    (failed,) = rows(base, scheduler)
    again(Again(base, lambda name: scheduler, Limits(retry=ENDED_BADLY)), [failed])
    assert len(scheduler.sent) == 2
    first, second = (base.submitted_runs()[0].attempt(number) for number in (1, 2))
    assert (first.give_up_file.exists(), second.give_up_file.exists()) == (True, False)


def test_a_retry_sees_that_the_experiment_has_succeeded_since(
    base: BaseFolder, scheduler: Memory
) -> None:
    submit(request(base, scheduler))
    scheduler.states["0"] = Observed("failed")
    (stale,) = rows(base, scheduler)
    base.submitted_runs()[0].attempt(1).exit.write_text(
        json.dumps({"code": 0, "kind": "succeeded"})
    )
    again(Again(base, lambda name: scheduler, Limits(retry=ENDED_BADLY)), [stale])
    assert len(scheduler.sent) == 1


def test_what_has_started_since_cannot_be_reset(base: BaseFolder, scheduler: Memory) -> None:
    submit(request(base, scheduler))
    with refused("job_is_queued"):
        reset(base, base.submitted_runs()[0].path.name, lambda name: scheduler)


def test_a_record_that_nobody_can_read_can_be_moved_away(
    base: BaseFolder, scheduler: Memory
) -> None:
    submit(request(base, scheduler))
    folder = base.submitted_runs()[0]
    folder.record.write_text('{"event": "created"}\n')
    result = reset(base, folder.path.name, lambda name: scheduler)
    assert result.action == "reset"
    assert not folder.path.exists()
    assert len(list(base.deleted_folder.iterdir())) == 1


def test_a_spec_of_another_version_is_one_clear_error(base: BaseFolder, scheduler: Memory) -> None:
    submit(request(base, scheduler))
    scheduler.states["0"] = Observed("failed")
    spec = base.submitted_runs()[0].attempt(1).spec
    spec.write_text(json.dumps({**json.loads(spec.read_text()), "colour": "blue"}))
    (result,) = again(
        Again(base, lambda name: scheduler, Limits(retry=ENDED_BADLY)), rows(base, scheduler)
    )
    assert "Submit the group again" in result.text
    assert result.is_bad


def test_bad_input_is_sent_again_by_retry_when_what_is_sent_has_changed(
    base: BaseFolder, scheduler: Memory
) -> None:
    submit(request(base, scheduler))
    base.submitted_runs()[0].attempt(1).exit.write_text(
        json.dumps({"code": 2, "kind": "failed", "reason": "no such folder"})
    )
    submit(request(base, scheduler, retry=["failed"]))
    assert len(scheduler.sent) == 1
    submit(request(base, scheduler, retry=["failed"], flags=["--data_path=/"]))
    assert len(scheduler.sent) == 2


def test_retry_sends_no_more_than_the_group_may_have_alive(
    base: BaseFolder, scheduler: Memory
) -> None:
    def fail(row: Row) -> None:
        base.run(row.exp_id).attempt(1).exit.write_text(json.dumps({"code": 1, "kind": "failed"}))

    submit(request(base, scheduler, 2, max_parallel=1))
    fail(next(row for row in rows(base, scheduler) if row.job_id == "0"))
    reconcile(Again(base, lambda name: scheduler))
    fail(next(row for row in rows(base, scheduler) if row.job_id == "1"))
    asked = Again(base, lambda name: scheduler, Limits(retry=("failed",)))
    one, other = rows(base, scheduler)
    assert [row.state for row in (one, other)] == ["failed", "failed"]
    assert [result.action for result in again(asked, [one, other])] == ["send", "wait"]
    waiting = again(asked, [other])
    assert [result.action for result in waiting] == ["wait"], "one that is not named counts, too"
    assert "max_parallel=1" in waiting[0].text


def test_the_limit_of_a_group_holds_over_all_its_submissions(
    base: BaseFolder, scheduler: Memory
) -> None:
    results = submit(request(base, scheduler, 3, max_parallel=2))
    assert sorted(result.action for result in results) == ["send", "send", "wait"]
    everything = Again(base, lambda name: scheduler)
    assert [result.action for result in reconcile(everything)] == ["wait"]
    first = next(row for row in rows(base, scheduler) if row.job_id == "0")
    exit_file = {"code": 0, "kind": "succeeded"}
    base.run(first.exp_id).attempt(1).exit.write_text(json.dumps(exit_file))
    assert [result.action for result in reconcile(everything)] == ["send"]
    assert record.read(base.submitted_runs()[0]) is not None


def refuse_intents(monkeypatch: pytest.MonkeyPatch, name: str, *, is_written: bool) -> None:
    """Let the disk refuse the first intent of one experiment, before or after it has taken it."""
    append, refusals = record.append, [OSError(errno.EIO, "Input/output error", f"{name}.jsonl")]

    def append_or_fail(folder: Any, *events: dict[str, Any], **options: Any) -> None:
        is_intent = folder.path.name == name and events[0]["event"] == "intent"
        if not (is_intent and refusals):
            return append(folder, *events, **options)
        if is_written:
            append(folder, *events, **options)
        raise refusals.pop()

    monkeypatch.setattr(record, "append", append_or_fail)


@pytest.mark.parametrize("is_written", [False, True], ids=["lost", "written"])
def test_an_error_of_one_intent_leaves_that_experiment_out_of_its_array(
    base: BaseFolder, scheduler: Memory, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    asked = request(base, scheduler, 4, use_array=True)
    bad = sorted(asked.by_id)[1]
    refuse_intents(monkeypatch, bad, is_written=is_written)
    results = {result.exp_id: result for result in submit(asked)}
    assert results[bad].action == "failed"
    assert results[bad].text == f"{bad}.jsonl: Input/output error"
    good = sorted(set(results) - {bad})
    assert [results[name].text for name in good] == [f"submitted as 0_{i}" for i in range(3)]
    (token,) = scheduler.ids
    index = json.loads((base.arrays / f"{token}.json").read_text())
    assert [index[str(i)][0] for i in range(3)] == [str(base.run(name).path) for name in good]
    assert [path.stem for path in base.arrays.iterdir()] == [token]
    # each record tells of the very element that runs it, and of no other
    for name in good:
        job = record.read(base.run(name))
        assert job is not None
        assert job.last is not None
        assert index[str(job.last.index)] == [str(base.run(name).path), job.last.number]
    # the one that was left out takes nothing of the array, and is sent next time
    results = {result.exp_id: result for result in submit(asked)}
    assert not results[bad].is_bad, results[bad].text
    assert [row.job_id for row in rows(base, scheduler) if row.exp_id == bad] == [
        "1" if is_written else "1_0"
    ]
    assert len(scheduler.ids) == 2


def test_a_folder_that_refuses_a_file_stops_no_other_member_of_its_array(
    base: BaseFolder, scheduler: Memory
) -> None:
    asked = request(base, scheduler, 3, use_array=True)
    bad = sorted(asked.by_id)[0]
    base.run(bad).path.mkdir(parents=True)
    (base.run(bad).path / "attempts").write_text("no folder")
    results = {result.exp_id: result for result in submit(asked)}
    assert results[bad].action == "failed"
    assert "attempts" in results[bad].text
    assert len([result for result in results.values() if result.action == "send"]) == 2
    assert len(scheduler.ids) == 1


@pytest.mark.parametrize("use_array", [False, True], ids=["alone", "array"])
def test_what_a_program_throws_while_it_sends_is_told_and_settled_later(
    base: BaseFolder, scheduler: Memory, monkeypatch: pytest.MonkeyPatch, use_array: bool
) -> None:
    def fail(rendered: Rendered) -> str:
        raise OSError(errno.E2BIG, "Argument list too long", "sbatch")

    asked = request(base, scheduler, 3, use_array=use_array)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "submit", fail)
        results = submit(asked)
    assert {result.text for result in results} == {"sbatch: Argument list too long"}
    assert {result.action for result in results} == {"failed"}
    assert {row.state for row in rows(base, scheduler)} == {"submitting"}
    assert not any(result.is_bad for result in submit(asked))
    assert {row.state for row in rows(base, scheduler)} == {"queued"}


def test_an_answer_that_one_record_refuses_is_noted_in_the_others(
    base: BaseFolder, scheduler: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(base, scheduler, 3, use_array=True)
    bad = sorted(asked.by_id)[1]
    append = record.append

    def append_or_fail(folder: Any, *events: dict[str, Any], **options: Any) -> None:
        if folder.path.name == bad and events[0]["event"] == "submitted":
            raise OSError(errno.ENOSPC, "No space left on device", str(folder.record))
        append(folder, *events, **options)

    with monkeypatch.context() as patch:
        patch.setattr(record, "append", append_or_fail)
        results = {result.exp_id: result for result in submit(asked)}
    assert [results[name].is_bad for name in sorted(results)] == [False, True, False]
    assert results[bad].is_transient
    (adopted,) = reconcile(Again(base, lambda name: scheduler))
    assert adopted.exp_id == bad
    assert [str(row.job_id) for row in rows(base, scheduler) if row.exp_id == bad] == ["0_1"]
    assert len(scheduler.sent) == 1


def test_an_array_gives_up_the_attempt_before_which_may_still_stand_in_a_queue(
    base: BaseFolder, scheduler: Memory
) -> None:
    submit(request(base, scheduler, 2, use_array=True))
    scheduler.states = {"0_0": Observed("failed"), "0_1": Observed("failed")}
    submit(request(base, scheduler, 2, use_array=True, retry=("failed",)))
    for folder in base.submitted_runs():
        assert folder.attempt(1).give_up_file.exists()
        assert not folder.attempt(2).give_up_file.exists()


def test_a_folder_that_vanishes_before_it_is_looked_at_stops_no_reconcile(
    base: BaseFolder, scheduler: Memory
) -> None:
    submit(request(base, scheduler, 2))
    scheduler.lose_requests = 0
    first, second = rows(base, scheduler)
    unread = replace(first, read_error="permanent", state="held")
    (base.path / first.exp_id).rename(base.path / "elsewhere")
    results = again(Again(base, lambda name: scheduler), [unread, second])
    assert [result.action for result in results] == ["failed", "skip"]
    assert first.exp_id in results[0].text
