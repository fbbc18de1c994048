"""Cancel, retry, reset and reconcile experiments that were sent."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.errors import Unreachable, is_transient, reason_of
from jobs.job_state import ACTIVE, JobState
from jobs.protocol import Backend, JobSpec
from jobs.record import events as record
from jobs.record.bases import why_it_waits
from jobs.record.by_hand import training_now
from jobs.record.paths import is_there
from jobs.record.state_table import TURN
from jobs.record.status import record_state, survey
from jobs.submit.policy import Limits, decide
from jobs.submit.request import LOCK_WAIT_S, RESEND_S, ActionResult
from jobs.submit.send import (
    Outcome,
    fresh,
    give_up,
    ids_of,
    read_spec,
    send,
    settle_intent,
    take_turn,
)
from trainer.errors import ConfigError
from trainer.files.atomic import read_json, refusals
from trainer.metrics.test_record import lacks_test

if TYPE_CHECKING:
    from jobs.record.events import Job
    from jobs.record.paths import BaseFolder, RunFolder
    from jobs.record.row import Row

log = logging.getLogger(__name__)
BackendOf = Callable[[str], Backend]


def cancel(
    base: BaseFolder,
    rows: Collection[Row],
    backend_of: BackendOf,
    *,
    why: str | None = None,
    lock_wait_s: float = LOCK_WAIT_S,
) -> list[ActionResult]:
    """Ask for the end of every live job among `rows`, including those whose submission got no
    answer.

    why: the reason that `status` gives for jobs that are not cancelled for good.
    """
    return [_cancel(base.run(row.exp_id), row, backend_of, why, lock_wait_s) for row in rows]


def _cancel(
    folder: RunFolder, row: Row, backend_of: BackendOf, why: str | None, lock_wait_s: float
) -> ActionResult:
    if row.state not in (*ACTIVE, "paused"):
        return ActionResult(row.exp_id, "skip", f"it is {row.state}: nothing runs", row.state)
    try:
        with record.lock(folder, wait_s=lock_wait_s):
            job = record.read(folder)
            attempt = job.last if job else None
            if attempt is None:
                return ActionResult(row.exp_id, "skip", "never sent", "pending")
            backend = backend_of(attempt.backend)
            reason = {} if why is None else {"why": why}
            record.append(folder, {"event": "cancel", "attempt": attempt.number, **reason})
            if row.state == "paused":
                text = "it was paused: nothing runs, and it does not go on"
                return ActionResult(row.exp_id, "cancel", text, "cancelled")
            # for the wrapper: a scheduler that has lost sight of a job cannot end it
            files = folder.attempt(attempt.number)
            with refusals(files.folder):
                files.folder.mkdir(parents=True, exist_ok=True)
                files.cancel_file.touch()
            ids = [attempt.id] if attempt.id else ids_of(attempt, backend)
            if not ids:
                give_up(
                    folder, attempt.number
                )  # it may still be on its way: then it must not start
            for job_id in ids:
                backend.cancel(job_id)
        return ActionResult(
            row.exp_id,
            "cancel",
            f"asked {attempt.backend} to end {', '.join(ids) or 'nothing'}",
            row.state,
        )
    except Exception as error:  # of any kind: the others are cancelled all the same
        return _failure(folder, row, error)


@dataclass(frozen=True)
class Again:
    """How ended experiments are sent once more. limits: None for those of each job's dictionary."""

    base: BaseFolder
    backend_of: BackendOf
    limits: Limits | None = None
    resend_s: float = RESEND_S
    lock_wait_s: float = LOCK_WAIT_S


def again(request: Again, rows: Sequence[Row]) -> list[ActionResult]:
    """Send each of `rows` once more, exactly as it was sent before, where the limits allow it.

    The code is that of the last attempt: to run other code, submit the group again.
    """
    return _each_again(request, rows, survey(request.base, backend_of=request.backend_of))


def _each_again(
    request: Again, targets: Sequence[Row], everything: Sequence[Row]
) -> list[ActionResult]:
    """Send each of `targets` once more. everything: the rows of all experiments of the folder; the
    live ones count for a group's max_parallel, and so does each that is sent here.
    """
    rows = list(everything)
    results: list[ActionResult] = []
    full: set[str] = set()  # backends that take no more jobs now
    for row in targets:
        result = _again(request, row, rows, full)
        results.append(result)
        if result.action == "send" and not result.is_bad:
            rows = [
                replace(other, state="submitted") if other.exp_id == row.exp_id else other
                for other in rows
            ]
    return results


def _again(request: Again, row: Row, rows: Sequence[Row], full: set[str]) -> ActionResult:
    folder = request.base.run(row.exp_id)
    try:
        if row.read_error is not None:
            # somebody else's folder is theirs to care for; one's own is to be mended
            is_own = folder.path.stat().st_uid == os.geteuid()
            return ActionResult(row.exp_id, "unread", row.reason or "", row.state, is_bad=is_own)
        with record.lock(folder, wait_s=request.lock_wait_s):
            rows_now = survey(request.base, only=[row.exp_id], backend_of=request.backend_of)
            row = rows_now[0] if rows_now else row
            job = record.read(folder)
            template = _template(folder, job) if job is not None else None
            if job is None or template is None:
                return ActionResult(row.exp_id, "skip", "never sent: submit its group", row.state)
            limits = request.limits or Limits(
                template.job.max_retries, template.job.max_preemptions
            )
            status = read_json(folder.status) or {}
            backend = request.backend_of(template.backend)
            decision = decide(
                row,
                limits,
                is_finished=status.get("state") == "succeeded",
                lacks_test=lacks_test(folder.path, template.program),
                training_now=training_now(folder, was_sent=bool(row.history)),
                awaited=(
                    None
                    if backend.traits.awaits_bases
                    else why_it_waits(folder, read_json(folder.exp_dict) or {})
                ),
            )
            if decision.action == "wait":
                return ActionResult(row.exp_id, "wait", decision.reason, row.state)
            is_refused = job.last is not None and row.state == "pending"
            has_turn = is_refused and (row.reason or "").startswith(TURN)
            # refused: a person must change something
            is_refused = is_refused and not has_turn
            if decision.action == "skip" or (is_refused and request.limits is None):
                return ActionResult(row.exp_id, "skip", decision.reason, row.state)
            if decision.action == "settle" and job.last is not None:
                of_last = request.backend_of(job.last.backend)
                return _result(
                    row,
                    "settle",
                    settle_intent(folder, job.last, of_last, resend_s=request.resend_s),
                )
            num_alive = sum(other.group == row.group and other.is_live for other in rows)
            reason = _why_later(template, backend, full, num_alive=num_alive)
            if reason is not None:
                return ActionResult(row.exp_id, "wait", reason, row.state)
            if has_turn and job.last is not None:
                outcome = take_turn(folder, job.last, backend)
            else:
                job = record_state(folder, job, row)
                outcome = send(folder, fresh(job, template, folder), backend)
            if outcome.is_waiting:
                full.add(backend.name)
            return _result(row, "send", outcome)
    except Unreachable as error:
        return ActionResult(row.exp_id, "settle", str(error), row.state, is_bad=True)
    except Exception as error:  # of any kind: the others are sent all the same
        return _failure(folder, row, error)


def _why_later(
    template: JobSpec, backend: Backend, full: set[str], *, num_alive: int
) -> str | None:
    """Why an attempt of this template has to wait; None when it can be sent.

    full: the names of backends that took no more jobs. num_alive: runs of its group that live.
    """
    most = template.max_parallel
    counts_itself = backend.traits.keeps_queue
    if most is not None and num_alive >= most and not counts_itself:
        return f"max_parallel={most} are alive"
    return f"{backend.name} takes no more jobs now" if backend.name in full else None


def _failure(folder: RunFolder, row: Row, error: Exception) -> ActionResult:
    """What to tell of an experiment with which nothing could be done."""
    log.debug("%s", row.exp_id, exc_info=error)
    reason = reason_of(error, folder.path)
    may_pass = is_transient(error)
    return ActionResult(row.exp_id, "failed", reason, row.state, is_bad=True, is_transient=may_pass)


def _template(folder: RunFolder, job: Job) -> JobSpec | None:
    """The spec of the last attempt, or of the one that waits for its turn; None without either."""
    waiting = folder.attempt(len(job.attempts) + 1)
    if is_there(waiting.spec):
        return read_spec(folder, waiting.number)
    return read_spec(folder, job.last.number) if job.last is not None else None


def _result(row: Row, action: str, outcome: Outcome) -> ActionResult:
    if outcome.is_waiting:
        return ActionResult(row.exp_id, "wait", outcome.text, row.state)
    state: JobState = "submitted" if outcome.is_sent else row.state
    return ActionResult(row.exp_id, action, outcome.text, state, is_bad=not outcome.is_sent)


def reset(
    base: BaseFolder, exp_id: str, backend_of: BackendOf, *, aside: Path | None = None
) -> ActionResult:
    """Move the whole folder of an experiment to deleted/<id>-<time> (or `aside`). ConfigError while
    it is alive.

    A record that cannot be read, and a folder that was never submitted, can be moved too.
    """
    folder = base.run(exp_id)
    with record.lock(folder, wait_s=LOCK_WAIT_S):
        rows = survey(base, only=[exp_id], backend_of=backend_of, record_changes=False)
        if rows and rows[0].state in ACTIVE and rows[0].history:
            raise ConfigError(
                f"{exp_id} is {rows[0].state} as {rows[0].job_id}. `cancel` it first."
            )
        target = aside or base.deleted_folder / f"{exp_id}-{time.strftime('%Y%m%d-%H%M%S')}"
        with refusals(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                raise ConfigError(f"{target} exists. Wait a second, and try again.")
            os.rename(folder.path, target)
    return ActionResult(exp_id, "reset", f"moved to {target}", "pending")


def reconcile(request: Again) -> list[ActionResult]:
    """Read every experiment once: adopt or send again each submission without an answer, run again
    each job that was preempted or may be retried, and send each that waited for its turn.
    """
    rows = survey(request.base, backend_of=request.backend_of)
    open_ones = [
        row
        for row in rows
        if (row.state != "succeeded" or row.job_id is None)
        and (row.state not in ACTIVE or row.job_id is None)
    ]
    return [result for result in _each_again(request, open_ones, rows) if result.action != "skip"]
