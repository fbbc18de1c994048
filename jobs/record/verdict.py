"""In which state a job is, of three witnesses that may disagree: its exit file, the scheduler, its
heartbeat.

The exit file is the truth; then comes the scheduler; then the heartbeat. A scheduler that cannot be
seen says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs.errors import EXIT_DUPLICATE
from jobs.job_state import ACTIVE, JobState, Observed
from jobs.record.events import HEARTBEAT_LOST_S, Job, Sent
from jobs.record.times import seconds_since
from trainer.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_PREEMPTED
from trainer.files.atomic import read_json

if TYPE_CHECKING:
    from jobs.record.paths import RunFolder

# a scheduler may need so long until it knows a job that it has just accepted (sacct: 1-2 s)
FRESH_S = 60.0
BAD_INPUT = "bad input: "


@dataclass(frozen=True)
class Witnesses:
    """What lies in the folder of the last attempt."""

    exit: dict[str, Any] | None = None
    started: dict[str, Any] | None = None
    starts: int = 0
    heartbeat_age_s: float = float("inf")

    @classmethod
    def of(cls, folder: RunFolder, sent: Sent) -> Witnesses:
        """Read them; absent and half-written files count as no witness."""
        attempt = folder.attempt(sent.number)
        starts = attempt.starts()
        started = read_json(starts[-1]) if starts else None
        beat = read_json(attempt.heartbeat) or started or {}
        return cls(read_json(attempt.exit), started, len(starts), seconds_since(beat.get("at")))


@dataclass(frozen=True)
class Verdict:
    """The state and why; `host` where it is known."""

    state: JobState
    reason: str | None = None
    host: str | None = None


def settle(job: Job, found: Witnesses, observed: Observed | None, *, is_seen: bool) -> Verdict:
    """The state of a job's last attempt. `observed` is None when the scheduler does not know the
    id.

    is_seen: whether the scheduler answered at all; when it did not, nothing that only it could say
    changes.
    """
    sent = job.last
    if sent is None:
        return Verdict("pending")
    host = (observed and observed.host) or (found.started or {}).get("host") or sent.host
    if found.exit is not None:
        if found.exit.get("code") == EXIT_PREEMPTED and not is_seen and sent.state in ACTIVE:
            # only the scheduler knows whether it runs it again
            return Verdict(sent.state, sent.reason, host)
        return _by_exit_file(sent, found.exit, observed, host)
    if sent.state == "pending":  # refused: nothing runs
        return Verdict("pending", sent.reason)
    if sent.id is None:
        return _unanswered(sent, found, host)
    if not is_seen:
        return _by_heartbeat(sent, found, host, otherwise=Verdict(sent.state, sent.reason, host))
    # the copy that came second did nothing
    if observed is not None and observed.exit_code == EXIT_DUPLICATE:
        return _by_heartbeat(
            sent,
            found,
            host,
            otherwise=Verdict("lost", "another copy of it ran, and is gone", host),
        )
    # it cannot be seen from here: no news
    if observed is not None and observed.state == "submitted":
        known = sent.state if sent.state in ACTIVE else "submitted"
        return _by_heartbeat(sent, found, host, otherwise=Verdict(known, observed.reason, host))
    if observed is not None:
        verdict = _by_scheduler(sent, observed, host)
        # a controller that was killed may have forgotten that it had started the job
        if observed.never_ran:
            return _by_heartbeat(sent, found, host, otherwise=verdict)
        return verdict
    if sent.state not in ACTIVE:
        return Verdict(sent.state, sent.reason, host)
    if seconds_since(sent.submitted_at) < FRESH_S and not found.starts:
        return Verdict(sent.state, sent.reason, host)
    lost = Verdict("lost", "the scheduler does not know it any more, and it left no outcome", host)
    if sent.is_cancelled:
        lost = Verdict("cancelled", "cancelled, and the scheduler has forgotten it", host)
    return _by_heartbeat(sent, found, host, otherwise=lost)


def _by_exit_file(
    sent: Sent, exit: dict[str, Any], observed: Observed | None, host: str | None
) -> Verdict:
    code, reason = exit.get("code"), exit.get("reason")
    if code == EXIT_OK:
        return Verdict("succeeded", None, host)
    if (
        code == EXIT_PREEMPTED
        and observed is not None
        and (observed.state in ACTIVE or observed.will_rerun)
    ):
        # the scheduler runs it again by itself
        state = observed.state if observed.state in ACTIVE else "queued"
        return Verdict(state, observed.reason, host)
    if sent.is_cancelled:
        return Verdict("cancelled", reason, host)
    if (
        code == EXIT_PREEMPTED
        and observed is not None
        and observed.state in ("cancelled", "timeout")
    ):
        # it could save; why it was stopped, the scheduler knows
        return Verdict(observed.state, observed.reason, host)
    if code == EXIT_PREEMPTED:
        return Verdict("preempted", reason, host)
    if code == EXIT_BAD_INPUT:
        return Verdict("failed", BAD_INPUT + str(reason), host)
    if observed is not None and observed.state in ("oom", "timeout"):
        return Verdict(observed.state, observed.reason, host)
    if exit.get("kind") in ("timeout", "oom"):
        return Verdict(exit["kind"], reason, host)
    return Verdict("failed", reason, host)


def _by_scheduler(sent: Sent, observed: Observed, host: str | None) -> Verdict:
    if observed.state == "succeeded":
        return Verdict("failed", "the scheduler says it ended well, but it left no exit.json", host)
    if observed.will_rerun and observed.state not in ACTIVE:
        return Verdict("queued", observed.reason, host)
    if observed.state == "failed" and observed.exit_code == EXIT_PREEMPTED:
        return Verdict("cancelled" if sent.is_cancelled else "preempted", observed.reason, host)
    if observed.state in ("failed", "preempted") and sent.is_cancelled:
        return Verdict("cancelled", observed.reason, host)
    return Verdict(observed.state, observed.reason, host)


def _by_heartbeat(sent: Sent, found: Witnesses, host: str | None, *, otherwise: Verdict) -> Verdict:
    is_alive = found.starts > 0 and found.heartbeat_age_s < HEARTBEAT_LOST_S
    return Verdict("running", None, host) if is_alive and sent.state in ACTIVE else otherwise


def _unanswered(sent: Sent, found: Witnesses, host: str | None) -> Verdict:
    """The intent is on the disk, and no id: the job itself may tell that it was accepted."""
    if sent.state not in ACTIVE:
        return Verdict(sent.state, sent.reason, host)
    if found.starts:
        lost = Verdict(
            "lost", "it started, nobody knows under which id, and it left no outcome", host
        )
        return _by_heartbeat(sent, found, host, otherwise=lost)
    if sent.is_cancelled and seconds_since(sent.at) > FRESH_S:
        return Verdict("cancelled", "cancelled before its scheduler answered")
    return Verdict("submitting", sent.reason, host)
