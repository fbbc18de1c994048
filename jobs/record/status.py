"""How every experiment of a folder stands now: its record, its scheduler's word, and what the
training itself tells.

Cheap on purpose: one question to each scheduler, and of each experiment only small files and the
end of metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast, get_args

from jobs.code.secret_keys import sync_hint
from jobs.config import JobConfig
from jobs.record import events as record
from jobs.record.events import Job, Sent, seconds_since
from jobs.record.paths import Attempt, BaseFolder, RunFolder, is_exp_id
from jobs.record.verdict import HEARTBEAT_LOST_S, Verdict, Witnesses, settle
from jobs.submit.spec import ACTIVE, Backend, JobState, Observed
from trainer.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_PREEMPTED, LatheError, StorageError
from trainer.files.atomic import read_json

TAILS = (
    8 << 10,
    256 << 10,
)  # bytes of metrics.jsonl; the second when one line of gradient norms fills the first
STATES: tuple[JobState, ...] = get_args(JobState)
ENDED: tuple[JobState, ...] = (
    "succeeded",
    "failed",
    "timeout",
    "oom",
    "preempted",
    "cancelled",
    "lost",
)
DECIDED: tuple[JobState, ...] = (
    "failed",
    "timeout",
    "oom",
    "cancelled",
)  # bad ends that no witness alters any more
LIMIT = 1e100  # no metric: beyond it sums and squares overflow

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """One time that an attempt ran. `ended_at` is the last sign of life while it runs, or when it
    left no outcome.
    """

    attempt: int
    number: int  # a scheduler that requeues starts one attempt several times
    began_at: str
    ended_at: str
    host: str | None
    gpus: int  # of all nodes
    code: int | None  # exit code; None: it runs, or was killed without a word

    @property
    def hours(self) -> float:
        """How long it ran."""
        return max(seconds_between(self.began_at, self.ended_at), 0.0) / 3600


@dataclass(frozen=True)
class Row:
    """One experiment as status shows it. Times are UTC in ISO 8601; those of the last attempt
    unless said otherwise.
    """

    exp_id: str
    group: str
    state: JobState
    folder: str
    reason: str | None = None
    step: int | None = None
    total: int | None = None
    metrics: dict[str, float] = field(
        default_factory=dict[str, float]
    )  # the last value of each: loss, lr, valid/loss
    eta_s: float | None = None
    host: str | None = None
    backend: str | None = None  # None: run by hand, or never sent
    job_id: str | None = None
    attempt: int = 0
    attempts: int = 0
    preemptions: int = 0  # of all attempts, with those that the scheduler made up for by itself
    gpu_hours: float = 0.0  # of all attempts
    created_at: str | None = None
    submitted_at: str | None = None
    started_at: str | None = None
    ended_at: str | None = None
    unseen_since: str | None = (
        None  # since then its scheduler cannot be reached, and the state may be old
    )
    unseen_reason: str | None = None
    heartbeat_age_s: float | None = None
    sync_hint: str | None = None  # the command that brings its offline wandb runs to the service
    history: tuple[Sent, ...] = ()
    starts: tuple[Start, ...] = ()


@dataclass(frozen=True)
class _Case:
    """What lies in the folder of one experiment, before its scheduler is asked."""

    folder: RunFolder
    job: Job
    found: Witnesses

    @property
    def is_settled(self) -> bool:
        """Whether the record already says what the exit file says, for good."""
        sent, code = self.job.last, (self.found.exit or {}).get("code")
        if sent is None or code is None or code == EXIT_PREEMPTED:
            return False
        return sent.state == "succeeded" if code == EXIT_OK else sent.state in DECIDED

    @property
    def question(self) -> tuple[str, str] | None:
        """(backend, id) to ask about; None when no scheduler could add anything."""
        sent, code = self.job.last, (self.found.exit or {}).get("code")
        if sent is None or sent.id is None or self.is_settled or code in (EXIT_OK, EXIT_BAD_INPUT):
            return None
        return sent.backend, sent.id


@dataclass(frozen=True)
class _Sight:
    """What one scheduler answered, or why it did not."""

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
    for folder in _recorded(base, only):
        try:
            job = record.read(folder)
            if job is not None:
                cases.append(
                    _Case(folder, job, Witnesses.of(folder, job.last) if job.last else Witnesses())
                )
        except (OSError, KeyError, TypeError, ValueError, LatheError) as error:
            rows.append(_unreadable(folder, error))
    sights = _ask(cases, backend_of)
    rows += [_row_of(case, sights, record_changes=record_changes) for case in cases]
    if include_unsubmitted:
        rows += [row for folder in _unsubmitted(base, only) if (row := _by_hand(folder))]
    return sorted(rows, key=lambda row: (row.group, row.created_at or "", row.exp_id))


def _recorded(base: BaseFolder, only: Collection[str] | None) -> list[RunFolder]:
    if only is None:
        return base.recorded()
    return [folder for name in sorted(set(only)) if (folder := base.run(name)).record.exists()]


def _unsubmitted(base: BaseFolder, only: Collection[str] | None) -> list[RunFolder]:
    """Folders of experiments that were run without being submitted."""
    try:
        with os.scandir(base.path) as entries:
            names = sorted(entry.name for entry in entries if is_exp_id(entry.name))
    except FileNotFoundError:
        return []
    folders = [base.run(name) for name in names if only is None or name in only]
    return [
        each
        for each in folders
        if each.status.exists() and each.exp_dict.exists() and not each.record.exists()
    ]


def _ask(cases: Collection[_Case], backend_of: Callable[[str], Backend]) -> dict[str, _Sight]:
    """One question to each backend about all its jobs."""
    ids: dict[str, list[str]] = {}
    for case in cases:
        if case.question is not None:
            ids.setdefault(case.question[0], []).append(case.question[1])
    return {name: _look(name, wanted, backend_of) for name, wanted in ids.items()}


def _look(name: str, ids: list[str], backend_of: Callable[[str], Backend]) -> _Sight:
    try:
        return _Sight(backend_of(name).query(ids))
    except (
        LatheError
    ) as error:  # Unreachable, or a backend that cannot be used from here: nobody was asked
        log.debug("%s: %s", name, error)
        return _Sight({}, str(error) or type(error).__name__)


def _row_of(case: _Case, sights: Mapping[str, _Sight], *, record_changes: bool) -> Row:
    try:
        sight = sights[case.question[0]] if case.question else None
        verdict = _verdict(case, sight)
        if record_changes:
            _record(case, verdict, sight)
        return _row(case, verdict, sight)
    except (OSError, KeyError, TypeError, ValueError) as error:
        return _unreadable(case.folder, error, case.job)


def _verdict(case: _Case, sight: _Sight | None) -> Verdict:
    sent, found = case.job.last, case.found
    if sent is None:
        return Verdict("pending")
    if case.is_settled:
        return Verdict(sent.state, sent.reason, sent.host)
    if sight is None:
        return settle(case.job, found, None, is_seen=True)
    observed = sight.observed.get(sent.id or "")
    if found.exit is None and (observed is None or observed.state not in ACTIVE):
        found = Witnesses.of(
            case.folder, sent
        )  # it may have ended between our look and the scheduler's answer
    return settle(case.job, found, observed, is_seen=sight.problem is None)


def _record(case: _Case, verdict: Verdict, sight: _Sight | None) -> None:
    """Add what changed to the record. Whoever else holds the lock, or has written since, knows
    better: then nothing.
    """
    events = _news(case.job, verdict, sight)
    if not events:
        return
    try:
        with record.locked(case.folder, wait_s=0):
            if record.read(case.folder) == case.job:
                record.append(
                    case.folder, *events, is_durable=False
                )  # whoever looks next sees the same again
    except record.Busy as error:
        log.debug("%s", error)
    except (
        StorageError,
        OSError,
    ) as error:  # somebody else's folder, or a full disk: status still shows
        log.warning("%s: the state is not recorded: %s", case.folder.path.name, error)


def _news(job: Job, verdict: Verdict, sight: _Sight | None) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    if sight is not None and sight.problem is not None and job.unseen_since is None:
        events.append({"event": "unseen", "reason": sight.problem})
    if sight is not None and sight.problem is None and job.unseen_since is not None:
        events.append({"event": "seen"})
    sent = job.last
    is_still_waiting = sent is not None and (sent.state, verdict.state) == (
        "submitted",
        "queued",
    )  # seen anew each time
    if (
        sent is not None
        and not is_still_waiting
        and (verdict.state, verdict.reason) != (sent.state, sent.reason)
    ):
        changed = {"state": verdict.state, "reason": verdict.reason, "host": verdict.host}
        events.append({"event": "observed", "attempt": sent.number, **changed})
    return events


def _row(case: _Case, verdict: Verdict, sight: _Sight | None) -> Row:
    job, sent, folder = case.job, case.job.last, case.folder
    row = Row(
        job.exp_id,
        job.group,
        verdict.state,
        str(folder.path),
        verdict.reason,
        created_at=job.created_at,
    )
    if sent is None:
        return row
    starts = tuple(
        start for each in job.attempts for start in starts_of(folder.attempt(each.number))
    )
    own = [start for start in starts if start.attempt == sent.number]
    history = (
        *job.attempts[:-1],
        replace(sent, state=verdict.state, reason=verdict.reason, host=verdict.host),
    )
    has_ended, is_unseen = verdict.state in ENDED, sight is not None and sight.problem is not None
    row = replace(
        row,
        host=verdict.host,
        backend=sent.backend,
        job_id=sent.id
        or (case.found.exit or {}).get(
            "id"
        ),  # the reply was lost, and it ended before it was found
        attempt=sent.number,
        attempts=len(history),
        preemptions=_preemptions(history, starts),
        gpu_hours=math.fsum(start.hours * start.gpus for start in starts),
        submitted_at=sent.submitted_at,
        started_at=own[0].began_at if own else None,
        ended_at=own[-1].ended_at if own and has_ended else None,
        unseen_since=(job.unseen_since or record.now()) if is_unseen else None,
        unseen_reason=sight.problem if sight is not None else None,
        heartbeat_age_s=case.found.heartbeat_age_s if own and not has_ended else None,
        sync_hint=sync_hint(folder) if has_ended else None,
        history=history,
        starts=starts,
    )
    return _with_progress(row, folder, read_json(folder.status) or {}) if starts else row


def _preemptions(history: tuple[Sent, ...], starts: tuple[Start, ...]) -> int:
    reruns = len(starts) - len({start.attempt for start in starts})
    return reruns + sum(sent.state == "preempted" for sent in history)


def _with_progress(row: Row, folder: RunFolder, status: Mapping[str, Any]) -> Row:
    """`row` with what the training itself tells: its step, metrics and, while it runs, the time
    that is left.
    """
    last = last_metrics(folder)
    steps = [
        step
        for step in (_whole_number(status.get("step")), last.pop("step", None))
        if step is not None
    ]
    step, total = int(max(steps)) if steps else None, _whole_number(status.get("total"))
    eta_s = None
    if row.state == "running" and step is not None and total is not None and "step_s" in last:
        eta_s = max(total - step, 0) * last["step_s"]
    reason = row.reason
    if reason is None and row.state in DECIDED and isinstance(status.get("error"), str):
        reason = status["error"]
    return replace(row, step=step, total=total, metrics=last, eta_s=eta_s, reason=reason)


def _by_hand(folder: RunFolder) -> Row | None:
    """A row of status.json alone; None when it says nothing."""
    try:
        status = read_json(folder.status)
        if status is None:
            return None
        state = cast(JobState, status["state"]) if status.get("state") in STATES else "pending"
        age_s = seconds_since(status.get("updated_at"))
        silence = (
            f"no sign of life for {age_s / 60:.0f} min"
            if math.isfinite(age_s)
            else "never gave a sign of life"
        )
        is_silent = state == "running" and age_s > HEARTBEAT_LOST_S
        row = Row(
            folder.path.name,
            "",
            state,
            str(folder.path),
            silence if is_silent else None,
            host=status.get("host"),
            created_at=status.get("updated_at"),
            ended_at=status.get("updated_at") if state in ENDED else None,
            heartbeat_age_s=age_s if state == "running" and math.isfinite(age_s) else None,
            sync_hint=sync_hint(folder) if state in ENDED else None,
        )
        return _with_progress(row, folder, status)
    except (OSError, TypeError, ValueError) as error:
        return _unreadable(folder, error)


def _unreadable(folder: RunFolder, error: Exception, job: Job | None = None) -> Row:
    reason = f"its folder cannot be read: {type(error).__name__}: {error}"
    return Row(folder.path.name, job.group if job else "", "held", str(folder.path), reason)


def starts_of(attempt: Attempt) -> list[Start]:
    """Every time that an attempt ran, in order, with its end: from the wrapper's own small
    files.
    """
    paths = attempt.starts()
    if not paths:
        return []
    gpus = _gpus(read_json(attempt.spec) or {})
    began = [read_json(path) or {} for path in paths]
    last_exit = read_json(attempt.exit)
    beat_at = (read_json(attempt.heartbeat) or {}).get("at")
    starts: list[Start] = []
    for k, facts in enumerate(began, 1):
        is_last = k == len(began)
        outcome = None if is_last else read_json(attempt.folder / f"exit-{k}.json")
        if outcome is None and last_exit is not None and last_exit.get("start", len(began)) == k:
            outcome = last_exit
        begin = str(facts.get("at") or "")
        # a start that was killed without a word ended before the next one began: no later time is
        # known to be better
        guess = beat_at if is_last else began[k].get("at")
        end = str((outcome or {}).get("at") or max(guess or begin, begin))
        host, code = facts.get("host"), (outcome or {}).get("code")
        starts.append(Start(attempt.number, k, begin, end, host, gpus, code))
    return starts


def _gpus(spec: Mapping[str, Any]) -> int:
    job = cast("dict[str, Any]", spec.get("job") or {})
    nodes: int = job.get("nodes", 1)
    if job.get("gres"):
        return JobConfig(gres=job["gres"]).gpus * nodes
    return int(cast("dict[str, Any]", job.get("resources") or {}).get("gpu", 0)) * nodes


def last_metrics(folder: RunFolder) -> dict[str, float]:
    """The last `step` and the last value of every metric that stands near the end of metrics.jsonl.

    Gradient norms by parameter are left out. Evaluations further back are taken from
    score_list.json.
    """
    found: dict[str, float] = {}
    is_whole = True
    for size in TAILS:
        lines, is_whole = _tail(folder.metrics, size)
        found = _last_values(lines)
        if is_whole or found:
            break
    if not is_whole and not any("/" in name for name in found):
        with contextlib.suppress(FileNotFoundError, ValueError, IndexError, TypeError):
            score = json.loads((folder.path / "score_list.json").read_bytes())[-1]
            found = {
                name: value for name, value in numbers(score).items() if name != "step"
            } | found
    return found


def _tail(path: Path, size: int) -> tuple[list[bytes], bool]:
    """The whole lines among the last `size` bytes of a file, and whether these are all it has."""
    try:
        with path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(length - size, 0))
            content = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return [], True
    lines = content.split(b"\n")[:-1]  # what follows the last line break is being written
    return (lines, True) if length <= size else (lines[1:], False)


def _last_values(lines: list[bytes]) -> dict[str, float]:
    """The newest training line and the newest evaluation, merged: of a long tail two lines are
    parsed.
    """
    found: dict[str, float] = {}
    has_loss = has_scores = False
    for line in reversed(lines):
        is_scores = b'"valid/' in line
        if (has_scores if is_scores else has_loss) or b'"grad_norm/' in line:
            continue
        values = numbers_in(line)
        found = values | found
        has_scores, has_loss = (
            has_scores or (is_scores and bool(values)),
            has_loss or "loss" in values,
        )
        if has_loss and has_scores:
            break
    return found


def numbers_in(line: bytes) -> dict[str, float]:
    """The finite numbers of one line of metrics.jsonl; empty for a torn line."""
    try:
        return numbers(json.loads(line))
    except ValueError:
        return {}


def numbers(values: Any) -> dict[str, float]:
    """The numbers among the values of a dictionary, but for those that are not finite; empty for
    anything else.
    """
    if not isinstance(values, dict):
        return {}
    items = cast("dict[str, Any]", values).items()
    return {
        name: value
        for name, value in items
        if type(value) in (int, float) and -LIMIT < value < LIMIT
    }


def seconds_between(begin: str, end: str) -> float:
    """Seconds from one ISO time to another; 0 when either is no time."""
    try:
        return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()
    except (ValueError, TypeError):
        return 0.0


def _whole_number(value: Any) -> int | None:
    return value if type(value) is int else None
