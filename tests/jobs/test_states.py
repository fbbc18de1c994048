"""Three witnesses, one verdict: the table of jobs/record/verdict.py, and what is done about each
state.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from jobs.job_state import ENDED_BADLY, JobState, Observed
from jobs.record.events import Job, Sent
from jobs.record.row import Row
from jobs.record.verdict import AttemptFiles, judge
from jobs.submit.policy import Limits, decide

LONG_AGO = "2020-01-01T00:00:00+00:00"


def ago(seconds: float) -> str:
    return (datetime.now(timezone.utc) - timedelta(seconds=seconds)).isoformat()


def job(**changes: Any) -> Job:
    sent = Sent(
        1,
        "ft_a_b_1",
        "ft_a_b_1",
        None,
        "slurm",
        at=LONG_AGO,
        id="8",
        submitted_at=LONG_AGO,
        state="running",
    )
    return Job("a" * 32, "d", "g", "b", LONG_AGO, attempts=(replace(sent, **changes),))


def exit_file(code: int, **more: Any) -> AttemptFiles:
    return AttemptFiles(exit={"code": code, "kind": "failed", "reason": None, **more}, starts=1)


ALIVE = AttemptFiles(starts=1, started={"host": "n1"}, heartbeat_age_s=20)
SILENT = AttemptFiles(starts=1, started={"host": "n1"}, heartbeat_age_s=10_000)


@pytest.mark.parametrize(
    ("found", "observed", "expected"),
    [
        # the exit file is the truth, whatever the scheduler says
        (exit_file(0), Observed("failed"), "succeeded"),
        (exit_file(0), Observed("running"), "succeeded"),
        (exit_file(0), None, "succeeded"),
        (exit_file(1), Observed("succeeded"), "failed"),
        (exit_file(2), Observed("succeeded"), "failed"),
        (exit_file(1, kind="timeout"), None, "timeout"),
        (exit_file(1, kind="oom"), None, "oom"),
        (exit_file(1), Observed("oom"), "oom"),  # the scheduler knows why it was killed
        # 75 asks to be run again: the scheduler may do it by itself
        (exit_file(75), Observed("queued"), "queued"),
        (exit_file(75), Observed("running"), "running"),
        (exit_file(75), Observed("preempted"), "preempted"),
        (exit_file(75), Observed("preempted", will_rerun=True), "queued"),
        (exit_file(75), None, "preempted"),
        (
            exit_file(75),
            Observed("cancelled"),
            "cancelled",
        ),  # by somebody who went to the scheduler itself
        (exit_file(75), Observed("timeout"), "timeout"),
        # no exit file: the scheduler
        (AttemptFiles(), Observed("queued"), "queued"),
        (AttemptFiles(), Observed("held", "drained"), "held"),
        (ALIVE, Observed("running"), "running"),
        (SILENT, Observed("running"), "running"),
        (AttemptFiles(), Observed("cancelled"), "cancelled"),
        (AttemptFiles(), Observed("timeout"), "timeout"),
        (AttemptFiles(), Observed("preempted", will_rerun=True), "queued"),
        (AttemptFiles(), Observed("preempted"), "preempted"),
        (AttemptFiles(), Observed("failed", exit_code=75), "preempted"),
        # a controller that was killed may have forgotten that it had started the job
        (ALIVE, Observed("cancelled", never_ran=True), "running"),
        (SILENT, Observed("cancelled", never_ran=True), "cancelled"),
        (AttemptFiles(), Observed("cancelled", never_ran=True), "cancelled"),
        (ALIVE, Observed("cancelled"), "cancelled"),
        (
            AttemptFiles(),
            Observed("succeeded"),
            "failed",
        ),  # it ended well and left no outcome: nobody believes that
        # the scheduler has forgotten it: the heartbeat
        (ALIVE, None, "running"),
        (SILENT, None, "lost"),
        (AttemptFiles(), None, "lost"),
    ],
)
def test_a_running_job_is_judged_by_exit_file_then_scheduler_then_heartbeat(
    found: AttemptFiles, observed: Observed | None, expected: JobState
) -> None:
    assert judge(job(), found, observed, is_seen=True).state == expected


def test_a_missing_element_of_a_known_array_was_cancelled_unless_it_had_started() -> None:
    missing = Observed("cancelled", never_ran=True, is_missing=True)
    assert judge(job(), AttemptFiles(), missing, is_seen=True).state == "cancelled"
    assert judge(job(), SILENT, missing, is_seen=True).state == "lost"
    assert judge(job(), ALIVE, missing, is_seen=True).state == "running"
    assert judge(job(), exit_file(0), missing, is_seen=True).state == "succeeded"


def test_a_start_that_ends_with_bad_input_is_not_run_again_before_somebody_has_changed_it() -> None:
    verdict = judge(job(), exit_file(2, reason="no such group"), None, is_seen=True)
    assert (verdict.state, verdict.reason) == ("failed", "bad input: no such group")
    ended = row(verdict.state, reason=verdict.reason)
    assert decide(ended, Limits(max_retries=5), is_finished=False).action == "skip"


@pytest.mark.parametrize(
    "state", ["submitted", "queued", "running", "held", "failed", "preempted", "cancelled"]
)
def test_a_scheduler_that_cannot_be_seen_changes_nothing(state: JobState) -> None:
    verdict = judge(job(state=state, reason="as it was"), AttemptFiles(), None, is_seen=False)
    assert (verdict.state, verdict.reason) == (state, "as it was")


def test_what_can_only_be_seen_elsewhere_is_no_news() -> None:
    elsewhere = Observed("submitted", "a job of another machine")
    assert judge(job(), AttemptFiles(), elsewhere, is_seen=True).state == "running"
    assert judge(job(state="submitted"), ALIVE, elsewhere, is_seen=True).state == "running"
    assert judge(job(), exit_file(0), elsewhere, is_seen=True).state == "succeeded"


def test_an_exit_file_counts_even_when_the_scheduler_cannot_be_seen() -> None:
    assert judge(job(), exit_file(0), None, is_seen=False).state == "succeeded"


def test_a_preempted_start_says_nothing_while_only_the_scheduler_knows_whether_it_runs_again() -> (
    None
):
    assert judge(job(), exit_file(75), None, is_seen=False).state == "running"


def test_a_job_accepted_a_moment_ago_is_not_lost_when_the_scheduler_lags() -> None:
    fresh = job(state="submitted", submitted_at=ago(5))
    assert judge(fresh, AttemptFiles(), None, is_seen=True).state == "submitted"
    assert (
        judge(
            job(state="submitted", submitted_at=ago(500)), AttemptFiles(), None, is_seen=True
        ).state
        == "lost"
    )


def test_what_somebody_cancelled_is_cancelled_however_it_ended() -> None:
    asked = job(is_cancelled=True)
    assert judge(asked, exit_file(75), None, is_seen=True).state == "cancelled"
    assert judge(asked, exit_file(1), None, is_seen=True).state == "cancelled"
    assert (
        judge(asked, AttemptFiles(), Observed("failed", exit_code=143), is_seen=True).state
        == "cancelled"
    )
    assert judge(asked, AttemptFiles(), None, is_seen=True).state == "cancelled"
    assert judge(asked, exit_file(0), None, is_seen=True).state == "succeeded"


def test_an_intent_without_an_answer_stays_open_until_the_job_itself_speaks() -> None:
    unanswered = job(id=None, state="submitting")
    assert judge(unanswered, AttemptFiles(), None, is_seen=True).state == "submitting"
    assert judge(unanswered, ALIVE, None, is_seen=True).state == "running"
    assert judge(unanswered, exit_file(0), None, is_seen=True).state == "succeeded"


def test_an_intent_that_started_and_fell_silent_is_lost_and_so_can_be_retried() -> None:
    assert judge(job(id=None, state="submitting"), SILENT, None, is_seen=True).state == "lost"


def test_a_cancelled_intent_that_no_scheduler_knows_is_cancelled_after_a_while() -> None:
    asked = job(id=None, state="submitting", is_cancelled=True)
    assert judge(asked, AttemptFiles(), None, is_seen=True).state == "cancelled"
    assert (
        judge(replace_at(asked, ago(5)), AttemptFiles(), None, is_seen=True).state == "submitting"
    )


def replace_at(found: Job, at: str) -> Job:
    return replace(found, attempts=tuple(replace(sent, at=at) for sent in found.attempts))


def test_the_copy_that_came_second_says_nothing_about_the_first() -> None:
    second = Observed("failed", exit_code=76)
    assert judge(job(), ALIVE, second, is_seen=True).state == "running"
    assert judge(job(), SILENT, second, is_seen=True).state == "lost"
    assert judge(job(), exit_file(0), second, is_seen=True).state == "succeeded"


def test_what_has_ended_stays_ended_when_the_scheduler_forgets_it() -> None:
    for state in ENDED_BADLY:
        assert judge(job(state=state), AttemptFiles(), None, is_seen=True).state == state


# What is done about it
# ---------------------------------------------------------------------------------------------


def row(state: JobState, *, history: int = 1, job_id: str | None = "8", **changes: Any) -> Row:
    sent = Sent(1, "t", "t", None, "slurm", at=LONG_AGO, id=job_id, state=state)
    return Row("a" * 32, "g", state, folder="", job_id=job_id, history=(sent,) * history, **changes)


@pytest.mark.parametrize("state", ["submitted", "queued", "running", "held"])
def test_what_is_alive_is_left_alone(state: JobState) -> None:
    assert (
        decide(row(state), Limits(retry=(*ENDED_BADLY, "preempted")), is_finished=False).action
        == "skip"
    )


def test_what_is_done_is_left_alone_even_if_it_was_run_by_hand() -> None:
    assert decide(None, Limits(), is_finished=True).action == "skip"
    assert decide(row("succeeded"), Limits(retry=ENDED_BADLY), is_finished=False).action == "skip"


def test_what_was_never_sent_or_was_refused_is_sent() -> None:
    assert decide(None, Limits(), is_finished=False).action == "send"
    assert (
        decide(
            row("pending", job_id=None, reason="no such partition"), Limits(), is_finished=False
        ).action
        == "send"
    )


@pytest.mark.parametrize("state", ["submitting", "running"])
def test_an_intent_without_an_id_is_settled_first(state: JobState) -> None:
    assert decide(row(state, job_id=None), Limits(), is_finished=False).action == "settle"


@pytest.mark.parametrize("state", ENDED_BADLY)
def test_a_bad_end_waits_for_a_person(state: JobState) -> None:
    assert decide(row(state), Limits(), is_finished=False).action == "skip"
    assert decide(row(state), Limits(retry=[state]), is_finished=False).action == "send"


def test_max_retries_runs_failures_again_but_never_bad_input_nor_what_was_cancelled() -> None:
    limits = Limits(max_retries=2)
    assert decide(row("failed"), limits, is_finished=False).action == "send"
    assert decide(row("failed", history=2), limits, is_finished=False).action == "send"
    assert decide(row("failed", history=3), limits, is_finished=False).action == "skip"
    assert decide(row("cancelled"), limits, is_finished=False).action == "skip"
    bad = row("failed", reason="bad input: no such file")
    assert decide(bad, limits, is_finished=False).action == "skip"
    assert decide(bad, Limits(retry=["failed"]), is_finished=False).action == "skip"
    assert (
        decide(bad, Limits(retry=["failed"], with_bad_input=True), is_finished=False).action
        == "send"
    )


def test_preemptions_are_run_again_at_once_then_ever_later_then_not_at_all() -> None:
    limits = Limits(max_preemptions=3)
    assert decide(row("preempted", ended_at=ago(0)), limits, is_finished=False).action == "send"
    assert (
        decide(row("preempted", history=2, ended_at=ago(5)), limits, is_finished=False).action
        == "skip"
    )  # 15 s
    assert (
        decide(row("preempted", history=2, ended_at=ago(16)), limits, is_finished=False).action
        == "send"
    )
    assert (
        decide(row("preempted", history=3, ended_at=ago(16)), limits, is_finished=False).action
        == "skip"
    )  # 30 s
    assert (
        decide(row("preempted", history=3, ended_at=ago(9999)), limits, is_finished=False).action
        == "send"
    )
    assert (
        decide(row("preempted", history=4, ended_at=ago(9999)), limits, is_finished=False).action
        == "skip"
    )
    assert (
        decide(row("preempted", history=4), Limits(retry=["preempted"]), is_finished=False).action
        == "send"
    )
