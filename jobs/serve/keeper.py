"""The keeper checks the files of jobs, submits, pauses and resumes them, and updates the index.

It decides everything from files, and every action may be repeated: by this server after it was
killed, or by another server at the same time. The record of a run folder makes sure that one
attempt starts once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from jobs.backends import BackendCache
from jobs.code.snapshot import Snapshot, take
from jobs.config import JobConfig
from jobs.errors import Unreachable, is_transient, reason_of
from jobs.job_state import ACTIVE, JobState
from jobs.record.paths import RunFolder, is_exp_id, is_there
from jobs.record.patience import PatientBackends
from jobs.record.row import Row
from jobs.record.status import survey
from jobs.record.times import now
from jobs.serve import rows as uploaded_rows
from jobs.serve.index import Index, MetricsPlace
from jobs.serve.job_view import (
    FINAL,
    Facts,
    JobEvent,
    is_paused,
    job_object,
    metric_events,
    metric_lines_from,
    seconds,
    standing,
    state_events,
    unreadable_job,
)
from jobs.serve.live.runs import mark, update_index
from jobs.serve.live.troubles import Troubles
from jobs.serve.offers import Offer, ServiceConfig, num_held_out
from jobs.serve.tickets import (
    FILE,
    JOB,
    Checked,
    Failure,
    ServiceFolder,
    Ticket,
    TicketFolder,
)
from jobs.serve.uploads import unreadable
from jobs.submit import control, prepare
from jobs.submit import group as group_of_jobs
from jobs.submit.policy import Limits
from jobs.submit.request import ActionResult, Request
from trainer.config.block import validate
from trainer.errors import ConfigError, LatheError
from trainer.files.atomic import create_json, refusals

GROUP = "service"  # of every job that the service sends
ASK_AGAIN_S = 10.0  # between two requests for the end of the same attempt
MARK_BYTES = (
    4096  # before a place in metrics.jsonl; their digest shows whether the file is the same
)

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Send:
    """How jobs are submitted: to which backend, and with which code."""

    backend: str
    python_binary: str = ""
    allow_dirty: bool = False


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
    _looking: threading.Lock = field(default_factory=threading.Lock)
    _exp_ids: dict[str, str] = field(default_factory=dict[str, str])
    _asked: dict[str, float] = field(default_factory=dict[str, float])

    @cached_property
    def unreadable(self) -> Troubles:
        """The jobs, uploads and runs whose folder cannot be read now."""
        return Troubles(self.every_s)

    @cached_property
    def _failing(self) -> Troubles:
        """The jobs, and parts of the turn, that threw an error when they were last done."""
        return Troubles(self.every_s)

    @cached_property
    def index(self) -> Index:
        """The index of the folders."""
        with refusals(self.folder.index):
            return Index(self.folder.index)

    @cached_property
    def snapshot(self) -> Snapshot:
        """The code that jobs run: a snapshot, taken when this server submits its first job."""
        return take(prepare.PROJECT, self.folder.base, allow_dirty=self.send.allow_dirty)

    def run(self) -> None:
        """Take a turn every `every_s` seconds, until `stop`. Actions run in a thread of their own,
        because a scheduler may keep them waiting.
        """
        acting: threading.Thread | None = None
        while not self._is_stopped:
            self._poked.clear()
            try:
                facts = self._see()
                if acting is None or not acting.is_alive():
                    acting = threading.Thread(target=self._act, args=(facts,), daemon=True)
                    acting.start()
                    acting.join(self.every_s)
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
        """Read everything that may have changed, and act on it."""
        self._act(self._see())

    def _see(self) -> dict[str, Facts]:
        """Read everything that may have changed; returns the jobs among it."""
        facts = self._apart("the jobs", lambda: self._look(self._changed()), {})
        self._apart("the uploads", self._take_in_uploads, None)
        self._apart("the runs", self._take_in_runs, None)
        return facts

    def _changed(self) -> list[str]:
        """Ids of the jobs whose files may have changed since they were read."""
        marks, waiting = self.index.job_marks(), self.index.open_jobs()
        names = self.folder.ticket_ids()
        self.unreadable.keep(names, prefix=JOB)
        return [
            name
            for name in names
            if name not in marks or name in waiting or self._marks(name) != marks[name]
        ]

    def _take_in_uploads(self) -> None:
        """Write new uploads to the index, and remove those that are gone."""
        on_disk, indexed = set(self.folder.upload_ids()), self.index.upload_ids()
        self.index.drop_uploads(indexed - on_disk)
        self.unreadable.keep(on_disk, prefix=FILE)
        for file_id in (on_disk - indexed) | (on_disk & self.unreadable.reasons.keys()):
            self._apart(f"the upload {file_id}", partial(self._take_in_upload, file_id), None)

    def _take_in_upload(self, file_id: str) -> None:
        folder = self.folder.upload(file_id)
        assert folder is not None, "its name is well-formed"
        try:
            upload = folder.read()
        except Exception as error:  # of any kind: other uploads are read all the same
            reason = reason_of(error, folder.path)
            self.unreadable.note(file_id, reason, is_transient=is_transient(error))
            upload = unreadable(file_id, reason, folder.path.lstat().st_mtime, None)
        else:
            self.unreadable.end(file_id)
        if upload is not None:
            self.index.write_upload(
                upload.model_dump(mode="json"),
                owner=upload.owner,
                created=seconds(upload.created_at),
            )

    def _take_in_runs(self) -> None:
        """Write the runs that may have changed to the index."""
        troubled = [name for name in self.unreadable.reasons if is_exp_id(name)]
        found = update_index(self.index, self.folder.base, self.observed_by, troubled)
        for name in set(troubled) - found.keys():
            self.unreadable.end(name)
        for name, reason in found.items():
            self.unreadable.note(name, reason, is_transient=True)

    def _act(self, facts: Mapping[str, Facts]) -> None:
        """Advance jobs, and read again those for which something was done."""
        names = [name for name in facts if self._has_advanced(facts[name])]
        self._apart("the jobs that were advanced", lambda: self._look(names), {})

    def _has_advanced(self, facts: Facts) -> bool:
        """Take the next step of one job; returns whether anything was done. What it throws is its
        own: it is tried again when it may pass by itself, and else it fails the job.
        """
        folder = TicketFolder(self.folder.tickets / facts.ticket.id)
        try:
            is_done = self._advance(facts)
        except Exception as error:  # of any kind, so that no job of another waits for ever
            reason = reason_of(error, folder.path)
            log.debug("%s", facts.ticket.id, exc_info=error)
            if not self._failing.note(facts.ticket.id, reason, is_transient=is_transient(error)):
                return False
            failure = Failure(at=now(), message=reason)
            return self._apart(facts.ticket.id, partial(self._fail, folder, failure), False)
        self._failing.end(facts.ticket.id)
        return is_done

    def _fail(self, folder: TicketFolder, failure: Failure) -> bool:
        """Write down durably why a job cannot go on. StorageError."""
        return create_json(folder.failure_file, failure.model_dump(mode="json"))

    def _apart(self, part: str, work: Callable[[], T], otherwise: T) -> T:
        """The result of a part of the turn. When it throws, its error is logged once, and the
        other parts are done all the same.
        """
        try:
            result = work()
        except Exception as error:
            if part not in self._failing.reasons:
                log.exception("%s", part)
            self._failing.note(part, str(error), is_transient=True)
            return otherwise
        if part in self._failing.reasons:
            self._failing.end(part)
        return result

    def look(self, job_id: str) -> dict[str, Any] | None:
        """A job as its files are now, also written to the index; None for an unknown id."""
        self._look([job_id])
        return self.index.job(job_id)

    # Reading

    def facts(self, job_id: str, row: Row | None) -> Facts | None:
        """What the files of a job say; None when there is no ticket. OSError, LatheError."""
        folder = self.folder.ticket(job_id)
        ticket = folder.read() if folder is not None else None
        if folder is None or ticket is None:
            return None
        failure = folder.read_failure()
        return Facts(ticket, folder.read_checked(), folder.wishes(), row, failure)

    def rows(self, exp_ids: Collection[str]) -> dict[str, Row]:
        """The states of these experiments; those that were never submitted are missing."""
        rows = survey(self.folder.base, only=exp_ids, backend_of=self.observed_by)
        return {row.exp_id: row for row in rows}

    def _look(self, job_ids: Collection[str]) -> dict[str, Facts]:
        """Read jobs again and write them to the index."""
        by_id: dict[str, Facts] = {}
        with self._looking:  # older facts must not replace newer ones in the index
            marks = {name: self._marks(name) for name in job_ids}
            exp_ids = {name: self._exp_id(name) for name in job_ids}
            rows = self.rows([name for name in exp_ids.values() if name is not None])
            for name, exp_id in exp_ids.items():
                put = partial(self._put, name, rows.get(exp_id or ""), marks[name])
                facts = self._apart(f"{name}: the index", put, None)
                if facts is not None:
                    by_id[name] = facts
        return by_id

    def _put(self, job_id: str, row: Row | None, marks: str) -> Facts | None:
        """Read one job and write it to the index; None when there is nothing to be done for it."""
        try:
            facts = self.facts(job_id, row)
            if facts is None:
                return None
            if row is not None and row.read_error is not None:
                kind = LatheError if row.read_error == "permanent" else Unreachable
                raise kind(row.reason or row.folder)
            self._write(facts, marks)
        except Exception as error:  # of any kind: the jobs of others are read all the same
            return self._put_unreadable(job_id, row, marks, error)
        self.unreadable.end(job_id)
        return facts

    def _put_unreadable(
        self, job_id: str, row: Row | None, marks: str, error: Exception
    ) -> Facts | None:
        """Write to the index that a job has failed because it cannot be read, with all of it that
        can be. It stays as it was while that may pass, and when it had ended before.
        """
        folder = TicketFolder(self.folder.tickets / job_id)
        reason = reason_of(error, folder.path)
        is_of_run = row is not None and row.read_error is not None
        name = row.exp_id if row is not None and is_of_run else job_id
        is_lasting = self.unreadable.note(name, reason, is_transient=is_transient(error))
        failure = _readable(folder.read_failure)
        if failure is None and is_lasting:
            failure = Failure(at=now(), message=reason)
        before, ticket = self.index.job(job_id), _readable(folder.read)
        has_ended = before is not None and before["status"] == "succeeded"
        if has_ended or (before is not None and failure is None):
            return None
        if ticket is not None:
            wishes = _readable(folder.wishes) or []
            facts = Facts(ticket, _readable(folder.read_checked), wishes, row, failure)
            self._write(facts, marks, is_readable=False)
            return facts if failure is not None else None
        if failure is not None:
            since = folder.path.lstat().st_mtime
            body = unreadable_job(job_id, reason, since, before)
            self.index.write_job(
                body,
                created=float(body["created_at"]),
                model="",
                is_open=True,
                is_deleted=False,
                facts=marks,
                place=self.index.metrics_place(job_id),
                events=[],
            )
        return None

    def _write(self, facts: Facts, marks: str, *, is_readable: bool = True) -> None:
        """Write a job to the index. is_readable: False leaves its metrics out, and reads it again
        at every turn.
        """
        ticket, organization = facts.ticket, self.config.organization
        place = self.index.metrics_place(ticket.id)
        metrics: list[JobEvent] = []
        if is_readable:
            metrics, place = new_metric_events(ticket, self._run(ticket), place)
        events = [*state_events(facts, organization), *metrics]
        is_alive = facts.row is not None and facts.row.state in ACTIVE
        self.index.write_job(
            job_object(facts, organization),
            created=seconds(ticket.created_at),
            model=ticket.tuned_model(organization),
            # a cancelled job may still be running
            is_open=is_alive or standing(facts).status not in FINAL or not is_readable,
            is_deleted=facts.is_deleted,
            facts=marks,
            place=place,
            events=sorted(events, key=lambda event: event.at),
        )

    def _exp_id(self, job_id: str) -> str | None:
        """The experiment of a ticket, which never changes; None while there is no ticket that can
        be read.
        """
        if job_id not in self._exp_ids:
            folder = self.folder.ticket(job_id)
            ticket = _readable(folder.read) if folder is not None else None
            if ticket is None:
                return None
            self._exp_ids[job_id] = ticket.exp_id
        return self._exp_ids[job_id]

    def _run(self, ticket: Ticket) -> RunFolder:
        return self.folder.base.run(ticket.exp_id)

    def _marks(self, job_id: str) -> str:
        """A text that changes whenever one of the files of a job changes."""
        exp_id = self._exp_id(job_id)
        if exp_id is None:
            return ""
        run = self.folder.base.run(exp_id)
        paths = (self.folder.tickets / job_id, run.record, run.status, run.metrics)
        return " ".join(map(mark, paths))

    # Acting

    def _advance(self, facts: Facts) -> bool:
        """Take the next step of a job, if there is one; returns whether anything was done. Raises
        whatever keeps it from going on.
        """
        folder = self.folder.ticket(facts.ticket.id)
        assert folder is not None, "a ticket has a folder"
        row, failure = facts.row, facts.failure
        is_on_record = failure is None or is_there(folder.failure_file)
        if failure is not None and not is_on_record and standing(facts).status == "failed":
            return self._fail(folder, failure)
        is_unwanted = facts.last_wish("cancel") is not None or is_paused(facts)
        is_unwanted |= failure is not None
        if row is not None and row.state in ACTIVE and is_unwanted:
            return self._end(row)
        if is_unwanted or standing(facts).status in FINAL:
            return False
        if facts.checked is None:
            self._check(folder, facts.ticket)
            return True
        if row is None or not row.history:
            return self._submit(facts.ticket, folder)
        if row.state in ACTIVE and row.job_id is not None:
            return False
        return self._again(row, len(facts.wishes))

    def _check(self, folder: TicketFolder, ticket: Ticket) -> None:
        """Check the files of a job completely, and write their rows as its task reads them."""
        message, param = None, None
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
        if message is None:
            self._write_data(folder, ticket)
        values = Checked(at=now(), param=param, message=message).model_dump(mode="json")
        create_json(folder.check_file, values)

    def _write_data(self, folder: TicketFolder, ticket: Ticket) -> None:
        with refusals(folder.data):
            folder.data.mkdir(exist_ok=True)
        train = self.folder.uploads / ticket.training_file / "content"
        write = uploaded_rows.write_split
        if ticket.validation_file is not None:
            valid = self.folder.uploads / ticket.validation_file / "content"
            write(train, folder.data / "train.jsonl", ticket.kind, keep=lambda row: True)
            write(valid, folder.data / "valid.jsonl", ticket.kind, keep=lambda row: True)
            return
        # numbers of the rows that are used for validation, evenly spread
        count = num_held_out(self._offer(ticket), ticket.num_rows)
        held_out = {(2 * part + 1) * ticket.num_rows // (2 * count) for part in range(count)}
        is_only_row = not held_out
        write(train, folder.data / "train.jsonl", ticket.kind, keep=lambda row: row not in held_out)
        write(
            train,
            folder.data / "valid.jsonl",
            ticket.kind,
            keep=lambda row: is_only_row or row in held_out,
        )

    def _submit(self, ticket: Ticket, folder: TicketFolder) -> bool:
        values = dict(self._offer(ticket).job)
        if self.send.python_binary:
            values["python_binary"] = self.send.python_binary
        job = validate(JobConfig, values, source=f"job of model {ticket.model!r}")
        flags = {"data_path": str(folder.data), "cache_dir": str(self.folder.cache)}
        request = self.request([ticket.experiment], GROUP, job, flags)
        for result in group_of_jobs.submit(request):
            log.info("%s: %s: %s", ticket.id, result.action, result.text)
            _raise_failure(result)
        return True

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
    ) -> Request:
        """The submission of experiments with the code of this server. ConfigError for a mistake in
        any of them.

        is_plan: takes no snapshot of the code; the request can be previewed but not submitted.
        """
        request = prepare.make(
            group=group,
            experiments=experiments,
            base=self.folder.base.path,
            backend=self.send.backend,
            job=job,
            flags=flags,
            allow_dirty=True,
            take_snapshot=False,
            backend_of=self.backend_of,
        )
        if not is_plan:
            request = replace(request, snapshot=self.snapshot, workdir=self.snapshot.workdir)
        _ = request.trials  # raises ConfigError before a run folder is written
        return request

    def _end(self, row: Row) -> bool:
        """Cancel an attempt; at most every ASK_AGAIN_S seconds."""
        key = f"{row.exp_id}/{row.attempt}"
        if row.read_error is not None and key in self._asked:
            return False  # whether it ends can never be seen
        if row.history and row.history[-1].is_cancelled and key not in self._asked:
            self._asked[key] = time.monotonic()  # another server has asked
        if time.monotonic() - self._asked.get(key, -ASK_AGAIN_S) < ASK_AGAIN_S:
            return False
        self._asked[key] = time.monotonic()
        for result in control.cancel(self.folder.base, [row], self.backend_of):
            log.info("%s: %s", row.exp_id, result.text)
        return True

    def _again(self, row: Row, num_wishes: int) -> bool:
        """Continue a run that was paused or preempted, or whose submission got no answer.

        A run that has to wait is tried again after ASK_AGAIN_S seconds, because a try reads every
        run.
        """
        key = f"{row.exp_id}/{row.attempt} again {num_wishes}"
        if time.monotonic() - self._asked.get(key, -ASK_AGAIN_S) < ASK_AGAIN_S:
            return False
        paused: tuple[JobState, ...] = ("cancelled",)
        limits = Limits(retry=paused) if row.state == "cancelled" else None
        request = control.Again(self.folder.base, self.backend_of, limits)
        (result,) = control.again(request, [row])
        if result.action == "skip" or result.is_bad:
            self._asked[key] = time.monotonic()
            _raise_failure(result)
            return False
        return True


def _raise_failure(result: ActionResult) -> None:
    """Raise the error with which a job was not sent; return when it was, or may be later."""
    if result.action == "failed":
        raise Unreachable(result.text) if result.is_transient else LatheError(result.text)


def _readable(read: Callable[[], T]) -> T | None:
    """What `read` returns; None when it raises."""
    try:
        return read()
    except Exception:  # of any kind: it is told by whoever reads the whole job
        return None


def _files(ticket: Ticket) -> Iterator[tuple[str, str]]:
    yield "training_file", ticket.training_file
    if ticket.validation_file is not None:
        yield "validation_file", ticket.validation_file


def new_metric_events(
    ticket: Ticket, run: RunFolder, before: MetricsPlace
) -> tuple[list[JobEvent], MetricsPlace]:
    """The events of the lines of metrics.jsonl after a place, and the place after them.

    A run that resumes truncates its file: then the events are made from the first line on, and
    those that the index already has stay as they are.
    """
    try:
        with run.metrics.open("rb") as file:
            size, written_at = os.fstat(file.fileno()).st_size, os.fstat(file.fileno()).st_mtime
            is_same = size >= before.end and _digest(file, before.end) == before.mark
            start = before.end if is_same else 0
            if size == start:
                return [], before
            lines, end = metric_lines_from(file, start)
            place = MetricsPlace(end, _digest(file, end))
    except (FileNotFoundError, NotADirectoryError):
        return [], MetricsPlace()
    return list(metric_events(ticket, lines, written_at)), place


def _digest(file: Any, end: int) -> str:
    """A digest of the bytes just before a place in a file."""
    start = max(end - MARK_BYTES, 0)
    file.seek(start)
    return hashlib.sha256(file.read(end - start)).hexdigest()[:16] if end else ""
