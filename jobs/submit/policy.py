"""Whether an experiment is to be sent now.

This module works out its situation, and the table DECISIONS of `record/state_table.py` decides. It
is a pure function of the state of the experiment and of the request.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs.job_state import ENDED_BADLY, JobState
from jobs.record.state_table import BAD_INPUT, DECISIONS, Action, Situation, first_rule
from jobs.record.times import seconds_since

if TYPE_CHECKING:
    from jobs.record.row import Row

BACK_OFF_S, MAX_BACK_OFF_S = 15.0, 600.0


@dataclass(frozen=True)
class Limits:
    """How often an experiment may be run again without a person."""

    max_retries: int = 0
    max_preemptions: int = 20
    retry: Collection[JobState] = ()  # states that were asked to be run again, this once
    with_bad_input: bool = False  # even where the input was bad: somebody has changed something


@dataclass(frozen=True)
class Decision:
    """What to do with one experiment, and why."""

    action: Action
    reason: str


def decide(
    row: Row | None,
    limits: Limits,
    *,
    is_finished: bool,
    lacks_test: bool = False,
    training_now: str | None = None,
    awaited: str | None = None,
) -> Decision:
    """Send it (a new attempt), settle it (an intent without an answer), let it wait, or leave it
    alone.

    row: None when it was never recorded. is_finished: the training itself says that it reached its
    end. lacks_test: its test split is to be scored, and was not. training_now: what shows that a
    training of it runs, though no scheduler says so. awaited: the base that it needs and that has
    no model yet.
    """
    is_done = is_finished or (row is not None and row.state == "succeeded")
    decision = _decide(row, limits, is_finished=is_done and not lacks_test)
    if decision.action == "send" and training_now is not None:
        return Decision("skip", training_now)
    if decision.action == "send" and awaited is not None:
        return Decision("wait", awaited)
    return decision


def _decide(row: Row | None, limits: Limits, *, is_finished: bool) -> Decision:
    state: JobState = row.state if row else "pending"
    reason = (row.reason if row else None) or ""
    is_bad_input = reason.startswith(BAD_INPUT)
    # how often it has ended like its last attempt (preempted, or badly), and how often it may
    times, limit = 0, limits.max_retries
    if row is not None and row.state == "preempted":
        times = sum(attempt.state == "preempted" for attempt in row.history)
        limit = limits.max_preemptions
    elif row is not None:
        times = sum(attempt.state in ENDED_BADLY for attempt in row.history)
    # none after the first end, then 15 s, doubling up to 10 minutes
    pause_s = 0.0 if times <= 1 else min(BACK_OFF_S * 2 ** (times - 2), MAX_BACK_OFF_S)
    wait_s = pause_s - seconds_since(row.ended_at if row else None)
    situation = Situation(
        state=state,
        is_finished=is_finished,
        was_sent=row is not None and bool(row.history),
        has_id=row is not None and row.job_id is not None,
        is_requested=state in limits.retry and (limits.with_bad_input or not is_bad_input),
        is_bad_input=is_bad_input,
        may_repeat=times <= limit,
        is_due=wait_s <= 0,
    )
    rule = first_rule(DECISIONS, situation)
    text = rule.reason.format(
        state=state,
        job_id=row.job_id if row else None,
        reason=reason,
        in_brackets=f" ({reason})" if reason else "",
        after_colon=f": {reason}" if reason else "",
        times=times,
        limit=limit,
        wait_s=wait_s,
    )
    return Decision(rule.action, text)
