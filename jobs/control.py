"""What a person (or a watchdog) does to experiments that were sent: cancel, retry, reset, reconcile."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from jobs import record
from jobs.errors import Unreachable
from jobs.launch import LOCK_WAIT_S, RESEND_S, Result
from jobs.layout import BaseFolder, RunFolder
from jobs.policy import Limits, decide
from jobs.record import Job
from jobs.sending import Outcome, fresh, send, settle_intent, stored
from jobs.spec import ACTIVE, Backend, JobSpec, JobState
from jobs.status import Row, survey
from trainer.errors import ConfigError, LatheError

log = logging.getLogger(__name__)
BackendOf = Callable[[str], Backend]


def cancel(base: BaseFolder, rows: Collection[Row], backend_of: BackendOf) -> list[Result]:
    """Ask for the end of every live job among `rows`; also of those whose submission was never answered."""
    return [_cancel(base.run(row.exp_id), row, backend_of) for row in rows]


def _cancel(folder: RunFolder, row: Row, backend_of: BackendOf) -> Result:
    if row.state not in ACTIVE:
        return Result(row.exp_id, "skip", f"it is {row.state}: nothing runs", row.state)
    try:
        with record.locked(folder, wait_s=LOCK_WAIT_S):
            job = record.read(folder)
            sent = job.last if job else None
            if sent is None:
                return Result(row.exp_id, "skip", "never sent", "pending")
            backend = backend_of(sent.backend)
            ids = [sent.id] if sent.id else backend.find(sent.name)
            record.append(folder, {"event": "cancel", "attempt": sent.number})
            for job_id in ids:
                backend.cancel(job_id)
            if not ids and not folder.attempt(sent.number).starts():
                news = {"state": "cancelled", "reason": "cancelled before it was sent", "host": None}
                record.append(folder, {"event": "observed", "attempt": sent.number, **news})
        return Result(row.exp_id, "cancel", f"asked {sent.backend} to end {', '.join(ids) or 'nothing'}", row.state)
    except LatheError as error:
        return Result(row.exp_id, "failed", str(error), row.state, is_bad=True)


def again(
    base: BaseFolder, rows: Collection[Row], backend_of: BackendOf, *, limits: Limits | None, resend_s: float = RESEND_S
) -> list[Result]:
    """Send once more, as it was sent before, whatever `limits` allow; None: the limits of each job's own dictionary.

    The code is that of the last attempt: to run other code, submit the group again.
    """
    return [_again(base.run(row.exp_id), row, rows, backend_of, limits, resend_s) for row in rows]


def _again(
    folder: RunFolder, row: Row, rows: Collection[Row], backend_of: BackendOf, limits: Limits | None, resend_s: float
) -> Result:
    try:
        with record.locked(folder, wait_s=LOCK_WAIT_S):
            job = record.read(folder)
            if job is None or len(job.attempts) != row.attempts:
                return Result(row.exp_id, "skip", "somebody else deals with it", row.state)
            template = _template(folder, job)
            if template is None:
                return Result(row.exp_id, "skip", "never sent: submit its group", row.state)
            own = Limits(template.job.max_retries, template.job.max_preemptions)
            decision = decide(row, limits or own, is_finished=False)
            if decision.action == "skip" or (job.last is not None and row.state == "pending" and limits is None):
                return Result(row.exp_id, "skip", decision.reason, row.state)
            if decision.action == "settle" and job.last is not None:
                backend = backend_of(job.last.backend)
                return _result(row, "settle", settle_intent(folder, job.last, backend, resend_s=resend_s))
            if _is_full(row, rows, template):
                return Result(row.exp_id, "wait", f"max_parallel={template.max_parallel} are alive", row.state)
            return _result(row, "send", send(folder, fresh(job, template, folder), backend_of(template.backend)))
    except Unreachable as error:
        return Result(row.exp_id, "settle", str(error), row.state, is_bad=True)
    except LatheError as error:
        return Result(row.exp_id, "failed", str(error), row.state, is_bad=True)


def _template(folder: RunFolder, job: Job) -> JobSpec | None:
    """What to send: the last attempt's spec, or the one that waits for its turn; None when there is neither."""
    planned = folder.attempt(len(job.attempts) + 1)
    if planned.spec.exists():
        return stored(folder, planned.number)
    return stored(folder, job.last.number) if job.last is not None else None


def _is_full(row: Row, rows: Collection[Row], template: JobSpec) -> bool:
    """Whether the group has its fill of live jobs. The local queue counts by itself."""
    if template.max_parallel is None or template.backend in ("local", "inline"):
        return False
    return sum(other.group == row.group and other.state in ACTIVE for other in rows) >= template.max_parallel


def _result(row: Row, action: str, outcome: Outcome) -> Result:
    state: JobState = "submitted" if outcome.is_sent else row.state
    return Result(row.exp_id, action, outcome.text, state, is_bad=not outcome.is_sent)


def reset(base: BaseFolder, row: Row, *, aside: Path | None = None) -> Result:
    """Move the whole folder of an experiment to deleted/<id>-<time> (or `aside`). ConfigError while it is alive."""
    folder = base.run(row.exp_id)
    with record.locked(folder, wait_s=LOCK_WAIT_S):
        if row.state in ACTIVE:
            raise ConfigError(f"{row.exp_id} is {row.state} as {row.job_id}. `cancel` it first.")
        target = aside or base.deleted / f"{row.exp_id}-{time.strftime('%Y%m%d-%H%M%S')}"
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            raise ConfigError(f"{target} exists. Wait a second, and try again.")
        os.rename(folder.path, target)
    return Result(row.exp_id, "reset", f"moved to {target}", "pending")


def reconcile(base: BaseFolder, backend_of: BackendOf, *, resend_s: float = RESEND_S) -> list[Result]:
    """Look at everything once; adopt or resend what was never answered, run again what was preempted or may be retried,
    and send what waited for its turn. Only what was done is returned."""
    rows = survey(base, backend_of=backend_of)
    candidates = [row for row in rows if row.state != "succeeded" or row.job_id is None]
    results: list[Result] = []
    for row in candidates:
        result = _again(base.run(row.exp_id), row, rows, backend_of, None, resend_s)
        if result.action != "skip":
            results.append(result)
        if result.action == "send" and not result.is_bad:
            rows = [replace(other, state="submitted") if other.exp_id == row.exp_id else other for other in rows]
    return results
