"""In which state a job can be, and what a scheduler says of one. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

JobState = Literal[
    "pending",  # never sent, or to be sent again
    "submitting",  # an intent is on the disk; whether the scheduler has it is not known yet
    "submitted",  # the scheduler gave an id
    "queued",
    "running",
    "held",  # waits for a person
    "succeeded",
    "failed",
    "timeout",
    "oom",
    "preempted",  # asks to be run again
    "cancelled",
    "paused",  # it ended so that it goes on later: the service's pause, or --until
    "lost",  # the scheduler does not know it, and it left no outcome
]
ACTIVE: tuple[JobState, ...] = ("submitting", "submitted", "queued", "running", "held")
ENDED_BADLY: tuple[JobState, ...] = ("failed", "timeout", "oom", "cancelled", "lost")


@dataclass(frozen=True)
class Observed:
    """What a scheduler says of a job now."""

    state: JobState
    reason: str | None = None  # in the scheduler's own words, and the cure where there is one
    host: str | None = None
    exit_code: int | None = None
    restarts: int = 0
    will_rerun: bool = False  # the scheduler starts it again by itself
    never_ran: bool = False  # it ended without having run, as far as the scheduler knows
    # concluded from the rows of its siblings: it is true only of what never started
    is_missing: bool = False


STATES: tuple[JobState, ...] = get_args(JobState)
ENDED: tuple[JobState, ...] = (
    "succeeded",
    "failed",
    "timeout",
    "oom",
    "preempted",
    "cancelled",
    "paused",
    "lost",
)
DECIDED: tuple[JobState, ...] = (
    "failed",
    "timeout",
    "oom",
    "cancelled",
    "paused",
)  # ends other than success that no witness alters any more
