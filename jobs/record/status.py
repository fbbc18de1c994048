"""The state of every experiment of a folder, from its record, its scheduler, and the files of its
training.

It is cheap: each scheduler gets one query, and of each experiment only small files and the end of
metrics.jsonl are read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from jobs.errors import is_transient, reason_of
from jobs.job_state import ACTIVE, DECIDED, ENDED, STATES, JobState, Observed
from jobs.record import events as record
from jobs.record.bases import why_it_waits
from jobs.record.by_hand import still_running
from jobs.record.events import Job
from jobs.record.metrics import last_metrics
from jobs.record.paths import BaseFolder, RunFolder, is_there
from jobs.record.row import Row, as_shown, experiment_of, starts_of
from jobs.record.state_table import DEFAULT_REASONS, End, end_of
from jobs.record.times import age_of, now
from jobs.record.verdict import AttemptFiles, Verdict, judge
from jobs.record.wandb_key import sync_hint
from trainer.config.differences import names_by_difference
from trainer.data.formats.json_text import preview
from trainer.errors import LatheError, StorageError
from trainer.files.atomic import read_json
from trainer.files.survival_events import read as recoveries
from trainer.metrics.judge_record import why_refused

if TYPE_CHECKING:
    from jobs.protocol import Backend

MOST_STEPS = 2**53  # beyond it a number of JSON is no exact one

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Case:
    """The files of one experiment, as they are before its scheduler is asked."""

    folder: RunFolder
    job: Job
    files: AttemptFiles

    @property
    def end(self) -> End | None:
        """How its last start ended; None where no exit file says it."""
        code = (self.files.exit or {}).get("code")
        return None if code is None else end_of(code)

    @property
    def is_final(self) -> bool:
        """Whether the record already says what the exit file says, for good."""
        last = self.job.last
        if last is None or self.end in (None, "preempted"):
            return False
        return last.state == "succeeded" if self.end == "succeeded" else last.state in DECIDED

    @property
    def question(self) -> tuple[str, str] | None:
        """(backend, id) to ask about; None when a scheduler's answer could change nothing."""
        last = self.job.last
        if last is None or last.id is None or self.is_final:
            return None
        return None if self.end in ("succeeded", "paused", "bad input") else (last.backend, last.id)


@dataclass(frozen=True)
class _Sight:
    """The answer of one scheduler, or the reason why there is none."""

    observed: Mapping[str, Observed]
    problem: str | None = None


def survey(
    base: BaseFolder,
    *,
    only: Collection[str] | None = None,
    backend_of: Callable[[str], Backend],
    record_changes: bool = True,
    include_unsubmitted: bool = False,
) -> list[Row]:
    """One row for each experiment that was submitted from `base`, by group and age; changed states
    are recorded.

    only: ids of experiments; None for all. include_unsubmitted: also what was run by hand. A
    scheduler that cannot be reached changes no state: its rows carry `unseen_since`. A folder that
    cannot be read is a row in state "held".
    """
    rows: list[Row] = []
    cases: list[_Case] = []
    folders = (
        base.submitted_runs() if only is None else [base.run(name) for name in sorted(set(only))]
    )
    for folder in folders:
        try:
            job = record.read(folder)
            if job is not None:
                cases.append(
                    _Case(
                        folder,
                        job,
                        AttemptFiles.of(folder, job.last) if job.last else AttemptFiles(),
                    )
                )
        except Exception as error:  # of any kind: it must not hide the others
            rows.append(_unreadable(folder, error))
    sights = _ask(cases, backend_of)
    names = _names(cases)
    for case in cases:
        try:
            sight = sights[case.question[0]] if case.question else None
            verdict = _verdict(case, sight)
            # before an odd value is on record for good
            row = as_shown(_with_reason(_row(case, verdict, sight)))
            if record_changes:
                _record(case, verdict, sight)
        except Exception as error:
            row = _unreadable(case.folder, error, case.job)
        rows.append(replace(row, name=names.get(row.exp_id, "")))
    for folder in base.runs() if include_unsubmitted else ():
        is_asked = only is None or folder.path.name in only
        row = _by_hand(folder) if is_asked and not folder.was_submitted else None
        if row is not None:
            rows.append(row)
    return sorted(rows, key=lambda row: (row.group, row.created_at or "", row.exp_id))


def record_state(folder: RunFolder, job: Job, row: Row) -> Job:
    """`job` with its last attempt in the state of its row, on record. The caller holds the lock."""
    last, newest = job.last, row.history[-1] if row.history else None
    if last is None or newest is None or (newest.state, newest.reason) == (last.state, last.reason):
        return job
    news = {"state": newest.state, "reason": newest.reason, "host": newest.host}
    record.append(folder, {"event": "observed", "attempt": last.number, **news})
    return record.read(folder) or job


def _names(cases: Collection[_Case]) -> dict[str, str]:
    """A name for each id: the values in which it differs from the others of its group here."""
    groups: dict[str, list[RunFolder]] = {}
    for case in cases:
        groups.setdefault(case.job.group, []).append(case.folder)
    names: dict[str, str] = {}
    for folders in groups.values():
        dictionaries: list[dict[str, Any]] = []
        for folder in folders:
            dictionaries.append({})  # also of one that cannot be read
            with suppress(OSError, LatheError):
                dictionaries[-1] = experiment_of(folder) or {}
        apart = names_by_difference(dictionaries)
        names |= {folder.path.name: name for folder, name in zip(folders, apart, strict=True)}
    return names


def _ask(cases: Collection[_Case], backend_of: Callable[[str], Backend]) -> dict[str, _Sight]:
    """The answer of each backend to one query about all its jobs."""
    ids: dict[str, list[str]] = {}
    for case in cases:
        if case.question is not None:
            ids.setdefault(case.question[0], []).append(case.question[1])
    return {name: _look(name, job_ids, backend_of) for name, job_ids in ids.items()}


def _look(name: str, ids: list[str], backend_of: Callable[[str], Backend]) -> _Sight:
    try:
        return _Sight(backend_of(name).query(ids))
    except Exception as error:
        # Unreachable, a backend that cannot be used from here, an answer that is not understood:
        # nothing was learnt of its jobs, and those of other backends are none the worse
        log.debug("%s: %s", name, error)
        return _Sight({}, str(error) or type(error).__name__)


def _verdict(case: _Case, sight: _Sight | None) -> Verdict:
    last, files = case.job.last, case.files
    if last is None:
        return Verdict("pending", why_it_waits(case.folder, read_json(case.folder.exp_dict) or {}))
    if case.is_final:
        return Verdict(last.state, last.reason, last.host)
    if sight is None:
        return judge(case.job, files, None, is_seen=True)
    observed = sight.observed.get(last.id or "")
    if files.exit is None and (observed is None or observed.state not in ACTIVE):
        # it may have ended between our look and the scheduler's answer
        files = AttemptFiles.of(case.folder, last)
    return judge(case.job, files, observed, is_seen=sight.problem is None)


def _record(case: _Case, verdict: Verdict, sight: _Sight | None) -> None:
    """Append what changed to the record. Nothing is written when another process holds the lock, or
    has written since the record was read here: that process knows more.
    """
    job, last = case.job, case.job.last
    events: list[dict[str, Any]] = []
    if sight is not None and sight.problem is not None and job.unseen_since is None:
        events.append({"event": "unseen", "reason": sight.problem})
    if sight is not None and sight.problem is None and job.unseen_since is not None:
        events.append({"event": "seen"})
    if last is not None and (verdict.state, verdict.reason) != (last.state, last.reason):
        is_still_waiting = (last.state, verdict.state) == ("submitted", "queued")
        if not is_still_waiting:  # that is seen anew each time
            changed = {"state": verdict.state, "reason": verdict.reason, "host": verdict.host}
            events.append({"event": "observed", "attempt": last.number, **changed})
    if not events:
        return
    try:
        with record.lock(case.folder, wait_s=0):
            if record.read(case.folder) == case.job:
                # whoever looks next sees the same again
                record.append(case.folder, *events, is_durable=False)
    except record.Busy as error:
        log.debug("%s", error)
    except (
        StorageError,
        OSError,
    ) as error:  # somebody else's folder, or a full disk: status still shows
        log.warning("%s: the state is not recorded: %s", case.folder.path.name, error)


def _row(case: _Case, verdict: Verdict, sight: _Sight | None) -> Row:
    job, last, folder = case.job, case.job.last, case.folder
    row = Row(
        job.exp_id,
        job.group,
        verdict.state,
        str(folder.path),
        verdict.reason,
        created_at=job.created_at,
    )
    if last is None:
        return row
    starts = tuple(
        start for each in job.attempts for start in starts_of(folder.attempt(each.number))
    )
    own = [start for start in starts if start.attempt == last.number]
    history = (
        *job.attempts[:-1],
        replace(last, state=verdict.state, reason=verdict.reason, host=verdict.host),
    )
    # a scheduler that preempts a job may start the same attempt again by itself
    reruns = len(starts) - len({start.attempt for start in starts})
    has_ended, is_unseen = verdict.state in ENDED, sight is not None and sight.problem is not None
    row = replace(
        row,
        host=verdict.host,
        backend=last.backend,
        # the scheduler's reply may be lost: then the job itself has written its id
        job_id=last.id or (case.files.exit or {}).get("id"),
        attempt=last.number,
        attempts=len(history),
        preemptions=reruns + sum(attempt.state == "preempted" for attempt in history),
        gpu_hours=math.fsum(start.hours * start.gpus for start in starts),
        submitted_at=last.submitted_at,
        started_at=own[0].began_at if own else None,
        ended_at=own[-1].ended_at if own and has_ended else None,
        unseen_since=(job.unseen_since or now()) if is_unseen else None,
        unseen_reason=sight.problem if sight is not None else None,
        heartbeat_age_s=_finite(case.files.heartbeat_age_s) if own and not has_ended else None,
        sync_hint=sync_hint(folder) if has_ended else None,
        history=history,
        starts=starts,
    )
    return _with_progress(row, folder, read_json(folder.status) or {}) if starts else row


def _finite(age_s: float) -> float | None:
    """The age, or None for an infinite one (no heartbeat yet): JSON cannot write infinity."""
    return age_s if math.isfinite(age_s) else None


def _with_progress(row: Row, folder: RunFolder, status: Mapping[str, Any]) -> Row:
    """`row` with the training's step and metrics and, while it runs, the time left."""
    last = last_metrics(folder)
    steps = [
        step
        for step in (_whole_number(status.get("step")), last.pop("step", None))
        if step is not None
    ]
    step = _whole_number(int(max(steps))) if steps else None
    total = _total(status)
    eta_s = None
    if row.state == "running" and step is not None and total is not None and "step_s" in last:
        eta_s = max(total - step, 0) * last["step_s"]
    reason = row.reason
    for name in ("error", "early"):  # why it failed, or why it ended before its last step
        if reason is None and row.state in DECIDED and isinstance(status.get(name), str):
            reason = status[name]
    if row.state == "succeeded":
        reason = why_refused(folder.path) or reason
    lost = tuple(recoveries(folder.path))
    progress = replace(row, step=step, total=total, metrics=last, eta_s=eta_s, reason=reason)
    return replace(progress, recoveries=lost) if lost else progress


def _with_reason(row: Row) -> Row:
    """`row` with a reason, if its state asks for one and no witness gave any."""
    default = DEFAULT_REASONS.get(row.state)
    if row.reason or default is None:
        return row
    return replace(row, reason=default.format(exp_id=row.exp_id))


def _by_hand(folder: RunFolder) -> Row | None:
    """The row of a run that was never submitted; None when its folder holds no such run."""
    try:
        if not is_there(folder.exp_dict):
            return None
        if not is_there(folder.status):
            return _row_of_haven(folder)
        status = _status_by_hand(folder)
        state = cast(JobState, status["state"]) if status.get("state") in STATES else "pending"
        age_s = age_of(folder.status, status.get("updated_at"))
        reason = None
        if state == "running":
            state, reason = still_running(status, age_s)
        row = Row(
            folder.path.name,
            "",
            state,
            str(folder.path),
            reason,
            by_hand=True,
            name=str(status.get("name") or ""),
            host=status.get("host"),
            created_at=status.get("updated_at"),
            ended_at=status.get("updated_at") if state in ENDED else None,
            heartbeat_age_s=_finite(age_s) if state == "running" else None,
            sync_hint=sync_hint(folder) if state in ENDED else None,
        )
        return as_shown(_with_reason(_with_progress(row, folder, status)))
    except Exception as error:  # of any kind: it must not hide the others
        return _unreadable(folder, error)


def _status_by_hand(folder: RunFolder) -> dict[str, Any]:
    """status.json of a run that was started by hand. LatheError when it is not as a run writes it,
    OSError.
    """
    status = read_json(folder.status)
    if status is None:
        raise LatheError(f"{folder.status}: no whole JSON object. Run the experiment again.")
    for name in ("updated_at", "host"):
        if not isinstance(status.get(name), str | None):
            raise LatheError(
                f"{folder.status}: {name}: got {preview(status[name])}, want a text. Run the "
                "experiment again."
            )
    return status


def seen_by_hand(folder: RunFolder) -> str | None:
    """When a run that was never submitted was last seen, which is the `created_at` of its row; None
    when it has no row (`survey`). LatheError, OSError.
    """
    if not is_there(folder.exp_dict):
        return None
    if is_there(folder.status):
        return _status_by_hand(folder).get("updated_at") or ""
    return None if _row_of_haven(folder) is None else ""


def _row_of_haven(folder: RunFolder) -> Row | None:
    """The row of a run that haven's own job manager has sent and that has not begun; None when
    there is no such job. Nothing is known of it but the id.
    """
    job_id = (read_json(folder.job_dict) or {}).get("job_id")
    if job_id is None:
        return None
    reason = f"haven has sent it as {job_id}, and it has not begun; its scheduler is not asked"
    return Row(
        folder.path.name,
        "",
        "submitted",
        str(folder.path),
        reason,
        by_hand=True,
        job_id=str(job_id),
    )


def _unreadable(folder: RunFolder, error: Exception, job: Job | None = None) -> Row:
    """The row of an experiment of which nothing is known but why its folder cannot be read."""
    reason = f"its folder cannot be read: {reason_of(error, folder.path)}"
    return Row(
        folder.path.name,
        job.group if job else "",
        "held",
        str(folder.path),
        reason,
        read_error="transient" if is_transient(error) else "permanent",
    )


def total_steps(folder: RunFolder) -> int | None:
    """All steps of a training, which it says before its first line of metrics; None until then."""
    return _total(read_json(folder.status) or {})


def _total(status: Mapping[str, Any]) -> int | None:
    return _whole_number(status.get("total"))


def _whole_number(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < MOST_STEPS else None
