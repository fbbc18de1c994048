"""The state of a job, in three tables: how one start of it ended (ENDS), in which state it is
(VERDICTS), and what a submission does about that state (DECISIONS).

Each table is a tuple of rules, read from the top: the first rule whose columns all fit decides. A
column that a rule leaves out fits every value; a tuple fits each of its values. The wrapper reads
ENDS and writes exit.json, `record/verdict.py` reads exit.json and VERDICTS, `submit/policy.py`
reads DECISIONS. Standard library only, for the wrapper may run under another interpreter.

Five answers do not come from these tables: a final record stands as it is (`record/status.py`), a
run that a person started by hand is judged in `record/by_hand.py`, a folder that cannot be read is
"held", and `submit/policy.py` leaves a training alone that is seen alive, and lets one wait whose
base has no model yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from jobs.errors import EXIT_DUPLICATE
from jobs.job_state import ACTIVE, ENDED, JobState
from trainer.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_PAUSED, EXIT_PREEMPTED

EXIT_FAILED = 1
# the reason of a failure that happens again until a person changes something
BAD_INPUT = "bad input: "
# the reason of an end that was planned: what was sent next decides whether the job goes on
UNTIL = "--until stopped it; a submission with a later --until, or with none, goes on"
# the reason of a refusal that passes by itself: the scheduler had no room for one more job
TURN = "waits for its turn: "

RuleType = TypeVar("RuleType")


class _Any:
    """The pattern of a column that fits every value."""


ANY: Any = _Any()


def first_rule(rules: Sequence[RuleType], evidence: Any) -> RuleType:
    """The first rule whose columns fit `evidence`, a dataclass with one field for each column."""
    columns = [(field.name, getattr(evidence, field.name)) for field in fields(evidence)]
    for rule in rules:
        if all(_fits(getattr(rule, name), value) for name, value in columns):
            return rule
    raise AssertionError(f"no rule fits {evidence}: the last rule of a table fits everything")


def _fits(pattern: Any, value: Any) -> bool:
    if pattern is ANY:
        return True
    return value in pattern if isinstance(pattern, tuple) else value == pattern


# How one start of a job ended: the wrapper decides this on the node.
# --------------------------------------------------------------------------------------------------

End = Literal["succeeded", "preempted", "paused", "bad input", "timeout", "oom", "failed"]

# `code` and `kind` of exit.json
EXIT_FILES: dict[End, tuple[int, str]] = {
    "succeeded": (EXIT_OK, "succeeded"),
    "preempted": (EXIT_PREEMPTED, "preempted"),
    "paused": (EXIT_PAUSED, "paused"),
    "bad input": (EXIT_BAD_INPUT, "failed"),
    "timeout": (EXIT_FAILED, "timeout"),
    "oom": (EXIT_FAILED, "oom"),
    "failed": (EXIT_FAILED, "failed"),
}


def end_of(code: int | None, kind: str | None = None) -> End:
    """How a start ended, by `code` and `kind` of its exit.json."""
    for end in ("succeeded", "preempted", "paused", "bad input"):
        if code == EXIT_FILES[end][0]:
            return end
    return "timeout" if kind == "timeout" else "oom" if kind == "oom" else "failed"


@dataclass(frozen=True)
class Symptoms:
    """What the wrapper sees when the training's process has ended."""

    code: int  # the training's own outcome; without one, the exit code of its launcher
    has_outcome: bool  # the training itself said how it ended
    has_timed_out: bool  # it ran longer than max_run_time
    is_out_of_memory: bool  # the kernel killed a process, or a GPU had no memory left
    was_stopped: bool  # the scheduler, or a person, asked it to end


@dataclass(frozen=True)
class EndRule:
    """One row of ENDS: the end, the columns, and the reason that is given when the training has
    named no error. {stop}: the signal; {exit}: the exit code in words.

    has_own_reason: `reason` is given even when the training has named an error.
    """

    end: End
    code: int = ANY
    has_outcome: bool = ANY
    has_timed_out: bool = ANY
    is_out_of_memory: bool = ANY
    was_stopped: bool = ANY
    reason: str | None = None
    has_own_reason: bool = False


ENDS = (
    EndRule("succeeded", code=EXIT_OK, has_own_reason=True),
    EndRule(
        "timeout",
        has_timed_out=True,
        reason="max_run_time is over; `retry` goes on from the last checkpoint",
        has_own_reason=True,
    ),
    EndRule(
        "oom",
        is_out_of_memory=True,
        reason="the kernel killed a process of this job: out of memory",
    ),
    EndRule("preempted", code=EXIT_PREEMPTED, reason="stopped by {stop}", has_own_reason=True),
    EndRule("paused", code=EXIT_PAUSED, reason=UNTIL, has_own_reason=True),
    EndRule("bad input", code=EXIT_BAD_INPUT, reason="bad input: see the log"),
    # a launcher that is stopped ends with any code
    EndRule(
        "preempted",
        has_outcome=False,
        was_stopped=True,
        reason="stopped by {stop}",
        has_own_reason=True,
    ),
    EndRule("failed", reason="{exit}"),
)


# In which state a job is: whoever looks at it decides this.
# --------------------------------------------------------------------------------------------------

Record = Literal["pending", "active", "ended"]
Life = Literal["never started", "alive", "silent"]
ANY_END: tuple[End, ...] = tuple(EXIT_FILES)


@dataclass(frozen=True)
class Evidence:
    """All that bears on the state of a job's last attempt. Each field is a column of VERDICTS."""

    exit: End | Literal["none"]  # its exit.json
    record: Record  # the state that job.jsonl has for it
    has_id: bool  # the scheduler's answer to its submission is on record
    is_cancelled: bool  # a person asked for its end
    is_fresh: bool  # sent so recently that a scheduler may not list it yet
    life: Life  # its started-<k>.json and its heartbeat
    scheduler: JobState | Literal["unseen", "unknown"]  # "unknown": it does not know the id
    scheduler_code: int | None  # the exit code that the scheduler reports
    will_rerun: bool  # the scheduler starts it again by itself
    never_ran: bool  # it ended without having run, as far as the scheduler knows


def record_phase(state: JobState) -> Record:
    """The value of the column `record` for a recorded state."""
    return "pending" if state == "pending" else "active" if state in ACTIVE else "ended"


@dataclass(frozen=True)
class StateRule:
    """One row of VERDICTS: the state, the columns, and the reason.

    reason_of: the witness whose reason is given, behind `reason` if there is one. "as recorded" and
    "as observed" give the reason of the witness that they name. "as wished" is "paused" where the
    end was asked for so that the run goes on later, with that wish as its reason; else "cancelled".
    """

    state: JobState | Literal["as recorded", "as observed", "as wished"]
    exit: End | Literal["none"] | tuple[End, ...] = ANY
    record: Record = ANY
    has_id: bool = ANY
    is_cancelled: bool = ANY
    is_fresh: bool = ANY
    life: Life = ANY
    scheduler: str | tuple[str, ...] = ANY
    scheduler_code: int = ANY
    will_rerun: bool = ANY
    never_ran: bool = ANY
    reason: str | None = None
    reason_of: Literal["record", "exit", "scheduler"] | None = None


_SILENT = ("unseen", "unknown", "submitted")  # a scheduler that says nothing about the job
_KILLED: tuple[JobState, ...] = ("failed", "preempted", "cancelled")
_SECOND_COPY = "a second copy of this attempt started and vanished; retry it"
_NO_EXIT_FILE = "the scheduler says that it ended well, but it left no exit.json"
_NO_ID = "it started under an id that is not known, and left no exit.json"
_FORGOTTEN = "the scheduler does not know it any more, and it left no exit.json"
_FORGOTTEN_CANCELLED = "cancelled, and the scheduler has forgotten it"
_CANCELLED_SOON = "cancelled before its scheduler answered"

# fmt: off
VERDICTS = (
    # There is an exit file. It is the truth; but after a preemption the scheduler decides whether
    # it starts the job again, and it may know why it killed the job.
    StateRule("succeeded", exit="succeeded"),
    StateRule("as recorded", exit="preempted", scheduler="unseen", record="active"),
    StateRule("as observed", exit="preempted", scheduler=ACTIVE),
    StateRule("queued", exit="preempted", will_rerun=True, reason_of="scheduler"),
    StateRule("as wished", exit=ANY_END, is_cancelled=True, reason_of="exit"),
    StateRule("as observed", exit="preempted", scheduler=("cancelled", "timeout")),
    StateRule("preempted", exit="preempted", reason_of="exit"),
    StateRule("paused", exit="paused", reason_of="exit"),
    StateRule("failed", exit="bad input", reason=BAD_INPUT, reason_of="exit"),
    StateRule("as observed", exit=ANY_END, scheduler=("oom", "timeout")),
    StateRule("timeout", exit="timeout", reason_of="exit"),
    StateRule("oom", exit="oom", reason_of="exit"),
    StateRule("failed", exit="failed", reason_of="exit"),
    # There is none from here on. The scheduler refused the job: nothing runs.
    StateRule("pending", record="pending", reason_of="record"),
    # The scheduler never answered: the job itself may show that it was accepted.
    StateRule("as recorded", has_id=False, record="ended"),
    StateRule("running", has_id=False, life="alive"),
    StateRule("lost", has_id=False, life="silent", reason=_NO_ID),
    StateRule("as wished", has_id=False, is_cancelled=True, is_fresh=False, reason=_CANCELLED_SOON),
    StateRule("submitting", has_id=False, reason_of="record"),
    # Its heart beats, and the scheduler has nothing to say against that: it cannot be seen, it has
    # forgotten the job, it speaks of a second copy (which did nothing), or it forgot the start.
    StateRule("running", life="alive", record="active", scheduler=_SILENT),
    StateRule("running", life="alive", record="active", scheduler_code=EXIT_DUPLICATE),
    StateRule("running", life="alive", record="active", never_ran=True),
    # The scheduler's word, and what its silence means.
    StateRule("as recorded", scheduler="unseen"),
    StateRule("lost", scheduler_code=EXIT_DUPLICATE, reason=_SECOND_COPY),
    StateRule("as recorded", scheduler="submitted", record="active", reason_of="scheduler"),
    StateRule("failed", scheduler="succeeded", reason=_NO_EXIT_FILE),
    StateRule("queued", scheduler=("pending", *ENDED), will_rerun=True, reason_of="scheduler"),
    StateRule("as wished", scheduler=_KILLED, is_cancelled=True, reason_of="scheduler"),
    StateRule(
        "preempted", scheduler="failed", scheduler_code=EXIT_PREEMPTED, reason_of="scheduler"
    ),
    StateRule("as recorded", scheduler="unknown", record="ended"),
    StateRule("as recorded", scheduler="unknown", is_fresh=True, life="never started"),
    StateRule("as wished", scheduler="unknown", is_cancelled=True, reason=_FORGOTTEN_CANCELLED),
    StateRule("lost", scheduler="unknown", reason=_FORGOTTEN),
    StateRule("as observed"),
)
# fmt: on


# The reason of a job of which no witness gives one. {exp_id}: the experiment.
DEFAULT_REASONS: dict[JobState, str] = {
    "pending": "nothing of it was sent: submit its group",
    "submitting": "sent, and its scheduler has not answered: `reconcile` asks again",
    "submitted": "its scheduler has taken it, and does not list it yet",
    "queued": "it waits for its scheduler, which gives no reason",
    "held": "its scheduler holds it, and gives no reason",
    "failed": "it named no error: see `lathe-jobs logs {exp_id}`",
    "timeout": "its time was over; `retry` goes on from the last checkpoint",
    "oom": "out of memory: see `lathe-jobs logs {exp_id}`",
    "preempted": "stopped before its end: `reconcile` goes on from the last checkpoint",
    "cancelled": "somebody asked for its end",
    "paused": "it goes on when it is resumed",
    "lost": "it left no outcome: `retry {exp_id}` goes on from the last checkpoint",
}


# What a submission does: send a new attempt, settle an intent without an answer, or skip.
# --------------------------------------------------------------------------------------------------

Action = Literal["send", "settle", "skip", "wait"]


@dataclass(frozen=True)
class Situation:
    """How an experiment stands for whoever submits it. Each field is a column of DECISIONS."""

    state: JobState
    # the training itself says that it reached its end, and nothing is left for it to score
    is_finished: bool
    was_sent: bool
    has_id: bool
    is_requested: bool  # a person asked for this state to be run again
    is_bad_input: bool
    may_repeat: bool  # max_retries or max_preemptions allows one more attempt
    is_due: bool  # the pause after the last attempt is over


@dataclass(frozen=True)
class DecisionRule:
    """One row of DECISIONS: the action, the columns, and the reason, with its places filled in by
    submit/policy.py.
    """

    action: Action
    reason: str
    state: JobState | tuple[JobState, ...] = ANY
    is_finished: bool = ANY
    was_sent: bool = ANY
    has_id: bool = ANY
    is_requested: bool = ANY
    is_bad_input: bool = ANY
    may_repeat: bool = ANY
    is_due: bool = ANY


_NO_ANSWER = "sent, but there was no answer"
_RETRIED: tuple[JobState, ...] = ("failed", "timeout", "oom", "lost")
_TOO_OFTEN = "preempted {times} times, more than max_preemptions. --retry preempted goes on"
_PREEMPTED = "preempted, {times} of at most {limit}"
_RETRY = "{state} ({reason}); retry {times} of {limit}"
_MEND = "{reason}. Mend it; then --retry failed if what is sent has changed, else `retry` by id"
LATER = "; not before "  # in the reason of what is sent again after a pause
_LATER = LATER + "{wait_s:.0f} s from now"

# fmt: off
DECISIONS = (
    # Settled, although it is done: so that its id is recorded.
    DecisionRule("settle", "it is done", is_finished=True, was_sent=True, has_id=False),
    DecisionRule("skip", "it is done", is_finished=True),
    DecisionRule("send", "never sent", was_sent=False),
    DecisionRule("settle", _NO_ANSWER, state=(*ACTIVE, "succeeded"), has_id=False),
    DecisionRule("send", "it is done, and its test split is not scored", state="succeeded"),
    DecisionRule("skip", "it is {state} as {job_id}{in_brackets}", state=ACTIVE),
    DecisionRule("send", "refused before: {reason}", state="pending"),
    DecisionRule("send", "{state}, and asked for again", is_requested=True),
    DecisionRule("skip", _TOO_OFTEN, state="preempted", may_repeat=False),
    DecisionRule("skip", _PREEMPTED + _LATER, state="preempted", is_due=False),
    DecisionRule("send", _PREEMPTED, state="preempted"),
    DecisionRule("skip", _MEND, is_bad_input=True),
    DecisionRule("skip", _RETRY + _LATER, state=_RETRIED, may_repeat=True, is_due=False),
    DecisionRule("send", _RETRY, state=_RETRIED, may_repeat=True),
    DecisionRule("skip", "{state}{after_colon}. --retry {state} runs it again"),
)
# fmt: on
