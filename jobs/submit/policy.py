"""Whether an experiment is to be sent now.

A pure function of how it stands and of what was asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jobs.job_state import ACTIVE, ENDED_BADLY, JobState
from jobs.record.times import seconds_since
from jobs.record.verdict import BAD_INPUT

if TYPE_CHECKING:
    from jobs.record.row import Row

Action = Literal["send", "settle", "skip"]
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
    row: Row | None, limits: Limits, *, is_finished: bool, training_now: str | None = None
) -> Decision:
    """Send it (a new attempt), settle it (an intent without an answer), or leave it alone.

    row: None when it was never recorded. is_finished: the training itself says that it reached its
    end. training_now: what shows that a training of it runs, though no scheduler says so.
    """
    decision = _by_state(row, limits, is_finished=is_finished)
    if decision.action == "send" and training_now is not None:
        return Decision("skip", training_now)
    return decision


def _by_state(row: Row | None, limits: Limits, *, is_finished: bool) -> Decision:
    if is_finished or (row is not None and row.state == "succeeded"):
        is_nameless = row is not None and bool(row.history) and row.job_id is None
        # settle: so that its id is recorded
        return Decision("settle" if is_nameless else "skip", "it is done")
    if row is None or not row.history:
        return Decision("send", "never sent")
    state, reason = row.state, row.reason or ""
    if state in ACTIVE and row.job_id is None:
        return Decision("settle", "sent, but there was no answer")
    if state in ACTIVE:
        return Decision(
            "skip", f"it is {state} as {row.job_id}" + (f" ({reason})" if reason else "")
        )
    if state == "pending":
        return Decision("send", "refused before: " + reason)
    is_bad_input = reason.startswith(BAD_INPUT)
    if state in limits.retry and (limits.with_bad_input or not is_bad_input):
        return Decision("send", f"{state}, and asked for again")
    if state == "preempted":
        return _after_preemption(row, limits)
    assert state in ENDED_BADLY, "every state is dealt with"
    if is_bad_input:
        return Decision(
            "skip",
            f"{reason}. Mend it; then --retry failed if what is sent has changed, else `retry` "
            "by id",
        )
    failures = sum(sent.state in ENDED_BADLY for sent in row.history)
    if state != "cancelled" and failures <= limits.max_retries:
        return _in_time(
            row, failures, f"{state} ({reason}); retry {failures} of {limits.max_retries}"
        )
    return Decision(
        "skip", state + (f": {reason}" if reason else "") + f". --retry {state} runs it again"
    )


def _after_preemption(row: Row, limits: Limits) -> Decision:
    times = sum(sent.state == "preempted" for sent in row.history)
    if times > limits.max_preemptions:
        return Decision(
            "skip", f"preempted {times} times, more than max_preemptions. --retry preempted goes on"
        )
    return _in_time(row, times, f"preempted, {times} of at most {limits.max_preemptions}")


def _in_time(row: Row, times: int, reason: str) -> Decision:
    """Send it, unless it has ended too recently.

    It is sent at once after the first time, then after 15 s, doubling up to 10 minutes.
    """
    wait_s = 0.0 if times <= 1 else min(BACK_OFF_S * 2 ** (times - 2), MAX_BACK_OFF_S)
    left_s = wait_s - seconds_since(row.ended_at)
    if left_s > 0:
        return Decision("skip", f"{reason}; not before {left_s:.0f} s from now")
    return Decision("send", reason)
