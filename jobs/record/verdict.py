"""In which state a job is: its evidence is collected here, and `record/state_table.py` decides.

Three witnesses may disagree: the exit file, which is the truth; then the scheduler; then the
heartbeat.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from jobs.job_state import JobState, Observed
from jobs.record.events import HEARTBEAT_LOST_S, Job, Sent
from jobs.record.state_table import (
    VERDICTS,
    Evidence,
    Life,
    StateRule,
    end_of,
    first_rule,
    record_phase,
)
from jobs.record.times import age_of, seconds_since
from trainer.files.atomic import read_json

if TYPE_CHECKING:
    from jobs.record.paths import RunFolder

# a scheduler may need so long until it lists a job that it has just accepted (sacct: 1-2 s)
LISTING_S = 60.0


# cached, for a survey of a thousand jobs meets a handful of combinations
_rule_for = functools.cache(functools.partial(first_rule, VERDICTS))


@dataclass(frozen=True)
class AttemptFiles:
    """The files in the folder of the last attempt."""

    exit: dict[str, Any] | None = None
    started: dict[str, Any] | None = None
    starts: int = 0
    heartbeat_age_s: float = float("inf")

    @classmethod
    def of(cls, folder: RunFolder, last: Sent) -> AttemptFiles:
        """Read them; a file that is absent or only half written counts as absent."""
        attempt = folder.attempt(last.number)
        starts = attempt.starts()
        started = read_json(starts[-1]) if starts else None
        path, beat = attempt.heartbeat, read_json(attempt.heartbeat)
        if beat is None and starts:
            path, beat = starts[-1], started
        age_s = age_of(path, (beat or {}).get("at"))
        return cls(read_json(attempt.exit), started, len(starts), age_s)

    @property
    def life(self) -> Life:
        """Whether it has started, and its heartbeat is recent."""
        if not self.starts:
            return "never started"
        return "alive" if self.heartbeat_age_s < HEARTBEAT_LOST_S else "silent"


@dataclass(frozen=True)
class Verdict:
    """The state of a job and the reason. host: where it runs or ran, if that is known."""

    state: JobState
    reason: str | None = None
    host: str | None = None


def judge(job: Job, files: AttemptFiles, observed: Observed | None, *, is_seen: bool) -> Verdict:
    """The state of a job's last attempt. `observed` is None when the scheduler does not know the
    id.

    is_seen: whether the scheduler answered at all. When it did not, `observed` is ignored, and
    nothing changes that only the scheduler could tell.
    """
    attempt = job.last
    if attempt is None:
        return Verdict("pending")
    observed = observed if is_seen else None
    if observed is not None and observed.is_missing and files.starts:
        observed = None  # it did start: its scheduler has forgotten it
    exit_file = files.exit
    sent_at = attempt.at if attempt.id is None else attempt.submitted_at
    evidence = Evidence(
        exit="none" if exit_file is None else end_of(exit_file.get("code"), exit_file.get("kind")),
        record=record_phase(attempt.state),
        has_id=attempt.id is not None,
        is_cancelled=attempt.is_cancelled,
        is_fresh=seconds_since(sent_at) < LISTING_S,
        life=files.life,
        scheduler=observed.state if observed else "unknown" if is_seen else "unseen",
        scheduler_code=observed.exit_code if observed else None,
        will_rerun=observed is not None and observed.will_rerun,
        never_ran=observed is not None and observed.never_ran,
    )
    rule = _rule_for(evidence)
    state = _state(rule, attempt, observed)
    reasons = {
        "record": attempt.reason,
        "scheduler": observed.reason if observed else None,
        "exit": cast("str | None", (exit_file or {}).get("reason")),
    }
    default = {"as recorded": "record", "as observed": "scheduler"}.get(rule.state)
    witness = rule.reason_of or default
    reason = rule.reason
    if witness is not None:
        reason = reasons[witness] if reason is None else f"{reason}{reasons[witness]}"
    if state == "paused" and rule.state == "as wished":
        reason = attempt.end_wanted_for
    if rule.record == "pending":  # refused: it was never on a host
        return Verdict(state, reason)
    started_on = (files.started or {}).get("host")
    return Verdict(state, reason, (observed and observed.host) or started_on or attempt.host)


def _state(rule: StateRule, attempt: Sent, observed: Observed | None) -> JobState:
    if rule.state == "as recorded":
        return attempt.state
    if rule.state == "as observed":
        assert observed is not None, "only a rule about a state of the scheduler says so"
        return observed.state
    if rule.state == "as wished":
        return "cancelled" if attempt.end_wanted_for is None else "paused"
    return rule.state
