"""Submit a group of experiments: each is sent at most once.

Every dictionary, flag and job dictionary of the group is checked before the first is sent.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jobs.code.snapshot import link
from jobs.errors import Unreachable, is_transient, reason_of
from jobs.job_state import STATES, JobState
from jobs.protocol import ArrayBackend, JobSpec
from jobs.record import events as record
from jobs.record.bases import why_it_waits
from jobs.record.by_hand import training_now
from jobs.record.state_table import end_of
from jobs.record.status import record_state, survey
from jobs.submit.policy import Decision, Limits, decide
from jobs.submit.request import (
    ActionResult,
    AttemptDraft,
    Request,
    check_dictionary,
    until_of,
)
from jobs.submit.send import Outcome, fresh, send, send_array, settle_intent
from trainer.errors import ConfigError, LatheError, ResumeError, StorageError
from trainer.files.atomic import read_json, refuse_link_out, write_json
from trainer.metrics import own
from trainer.metrics.test_record import lacks_test

if TYPE_CHECKING:
    from jobs.record.events import Job
    from jobs.record.paths import RunFolder
    from jobs.record.row import Row

SENDERS = 4  # threads: most of the time is spent waiting for the disk, or for a scheduler's reply
ARRAY_LOCKS = 256  # experiments of one array: each holds a lock, and a process may hold 1,024 files

log = logging.getLogger(__name__)


def preview(request: Request) -> list[ActionResult]:
    """The action that `submit` would take for each experiment, and why. The scheduler is asked;
    nothing is written or sent.
    """
    trials = request.trials
    request.check_bases()
    rows = _rows(request, record_changes=False)
    results: list[ActionResult] = []
    for name in request.by_id:
        try:
            check_dictionary(request.base.run(name), request.by_id[name])
            decision = _decide(request, name, rows.get(name))
            state = _state_or_status(request.base.run(name), rows.get(name))
            results.append(ActionResult(name, decision.action, decision.reason, state))
        except Exception as error:  # of any kind: it must not hide the others
            results.append(_failure(request.base.run(name), rows.get(name), error))
    to_send = [result.exp_id for result in results if result.action == "send"]
    if to_send:  # one is asked for all: they differ in nothing that a scheduler sees
        answer = request.backend.rehearse(trials[to_send[0]].rendered)
        log.info("%s: %s", request.backend.name, answer or "has no dry run")
    return results


def submit(request: Request) -> list[ActionResult]:
    """Send every experiment that is neither done nor alive. An error of one is in its result and
    does not stop the others.

    A submission that was killed before the scheduler answered is resolved here: its job is adopted,
    or sent again after `resend_s`.
    """
    _ = request.drafts  # ConfigError before anything is sent
    request.check_bases()
    backend_counts = request.use_array or request.backend.traits.keeps_queue
    if request.max_parallel is None or backend_counts:
        rows, budget = _rows(request, record_changes=True), _Budget()
    else:  # all live jobs of the group count, also those no longer among its experiments
        everybody = survey(request.base, backend_of=request.backend_of)
        num_alive = sum(row.group == request.group and row.is_live for row in everybody)
        rows = {row.exp_id: row for row in everybody if row.exp_id in request.by_id}
        reason = f"max_parallel={request.max_parallel} are alive"
        budget = _Budget(request.max_parallel - num_alive, reason)
    results: dict[str, ActionResult] = {}
    if request.use_array:
        results = _submit_arrays(request, rows)
        if any(result.action == "wait" for result in results.values()):
            budget.close(f"{request.backend.name} takes no more jobs now")
    others = [[name for name in level if name not in results] for level in request.levels()]

    def send_it(name: str) -> ActionResult:
        return _submit_one(request, name, rows.get(name), budget)

    if request.backend.traits.is_in_process:  # each runs to its end before the next begins
        stopped = ActionResult("", "wait", "the one before it was stopped", "pending")
        was_stopped = False
        for name in itertools.chain.from_iterable(others):
            results[name] = replace(stopped, exp_id=name) if was_stopped else send_it(name)
            was_stopped |= results[name].action == "send" and results[name].state == "preempted"
    elif budget.remaining is not None:  # each has to be counted before the next
        results.update({name: send_it(name) for name in itertools.chain.from_iterable(others)})
    else:
        with ThreadPoolExecutor(SENDERS) as pool:
            for names in others:  # a base before those that begin with its model
                results.update(zip(names, pool.map(send_it, names), strict=True))
    wait_s = request.answer_wait_s
    deadline = time.monotonic() + (3 * request.resend_s + 1 if wait_s is None else wait_s)
    while time.monotonic() < deadline:
        unanswered = [name for name in results if results[name].is_unanswered]
        if not unanswered:
            break
        time.sleep(min(0.5, request.resend_s / 4))
        for name in unanswered:
            results[name] = _submit_one(request, name, None, budget)
    return [results[name] for name in request.by_id]


def specs(request: Request) -> list[JobSpec]:
    """The checked spec of each experiment, numbered attempt 0; it stands in no record."""
    return [trial.spec for trial in request.trials.values()]


def scheduler_texts(request: Request) -> list[str]:
    """The text that the scheduler would get for each experiment."""
    return [trial.rendered.text for trial in request.trials.values()]


@dataclass
class _Budget:
    """How many more experiments of a group may start; None when submission does not count them."""

    remaining: int | None = None
    reason: str = ""  # why it is spent

    def close(self, reason: str) -> None:
        """No more may start: the scheduler takes none."""
        self.remaining, self.reason = 0, reason

    def is_spent(self) -> bool:
        return self.remaining is not None and self.remaining <= 0

    def spend(self) -> None:
        if self.remaining is not None:
            self.remaining -= 1

    def give_back(self) -> None:
        """One that was counted does not start after all."""
        if self.remaining is not None:
            self.remaining += 1


# One experiment
# --------------------------------------------------------------------------------------------------


def _submit_one(request: Request, name: str, row: Row | None, budget: _Budget) -> ActionResult:
    folder = request.base.run(name)
    try:
        decision = _decide(request, name, row)
        if decision.action == "skip":
            check_dictionary(folder, request.by_id[name])
            return ActionResult(name, "skip", decision.reason, _state_or_status(folder, row))
        with record.lock(folder, wait_s=request.lock_wait_s):
            template, draft = request.templates[name], request.drafts[name]
            job = _begin(request, folder, draft)
            if job.attempts:  # looked at again: it may have moved on, or ended, since the survey
                row = survey(
                    request.base, only=[name], backend_of=request.backend_of, record_changes=False
                )[0]
                job = record_state(folder, job, row)
            decision = _decide(request, name, row)
            if decision.action == "skip":
                return ActionResult(name, "skip", decision.reason, _state(row))
            if decision.action == "wait":
                return _wait(folder, job, template, decision.reason)
            if decision.action == "settle" and job.last is not None:
                outcome = settle_intent(
                    folder,
                    job.last,
                    request.backend_of(job.last.backend),
                    resend_s=request.resend_s,
                )
                return _result(name, "settle", outcome)
            if budget.is_spent():
                return _wait(folder, job, template, budget.reason)
            budget.spend()
            spec = fresh(job, template, folder)
            outcome = send(folder, spec, request.backend, draft=draft)
            if outcome.is_refused:
                budget.give_back()
            if outcome.is_waiting:
                budget.close(f"{request.backend.name} takes no more jobs now")
            if request.backend.traits.is_in_process:
                # the experiment ran in this process
                exit_file = read_json(folder.attempt(spec.attempt).exit) or {}
                kind = str(exit_file.get("kind", "lost"))
                text = f"{kind}: {exit_file['reason']}" if exit_file.get("reason") else kind
                end = end_of(exit_file.get("code"))
                state: JobState = end if end in ("succeeded", "preempted", "paused") else "failed"
                is_bad = end not in ("succeeded", "paused")
                return ActionResult(name, "send", text, state, is_bad=is_bad)
            return _result(name, "send", outcome)
    except Unreachable as error:
        return ActionResult(name, "settle", str(error), "submitting", is_bad=True)
    except Exception as error:  # of any kind: the others are sent all the same
        return _failure(folder, row, error)


def _wait(folder: RunFolder, job: Job, template: JobSpec, reason: str) -> ActionResult:
    """Keep the spec in the folder of its next attempt until its turn comes."""
    waiting_spec = folder.attempt(len(job.attempts) + 1).spec
    waiting_spec.parent.mkdir(parents=True, exist_ok=True)
    write_json(waiting_spec, template.model_dump(mode="json"))
    return ActionResult(template.exp_id, "wait", f"{reason}: `reconcile` sends it", "pending")


def _begin(request: Request, folder: RunFolder, draft: AttemptDraft) -> Job:
    """The record of an experiment, begun if need be; its dictionary is written first.

    The caller holds the lock, so nobody else writes a dictionary after it has been checked here.
    """
    template = draft.spec
    refuse_link_out(folder.path)
    check_dictionary(folder, request.by_id[template.exp_id])
    if not folder.exp_dict.exists():
        with contextlib.suppress(FileExistsError):
            folder.path.mkdir(parents=True)
        write_json(folder.exp_dict, request.by_id[template.exp_id])
    own.keep(_own_metrics(request.by_id[template.exp_id]), folder.path)
    if request.snapshot is not None:
        link(folder, request.snapshot)
    job = record.read(folder)
    if job is None:
        record.create(
            folder,
            exp_id=template.exp_id,
            digest=template.digest,
            group=template.group,
            nonce=draft.nonce,
        )
        job = record.read(folder)
    assert job is not None, "the record was written a moment ago"
    if job.digest != template.digest:
        raise ResumeError(
            f"{folder.record} is of another dictionary than {folder.exp_dict}. `reset` it, or "
            "use another base."
        )
    return job


def _own_metrics(values: dict[str, Any]) -> list[str]:
    """The files of a user's own metrics, which the job gets as they are now."""
    specs: Any = values.get("metrics") or []
    return [specs] if isinstance(specs, str) else list(specs)


def _result(name: str, action: str, outcome: Outcome) -> ActionResult:
    if outcome.is_waiting:
        return ActionResult(name, "wait", outcome.text, "pending")
    state: JobState = (
        "submitted" if outcome.is_sent else "pending" if outcome.is_refused else "submitting"
    )
    is_open = not outcome.is_sent and not outcome.is_refused
    return ActionResult(
        name, action, outcome.text, state, is_bad=not outcome.is_sent, is_unanswered=is_open
    )


def _failure(folder: RunFolder, row: Row | None, error: Exception) -> ActionResult:
    """What to tell of an experiment that could not be sent."""
    name, reason, may_pass = folder.path.name, reason_of(error, folder.path), is_transient(error)
    return ActionResult(name, "failed", reason, _state(row), is_bad=True, is_transient=may_pass)


def _decide(request: Request, name: str, row: Row | None) -> Decision:
    """Raises the error that keeps its folder from being read: what runs there is unknown."""
    if row is not None and row.read_error is not None:
        kind = LatheError if row.read_error == "permanent" else StorageError
        raise kind(row.reason or row.folder)
    folder = request.base.run(name)
    status = read_json(folder.status) or {}
    retry = set(request.retry)
    if row is not None and row.state == "paused" and _goes_further(request, folder, row):
        retry.add("paused")
    is_other = False  # whether other flags, another code or another job dictionary are sent now
    if request.retry and row is not None:
        last = read_json(folder.attempt(row.attempt).spec) or {}
        now = request.templates[row.exp_id].model_dump(mode="json")
        keys = ("launcher", "program", "workdir", "environment", "activate", "job")
        is_other = any(last.get(key) != now[key] for key in keys)
    limits = Limits(
        request.job.max_retries,
        request.job.max_preemptions,
        retry,
        with_bad_input=is_other or request.with_bad_input,
    )
    return decide(
        row,
        limits,
        is_finished=status.get("state") == "succeeded",
        lacks_test=lacks_test(folder.path, request.flags),
        training_now=training_now(folder, was_sent=row is not None and bool(row.history)),
        awaited=(
            None
            if request.backend.traits.awaits_bases
            else why_it_waits(folder, request.by_id[name])
        ),
    )


def _goes_further(request: Request, folder: RunFolder, row: Row) -> bool:
    """Whether a run that --until stopped is now asked to go on: beyond that step, or to its end."""
    before = until_of((read_json(folder.attempt(row.attempt).spec) or {}).get("program", ()))
    after = until_of(request.flags)
    return before is not None and (after is None or after > before)


def _state(row: Row | None) -> JobState:
    return row.state if row is not None else "pending"


def _state_or_status(folder: RunFolder, row: Row | None) -> JobState:
    """The state of its row; of what was only run by hand, the one in its status.json."""
    state = (read_json(folder.status) or {}).get("state")
    return state if row is None and state in STATES else _state(row)


# Arrays
# --------------------------------------------------------------------------------------------------


def _submit_arrays(request: Request, rows: Mapping[str, Row]) -> dict[str, ActionResult]:
    """Send those that have to be sent, in as few submissions as the scheduler's limit allows.

    The others are left out. ConfigError when the backend has no arrays.
    """
    if not isinstance(request.backend, ArrayBackend):
        raise ConfigError(f"--array: {request.backend.name} has no arrays. Leave it out.")
    to_send = [
        name for name in sorted(request.templates) if _is_to_send(request, name, rows.get(name))
    ]
    size = min(request.backend.max_array(), ARRAY_LOCKS)
    if size < 1:
        raise ConfigError(f"--array: {request.backend.name} allows none here. Leave it out.")
    results: dict[str, ActionResult] = {}
    for start in range(0, len(to_send), size):
        results.update(_submit_array(request, to_send[start : start + size], rows))
        if any(result.action == "wait" for result in results.values()):
            break  # the scheduler takes no more
    return results


def _submit_array(
    request: Request, names: Sequence[str], rows: Mapping[str, Row]
) -> dict[str, ActionResult]:
    results: dict[str, ActionResult] = {}
    specs: dict[str, JobSpec] = {}
    with contextlib.ExitStack() as locks:
        for name in names:
            folder, row = request.base.run(name), rows.get(name)
            try:
                locks.enter_context(record.lock(folder, wait_s=request.lock_wait_s))
                job = _begin(request, folder, request.drafts[name])
                if len(job.attempts) == (row.attempts if row is not None else 0):
                    specs[str(folder.path)] = fresh(job, request.templates[name], folder)
            except Exception as error:  # of any kind: the others are sent all the same
                results[name] = _failure(folder, row, error)
        outcomes: Mapping[str, Outcome | Exception]
        try:
            outcomes = send_array(
                specs, request.backend, request.base.arrays, max_parallel=request.max_parallel
            )
        except Exception as error:  # of any kind: other arrays are sent all the same
            outcomes = dict.fromkeys(specs, error)
        for path, spec in specs.items():
            name, outcome = spec.exp_id, outcomes[path]
            results[name] = (
                _failure(request.base.run(name), rows.get(name), outcome)
                if isinstance(outcome, Exception)
                else _result(name, "send", outcome)
            )
    return results


def _is_to_send(request: Request, name: str, row: Row | None) -> bool:
    """Whether an experiment belongs into an array. What cannot be told is left to _submit_one."""
    try:
        return _decide(request, name, row).action == "send"
    except Exception as error:  # of any kind: it is met again there, and told
        log.debug("%s", name, exc_info=error)
        return False


# Before anything is sent
# -------------------------------------------------------------------------------------------


def _rows(request: Request, *, record_changes: bool) -> dict[str, Row]:
    rows = survey(
        request.base,
        only=list(request.by_id),
        backend_of=request.backend_of,
        record_changes=record_changes,
    )
    return {row.exp_id: row for row in rows}
