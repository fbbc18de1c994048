"""The keeper checks the files of jobs, submits, pauses and resumes them, and updates the index.

It decides everything from files, and every action may be repeated: by this server after it was
killed, or by another server at the same time. The record of a run folder makes sure that one
attempt starts once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

from jobs.backends import BackendCache
from jobs.backends.beside import HOST, BesideHost
from jobs.code.snapshot import Snapshot, take
from jobs.config import JobConfig
from jobs.errors import (
    Unreachable,
    for_client,
    is_transient,
    kind_of,
    reason_for_client,
    reason_of,
)
from jobs.job_state import ACTIVE, JobState
from jobs.record import events as record
from jobs.record.paths import RunFolder, is_there
from jobs.record.patience import PatientBackends
from jobs.record.row import Row
from jobs.record.times import now
from jobs.serve.exported_step import export_step
from jobs.serve.index import Index
from jobs.serve.job_view import (
    FAILED,
    FINAL,
    Facts,
    is_paused,
    standing,
)
from jobs.serve.offers import Offer, ServiceConfig, held_out_per_mille
from jobs.serve.rows import checks as uploaded_rows
from jobs.serve.steps.upkeep.driven_jobs import DrivenJobs, note_checked
from jobs.serve.steps.upkeep.hosts import is_shared
from jobs.serve.tickets import (
    Checked,
    Failure,
    ServiceFolder,
    Ticket,
    TicketFolder,
)
from jobs.serve.turn.lanes import Action, Lane, Lanes
from jobs.serve.turn.reader import FolderReader, failure_part
from jobs.serve.turn.troubles import Troubles
from jobs.submit import control, prepare
from jobs.submit import group as group_of_jobs
from jobs.submit.policy import Limits
from jobs.submit.request import ActionResult, Request
from trainer.config.block import validate
from trainer.config.identity import exp_id
from trainer.errors import ConfigError, LatheError
from trainer.files.atomic import create_json, refusals

GROUP = "service"  # of every job that the service sends
PAUSED = "paused in the service: resuming it there goes on from its last checkpoint"
# it reads whole files, which takes the processor: others are to be answered meanwhile
FILES = Lane("files", width=2, of_one_owner=1)
ASK_AGAIN_S = 10.0  # between two requests for the end of the same attempt
LOCK_WAIT_S = 0.0  # whoever holds the lock of one run keeps the others waiting no longer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Send:
    """How jobs are submitted: to which backend, and with which code."""

    backend: str
    python_binary: str = ""
    allow_dirty: bool = False


@dataclass(frozen=True)
class _Step:
    """What is to be done next for a job. take: returns whether anything was done."""

    lane: Lane
    take: Callable[[], bool]


@dataclass
class Keeper:
    """Looks after the jobs of one server."""

    folder: ServiceFolder
    config: ServiceConfig
    send: Send
    every_s: float = 1.0
    backend_of: BackendCache = field(default_factory=BackendCache)
    observed_by: PatientBackends = field(default_factory=lambda: PatientBackends(BackendCache()))
    _poked: threading.Event = field(default_factory=threading.Event)
    _is_stopped: bool = False
    _lanes: Lanes = field(default_factory=Lanes)
    _driven: DrivenJobs = field(default_factory=DrivenJobs)
    # job id -> what was done for it -> when, in seconds of the monotonic clock
    _last_tries: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

    @cached_property
    def reader(self) -> FolderReader:
        """Reads the folders, and has the index."""
        return FolderReader(self.folder, self.config.organization, self.observed_by, self.every_s)

    @property
    def index(self) -> Index:
        """The index of the folders."""
        return self.reader.index

    @property
    def unreadable(self) -> Troubles:
        """The jobs, uploads and runs whose folder cannot be read now."""
        return self.reader.unreadable

    @cached_property
    def snapshot(self) -> Snapshot:
        """The code that jobs run: a snapshot, taken when this server submits its first job."""
        return take(prepare.PROJECT, self.folder.base, allow_dirty=self.send.allow_dirty)

    def run(self) -> None:
        """Take a turn every `every_s` seconds, until `stop`. What is done for a job has a thread of
        its own, because a scheduler may keep it waiting.
        """
        while not self._is_stopped:
            self._poked.clear()
            try:
                self._start_actions()
            except Exception:  # of any kind: one bad folder must not end the service
                log.exception("a turn failed; the next one is in %s s", self.every_s)
            self._poked.wait(self.every_s)

    def poke(self) -> None:
        """Start the next turn at once."""
        self._poked.set()

    @property
    def is_stopped(self) -> bool:
        """Whether the server is stopping."""
        return self._is_stopped

    def stop(self) -> None:
        """End `run` after this turn. The jobs continue."""
        self._is_stopped = True
        self._poked.set()

    def turn(self) -> None:
        """Read everything that may have changed, act on it to the end, and read what was done."""
        self._start_actions()
        names = self._lanes.join()
        part = "the jobs that were advanced"
        self.reader.run_part(part, lambda: self.reader.read_jobs(names), {})

    def _start_actions(self) -> None:
        """Read everything that may have changed, and start what is to be done for each job."""
        seen_at = time.monotonic()
        facts = self.reader.read_changes()
        for ended in self._last_tries.keys() - self.reader.open_ids:
            del self._last_tries[ended]
        self._lanes.forget_all_but(self.reader.open_ids)
        actions: list[Action] = []
        for name, one in facts.items():
            lane = self._lane(one)
            if lane is not None:
                take = partial(self._has_advanced, one)
                actions.append(Action(name, one.ticket.owner, lane, take))
            elif not self._lanes.is_busy(name):
                self.reader.failing.end(name)
        self._lanes.replace(actions, seen_at=seen_at)

    def _lane(self, facts: Facts) -> Lane | None:
        """The lane of the next step of a job; None when there is none to be taken."""
        try:
            step = self._next_step(facts)
        except Exception:  # of any kind: it is met again, and told, when the step is taken
            return FILES
        return None if step is None else step.lane

    def _has_advanced(self, facts: Facts) -> bool:
        """Take the next step of one job; returns whether anything was done. What it throws is its
        own: it is tried again when it may pass by itself, and else it fails the job.
        """
        name = facts.ticket.id
        folder = TicketFolder(self.folder.tickets / name)
        try:
            is_done = self._advance(facts)
        except Exception as error:  # of any kind, so that no job of another waits for ever
            reason, kind = reason_of(error, folder.path), kind_of(error)
            log.debug("%s", name, exc_info=error)
            may_pass = is_transient(error)
            if not self.reader.failing.note(name, reason, kind=kind, is_transient=may_pass):
                return False
            reason = reason_for_client(error, folder.path, self.folder.base.path)
            fail = partial(self._fail, folder, Failure(at=now(), message=reason))
            is_done = self.reader.run_part(failure_part(name), fail, False)
            if not is_done:
                return False
        self.reader.failing.end(name)
        return is_done

    def _fail(self, folder: TicketFolder, failure: Failure) -> bool:
        """Write down durably why a job cannot go on. StorageError."""
        return create_json(folder.failure_file, failure.model_dump(mode="json"))

    def read_job(self, job_id: str) -> dict[str, Any] | None:
        """A job as its files are now, also written to the index; None for an unknown id."""
        self.reader.read_jobs([job_id])
        return self.index.job(job_id)

    # Acting

    def _advance(self, facts: Facts) -> bool:
        """Take the next step of a job, if there is one; returns whether anything was done. Raises
        whatever keeps it from going on.
        """
        folder = TicketFolder(self.folder.tickets / facts.ticket.id)
        if facts.failure is None:  # a wish may have come while other jobs were advanced
            facts = replace(facts, wishes=folder.wishes())
        step = self._next_step(facts)
        return step is not None and step.take()

    def _next_step(self, facts: Facts) -> _Step | None:
        """What is to be done for a job; None when nothing is."""
        folder = TicketFolder(self.folder.tickets / facts.ticket.id)
        row, failure = facts.row, facts.failure
        is_on_record = failure is None or is_there(folder.failure_file)
        if failure is not None and not is_on_record and standing(facts).status == "failed":
            return _Step(FILES, partial(self._fail, folder, failure))
        is_unwanted = facts.last_wish("cancel") is not None or is_paused(facts)
        is_unwanted |= failure is not None
        if row is not None and row.state in ACTIVE and is_unwanted:
            why = PAUSED if is_paused(facts) else None
            return self._step("end", row, partial(self._end, facts.ticket.id, row, why=why))
        if row is not None and row.state == "paused" and is_unwanted and not is_paused(facts):
            return self._step("end", row, partial(self._end, facts.ticket.id, row, why=None))
        if is_unwanted or standing(facts).status in FINAL:
            return None
        if facts.checked is None:
            check = note_checked if facts.ticket.driven_by else self._check
            return _Step(FILES, partial(check, folder, facts.ticket))
        if row is None or not row.history:
            return self._step("send", row, partial(self._submit, facts, folder))
        if row.state in ACTIVE and row.job_id is not None:
            return None
        rest = None
        if facts.ticket.driven_by is not None:
            rest = self._driven.rest(self.folder.base, row, reserve=self.config.reserve)
        if rest is not None:
            fail = partial(self._fail, folder, Failure(at=now(), message=rest))
            return _Step(FILES, fail) if rest else None
        return self._step("send", row, partial(self._again, facts, row))

    def _step(self, verb: str, row: Row | None, take: Callable[[], bool]) -> _Step:
        """A step that asks the backend of a job's last attempt, or else that of this server."""
        backend = row.backend if row is not None else None
        return _Step(Lane(f"{verb} {backend or self.send.backend}"), take)

    def _check(self, folder: TicketFolder, ticket: Ticket) -> bool:
        """Check the files of a job completely, and write their rows as its task reads them."""
        message, param = None, None
        places: Mapping[int, int] = {}
        for name, file_id in _files(ticket):
            upload = self.folder.upload(file_id)
            facts = None if upload is None else upload.read()
            if upload is None or facts is None:
                message, param = f"{name} {file_id} was deleted. Upload it again.", name
                break
            report = uploaded_rows.check(upload.content, [ticket.kind])
            if report.num_mistakes:
                lines = [f"{name} {file_id}: {report.num_mistakes} mistake(s)"]
                lines += [f"  {mistake}" for mistake in report.mistakes]
                more = report.num_mistakes - len(report.mistakes)
                if more:
                    lines.append(f"  and {more} more")
                message, param = "\n".join(lines), name
                break
            places = places or report.places  # of the first one, which is trained on
        if message is None:
            self._write_data(folder, ticket, places)
            message, param = self._export_step(ticket), "model"
        param = None if message is None else param
        values = Checked(at=now(), param=param, message=message).model_dump(mode="json")
        create_json(folder.check_file, values)
        return True

    def _export_step(self, ticket: Ticket) -> str | None:
        """Make the model of the saved step that a job begins with, before its run removes that
        step; returns why there is none, or None.
        """
        base: Any = ticket.experiment.get("base")
        model = cast("dict[str, Any]", base).get("model") if isinstance(base, dict) else None
        if model is None or not str(model).startswith("step-"):
            return None
        run = self.folder.base.run(exp_id(cast("dict[str, Any]", base)["experiment"]))
        error = export_step(run.path, str(model), self.folder.cache)
        return error and f"model {ticket.begins_with}: {for_client(error, self.folder.base.path)}"

    def _write_data(self, folder: TicketFolder, ticket: Ticket, places: Mapping[int, int]) -> None:
        """Write both splits. places: how many rows of the training file have each place."""
        with refusals(folder.data):
            folder.data.mkdir(exist_ok=True)
        train = self.folder.uploads / ticket.training_file / "content"
        valid, limit = None, 0
        if ticket.validation_file is not None:
            valid = self.folder.uploads / ticket.validation_file / "content"
        else:
            limit = held_out_per_mille(self._offer(ticket), places)
        uploaded_rows.write_splits(train, valid, folder.data, ticket.kind, limit)

    def _submit(self, facts: Facts, folder: TicketFolder) -> bool:
        ticket = facts.ticket
        with self._driven.place(self, ticket) as host:
            request = self._request_of(ticket, folder, host)
            if len(folder.wishes()) != len(facts.wishes):
                return True  # a wish came while the code was copied: it is looked at first
            for result in group_of_jobs.submit(request):
                log.info("%s: %s: %s", ticket.id, result.action, result.text)
                _raise_failure(result)
        return True

    def _request_of(self, ticket: Ticket, folder: TicketFolder, host: str | None) -> Request:
        """The submission of a job. host: the run whose worker is to compute it."""
        values = dict(self._offer(ticket).job)
        if self.send.python_binary:
            values["python_binary"] = self.send.python_binary
        job = validate(JobConfig, values, source=f"job of model {ticket.model!r}")
        flags = {"cache_dir": str(self.folder.cache)}
        if ticket.driven_by is None:
            flags["data_path"] = str(folder.data)
        if self._offer(ticket).test and ticket.method == "supervised":
            flags["test"] = ""
        request = self.request([ticket.experiment], GROUP, job, flags, host=host)
        # a turn waits for nobody: what has no answer, or is locked, is tried again in the next ones
        return replace(request, lock_wait_s=LOCK_WAIT_S, answer_wait_s=0.0)

    def _offer(self, ticket: Ticket) -> Offer:
        """The offer that a job was asked of. ConfigError when it is offered no more."""
        offer = self.config.models.get(ticket.model)
        if offer is None:
            names = ", ".join(sorted(self.config.models))
            raise ConfigError(
                f"model: {ticket.model!r} is offered no more, want one of {names}. Create the job "
                "again."
            )
        return offer

    def request(
        self,
        experiments: list[dict[str, Any]],
        group: str,
        job: JobConfig,
        flags: Mapping[str, str],
        *,
        is_plan: bool = False,
        host: str | None = None,
    ) -> Request:
        """The submission of experiments with the code of this server. ConfigError for a mistake in
        any of them.

        is_plan: takes no snapshot of the code; the request can be previewed but not submitted.
        host: the run whose worker is to compute them.
        """
        request = prepare.make(
            group=group,
            experiments=experiments,
            base=self.folder.base.path,
            backend=self.send.backend if host is None else BesideHost.name,
            job=job,
            flags=flags,
            allow_dirty=True,
            take_snapshot=False,
            backend_of=self.backend_of,
        )
        if host is not None:
            request = replace(request, environment={**request.environment, HOST: host})
        if not is_plan:
            request = replace(request, snapshot=self.snapshot, workdir=self.snapshot.workdir)
        _ = request.trials  # raises ConfigError before a run folder is written
        return request

    def _end(self, job_id: str, row: Row, *, why: str | None) -> bool:
        """Cancel an attempt, or let it pause; at most every ASK_AGAIN_S seconds, but in each turn
        while another process holds its lock.
        """
        key, tries = f"{row.attempt} {why or 'cancel'}", self._last_tries.setdefault(job_id, {})
        if row.read_error is not None and key in tries:
            return False  # whether it ends can never be seen
        last = row.history[-1] if row.history else None
        has_wish = last is not None and last.is_cancelled and last.end_wanted_for == why
        if has_wish and key not in tries:
            tries[key] = time.monotonic()  # another server has asked
        if time.monotonic() - tries.get(key, -ASK_AGAIN_S) < ASK_AGAIN_S:
            return False
        _raise_if_locked(self.folder.base.run(row.exp_id))
        tries[key] = time.monotonic()
        results = control.cancel(
            self.folder.base, [row], self.backend_of, why=why, lock_wait_s=LOCK_WAIT_S
        )
        for result in results:
            log.info("%s: %s", row.exp_id, result.text)
        return True

    def _again(self, facts: Facts, row: Row) -> bool:
        """Continue a run that was paused or preempted, that waits for its turn, or whose submission
        got no answer.

        A run that has to wait is tried again after ASK_AGAIN_S seconds, because a try reads every
        run; one whose lock another process holds is tried again in the next turn.
        """
        tries = self._last_tries.setdefault(facts.ticket.id, {})
        key = f"{row.attempt} again {len(facts.wishes)}"
        if time.monotonic() - tries.get(key, -ASK_AGAIN_S) < ASK_AGAIN_S:
            return False
        _raise_if_locked(self.folder.base.run(row.exp_id))
        # "cancelled": paused by an earlier version, which did not say so in its record
        resumed: tuple[JobState, ...] = ("paused", "cancelled")
        is_driven = facts.ticket.driven_by is not None
        if is_driven:  # DrivenJobs.rest has said that it goes on
            resumed = (*resumed, "preempted", *FAILED)
        if is_shared(facts.ticket):  # another worker may compute it now
            folder = TicketFolder(self.folder.tickets / facts.ticket.id)
            with self._driven.place(self, facts.ticket) as host:
                request = self._request_of(facts.ticket, folder, host)
                request = replace(request, retry=resumed, with_bad_input=is_driven)
                (result,) = group_of_jobs.submit(request)
        else:
            limits = Limits(retry=resumed, with_bad_input=is_driven)
            limits = limits if row.state in resumed else None
            sent = control.Again(self.folder.base, self.backend_of, limits, lock_wait_s=LOCK_WAIT_S)
            (result,) = control.again(sent, [row])
        if result.action in ("skip", "wait") or result.is_bad:
            tries[key] = time.monotonic()
            _raise_failure(result)
            return False
        return True


def _raise_if_locked(folder: RunFolder) -> None:
    """Busy when another process holds the lock of a run; return when it is free now."""
    with record.lock(folder, wait_s=LOCK_WAIT_S):
        pass


def _raise_failure(result: ActionResult) -> None:
    """Raise the error with which a job was not sent; return when it was, or may be later."""
    if result.action == "failed":
        raise Unreachable(result.text) if result.is_transient else LatheError(result.text)


def _files(ticket: Ticket) -> Iterator[tuple[str, str]]:
    yield "training_file", ticket.training_file
    if ticket.validation_file is not None:
        yield "validation_file", ticket.validation_file
