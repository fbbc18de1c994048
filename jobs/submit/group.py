"""A group of experiments goes out: every dictionary is checked first, then each is sent at most
once.

Nothing is sent before every dictionary, flag and job dictionary of the group has been checked.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.code.snapshot import link
from jobs.errors import Unreachable
from jobs.job_state import ACTIVE, STATES, JobState
from jobs.protocol import ArrayBackend, JobSpec
from jobs.record import events as record
from jobs.record.by_hand import training_now
from jobs.record.state_table import end_of
from jobs.record.status import record_state, survey
from jobs.submit.policy import Decision, Limits, decide
from jobs.submit.request import (
    LOCK_WAIT_S,
    ActionResult,
    Request,
    check_dictionary,
    with_trial_name,
)
from jobs.submit.send import Outcome, fresh, send, send_array, settle_intent
from trainer.errors import ConfigError, LatheError, ResumeError
from trainer.files.atomic import read_json, write_json

if TYPE_CHECKING:
    from jobs.record.events import Job
    from jobs.record.paths import RunFolder
    from jobs.record.row import Row

SENDERS = 4  # threads: most of the time is spent waiting for the disk, or for a scheduler's reply
ARRAY_LOCKS = 256  # experiments of one array: each holds a lock, and a process may hold 1,024 files

log = logging.getLogger(__name__)


def preview(request: Request) -> list[ActionResult]:
    """What `submit` would do with each experiment, and why; the scheduler is asked, nothing is
    written or sent.
    """
    templates = request.templates
    rows = _rows(request, record_changes=False)
    results: list[ActionResult] = []
    for name in request.by_id:
        try:
            check_dictionary(request.base.run(name), request.by_id[name])
            decision = _decide(request, name, rows.get(name))
            state = _told_state(request.base.run(name), rows.get(name))
            results.append(ActionResult(name, decision.action, decision.reason, state))
        except LatheError as error:
            results.append(
                ActionResult(name, "failed", str(error), _state(rows.get(name)), is_bad=True)
            )
    to_send = [result.exp_id for result in results if result.action == "send"]
    if to_send:  # one is asked for all: they differ in nothing that a scheduler sees
        answer = request.backend.rehearse(
            request.backend.render(with_trial_name(templates[to_send[0]]))
        )
        log.info("%s: %s", request.backend.name, answer or "has no dry run")
    return results


def submit(request: Request) -> list[ActionResult]:
    """Send every experiment that is neither done nor alive. Each is in its own result; nothing
    stops the others.

    Whoever died before the answer came is waited for and then taken over.
    """
    templates = request.templates
    rows = _rows(request, record_changes=True)
    budget = _Budget(request)
    done: dict[str, ActionResult] = {}
    if request.use_array:
        done = _submit_arrays(request, templates, rows)
    left = [name for name in templates if name not in done]

    def send_it(name: str) -> ActionResult:
        return _submit_one(request, name, templates[name], rows.get(name), budget)

    if request.backend.traits.is_in_process:
        done.update(_one_after_the_other(left, send_it))
    elif budget.left is not None:  # each has to be counted before the next
        done.update({name: send_it(name) for name in left})
    else:
        with ThreadPoolExecutor(SENDERS) as pool:
            done.update(zip(left, pool.map(send_it, left), strict=True))
    deadline = time.monotonic() + 3 * request.resend_s + 1
    while (
        open_ones := [name for name in done if done[name].is_unanswered]
    ) and time.monotonic() < deadline:
        time.sleep(min(0.5, request.resend_s / 4))
        for name in open_ones:
            done[name] = _submit_one(request, name, templates[name], None, budget)
    return [done[name] for name in request.by_id]


def specs(request: Request) -> list[JobSpec]:
    """What would be sent first for each experiment, checked.

    It is numbered attempt 0, and no record stands behind it.
    """
    return [with_trial_name(template) for template in request.templates.values()]


def rendered(request: Request) -> list[str]:
    """The texts that the scheduler would get."""
    return [request.backend.render(spec).text for spec in specs(request)]


def _one_after_the_other(
    names: Sequence[str], send_it: Callable[[str], ActionResult]
) -> dict[str, ActionResult]:
    """Results of an inline submission, which runs each experiment to its end.

    After one that was stopped no other begins.
    """
    done: dict[str, ActionResult] = {}
    for name in names:
        if any(result.action == "send" and result.state == "preempted" for result in done.values()):
            done[name] = ActionResult(name, "wait", "the one before it was stopped", "pending")
        else:
            done[name] = send_it(name)
    return done


class _Budget:
    """How many more of the group may be alive at once, where the backend keeps no queue."""

    def __init__(self, request: Request) -> None:
        self.left: int | None = None
        if request.max_parallel is None or request.use_array or request.backend.traits.keeps_queue:
            return
        rows = survey(request.base, backend_of=request.backend_of, record_changes=False)
        self.left = request.max_parallel - sum(
            row.group == request.group and row.state in ACTIVE for row in rows
        )

    def is_spent(self) -> bool:
        return self.left is not None and self.left <= 0

    def spend(self) -> None:
        if self.left is not None:
            self.left -= 1


# One experiment
# --------------------------------------------------------------------------------------------------


def _submit_one(
    request: Request, name: str, template: JobSpec, row: Row | None, budget: _Budget
) -> ActionResult:
    folder = request.base.run(name)
    try:
        check_dictionary(folder, request.by_id[name])
        decision = _decide(request, name, row)
        if decision.action == "skip":
            return ActionResult(name, "skip", decision.reason, _told_state(folder, row))
        with record.locked(folder, wait_s=LOCK_WAIT_S):
            return _under_lock(request, folder, template, row, budget)
    except Unreachable as error:
        return ActionResult(name, "settle", str(error), "submitting", is_bad=True)
    except (LatheError, OSError) as error:
        return ActionResult(name, "failed", str(error), _state(row), is_bad=True)


def _under_lock(
    request: Request, folder: RunFolder, template: JobSpec, row: Row | None, budget: _Budget
) -> ActionResult:
    name = folder.path.name
    job = _begin(request, folder, template)
    if job.attempts:  # looked at again: it may have moved on, or ended, since the survey
        row = survey(
            request.base, only=[name], backend_of=request.backend_of, record_changes=False
        )[0]
        job = record_state(folder, job, row)
    decision = _decide(request, name, row)
    if decision.action == "skip":
        return ActionResult(name, "skip", decision.reason, _state(row))
    if decision.action == "settle" and job.last is not None:
        outcome = settle_intent(
            folder, job.last, request.backend_of(job.last.backend), resend_s=request.resend_s
        )
        return _result(name, "settle", outcome)
    if budget.is_spent():
        write_json(_planned(folder, job), template.model_dump(mode="json"))
        return ActionResult(
            name,
            "wait",
            f"max_parallel={request.max_parallel} are alive: `reconcile` sends it",
            "pending",
        )
    budget.spend()
    spec = fresh(job, template, folder)
    outcome = send(folder, spec, request.backend)
    if request.backend.traits.is_in_process:
        return _ended(folder, spec)
    return _result(name, "send", outcome)


def _ended(folder: RunFolder, spec: JobSpec) -> ActionResult:
    """What became of an experiment that ran here, now."""
    exit_file = read_json(folder.attempt(spec.attempt).exit) or {}
    kind = str(exit_file.get("kind", "lost"))
    text = f"{kind}: {exit_file['reason']}" if exit_file.get("reason") else kind
    end = end_of(exit_file.get("code"))
    state: JobState = end if end in ("succeeded", "preempted") else "failed"
    return ActionResult(spec.exp_id, "send", text, state, is_bad=end != "succeeded")


def _begin(request: Request, folder: RunFolder, template: JobSpec) -> Job:
    """The record of an experiment, begun if need be; its dictionary is written first."""
    check_dictionary(folder, request.by_id[template.exp_id])
    if not folder.exp_dict.exists():
        with contextlib.suppress(FileExistsError):
            folder.path.mkdir(parents=True)
        write_json(folder.exp_dict, request.by_id[template.exp_id])
    if request.snapshot is not None:
        link(folder, request.snapshot)
    job = record.read(folder)
    if job is None:
        record.create(folder, exp_id=template.exp_id, digest=template.digest, group=template.group)
        job = record.read(folder)
    assert job is not None, "the record was written a moment ago"
    if job.digest != template.digest:
        raise ResumeError(
            f"{folder.record} is of another dictionary than {folder.exp_dict}. `reset` it, or "
            "use another base."
        )
    return job


def _planned(folder: RunFolder, job: Job) -> Path:
    """Where the spec of an experiment that waits for its turn is kept, until it is sent."""
    path = folder.attempt(len(job.attempts) + 1).spec
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _result(name: str, action: str, outcome: Outcome) -> ActionResult:
    state: JobState = (
        "submitted" if outcome.is_sent else "pending" if outcome.is_refused else "submitting"
    )
    is_open = not outcome.is_sent and not outcome.is_refused
    return ActionResult(
        name, action, outcome.text, state, is_bad=not outcome.is_sent, is_unanswered=is_open
    )


def _decide(request: Request, name: str, row: Row | None) -> Decision:
    folder = request.base.run(name)
    status = read_json(folder.status) or {}
    limits = Limits(
        request.job.max_retries,
        request.job.max_preemptions,
        request.retry,
        with_bad_input=bool(request.retry and row is not None and _differs(request, folder, row)),
    )
    return decide(
        row,
        limits,
        is_finished=status.get("state") == "succeeded",
        training_now=training_now(folder, was_sent=row is not None and bool(row.history)),
    )


def _differs(request: Request, folder: RunFolder, row: Row) -> bool:
    """Whether what would be sent now differs from what was sent last.

    Other flags, another code or another job dictionary.
    """
    last = read_json(folder.attempt(row.attempt).spec) or {}
    now = request.templates[row.exp_id].model_dump(mode="json")
    return any(
        last.get(key) != now[key]
        for key in ("launcher", "program", "workdir", "environment", "activate", "job")
    )


def _state(row: Row | None) -> JobState:
    return row.state if row is not None else "pending"


def _told_state(folder: RunFolder, row: Row | None) -> JobState:
    """The state of its row; of what was only run by hand, the one in its status.json."""
    state = (read_json(folder.status) or {}).get("state")
    return state if row is None and state in STATES else _state(row)


# Arrays
# --------------------------------------------------------------------------------------------------


def _submit_arrays(
    request: Request, templates: Mapping[str, JobSpec], rows: Mapping[str, Row]
) -> dict[str, ActionResult]:
    """Send those that have to be sent, in as few submissions as the scheduler's limit allows.

    The others are left out. ConfigError when the backend has no arrays.
    """
    if not isinstance(request.backend, ArrayBackend):
        raise ConfigError(f"--array: {request.backend.name} has no arrays. Leave it out.")
    wanted = [
        name
        for name in sorted(templates)
        if _decide(request, name, rows.get(name)).action == "send"
    ]
    size = min(request.backend.max_array(), ARRAY_LOCKS)
    if size < 1:
        raise ConfigError(f"--array: {request.backend.name} allows none here. Leave it out.")
    done: dict[str, ActionResult] = {}
    for start in range(0, len(wanted), size):
        chunk = {name: templates[name] for name in wanted[start : start + size]}
        done.update(_submit_array(request, chunk, rows))
    return done


def _submit_array(
    request: Request, chunk: Mapping[str, JobSpec], rows: Mapping[str, Row]
) -> dict[str, ActionResult]:
    done: dict[str, ActionResult] = {}
    specs: dict[str, JobSpec] = {}
    with contextlib.ExitStack() as locks:
        for name, template in chunk.items():
            folder = request.base.run(name)
            try:
                locks.enter_context(record.locked(folder, wait_s=LOCK_WAIT_S))
                job = _begin(request, folder, template)
                row = rows.get(name)
                if (row is not None and row.attempts == len(job.attempts)) or (
                    row is None and not job.attempts
                ):
                    specs[str(folder.path)] = fresh(job, template, folder)
            except LatheError as error:
                done[name] = ActionResult(
                    name, "failed", str(error), _state(rows.get(name)), is_bad=True
                )
        if specs:
            outcomes = send_array(
                specs, request.backend, request.base.arrays, max_parallel=request.max_parallel
            )
            done.update(
                {
                    spec.exp_id: _result(spec.exp_id, "send", outcomes[path])
                    for path, spec in specs.items()
                }
            )
    return done


# Before anything is sent
# -------------------------------------------------------------------------------------------


def _rows(request: Request, *, record_changes: bool) -> dict[str, Row]:
    found = survey(
        request.base,
        only=list(request.by_id),
        backend_of=request.backend_of,
        record_changes=record_changes,
    )
    return {row.exp_id: row for row in found}
