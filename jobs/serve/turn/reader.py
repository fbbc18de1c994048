"""The reader copies what the folders of jobs, uploads and runs say into the index.

Every job, upload and run is read by itself: what one of them throws is noted as its trouble, and
the others are read all the same.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from jobs.errors import (
    Unreachable,
    for_client,
    is_of_index,
    is_transient,
    kind_of,
    reason_for_client,
    reason_of,
    without_base,
    without_numbers,
)
from jobs.job_state import ACTIVE
from jobs.record.paths import RunFolder, is_exp_id
from jobs.record.patience import PatientBackends
from jobs.record.row import Row
from jobs.record.status import survey, total_steps
from jobs.record.times import now
from jobs.serve.index import Index, MetricsPlace
from jobs.serve.job_view import (
    CANNOT_RUN,
    FINAL,
    Facts,
    JobEvent,
    job_object,
    metric_events,
    metric_lines_from,
    seconds,
    standing,
    state_events,
    unreadable_job,
)
from jobs.serve.live.runs import mark, update_index
from jobs.serve.tickets import FILE, JOB, Failure, ServiceFolder, Ticket, TicketFolder, is_id
from jobs.serve.turn.troubles import Troubles
from jobs.serve.turn.watched import FolderNames, Watched
from jobs.serve.uploads import unreadable
from trainer.errors import LatheError
from trainer.files.atomic import open_file, refusals
from trainer.metrics.judge_record import refusals_of
from trainer.run_changes import ChangeLog

# before a place in metrics.jsonl; their digest shows whether the file is the same
MARK_BYTES = 4096

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class FolderReader:
    """Reads the folders of one server. confirm_s: how long a trouble must last to fail a job."""

    folder: ServiceFolder
    organization: str
    observed_by: PatientBackends
    confirm_s: float
    # the jobs that had not ended when the last turn began
    open_ids: set[str] = field(default_factory=set[str])
    _looking: threading.Lock = field(default_factory=threading.Lock)
    _exp_ids: dict[str, str] = field(default_factory=dict[str, str])
    # ids of tickets and run folders that the index does not have: they are being made, perhaps
    _new_jobs: set[str] = field(default_factory=set[str])
    _new_runs: set[str] = field(default_factory=set[str])

    @cached_property
    def unreadable(self) -> Troubles:
        """The jobs, uploads and runs whose folder cannot be read now."""
        return Troubles(self.confirm_s)

    @cached_property
    def failing(self) -> Troubles:
        """The jobs, and parts of a turn, that threw an error when they were last done."""
        return Troubles(self.confirm_s)

    @cached_property
    def index(self) -> Index:
        """The index of the folders."""
        with refusals(self.folder.index):
            return Index(self.folder.index)

    @cached_property
    def _jobs(self) -> Watched:
        log = ChangeLog(self.folder.base.path)
        return Watched(FolderNames(self.folder.tickets, lambda name: is_id(name, JOB)), log)

    @cached_property
    def _runs(self) -> Watched:
        base = self.folder.base.path
        return Watched(FolderNames(base, is_exp_id), ChangeLog(base))

    @cached_property
    def _uploads(self) -> Watched:
        return Watched(FolderNames(self.folder.uploads, lambda name: is_id(name, FILE)))

    def read_changes(self) -> dict[str, Facts]:
        """Read everything that may have changed; returns the jobs among it."""
        facts = self.run_part("the jobs", self._take_in_jobs, {})
        self.run_part("the uploads", self._take_in_uploads, None)
        self.read_runs()
        return facts

    def read_runs(self) -> None:
        """Write the runs that may have changed to the index."""
        self.run_part("the runs", self._take_in_runs, None)

    def _take_in_jobs(self) -> dict[str, Facts]:
        """Read the jobs whose files may have changed since they were read. What is kept in memory
        of jobs that have ended, or whose folder is gone, is forgotten.
        """
        waiting = self.index.open_jobs()
        troubled = self._troubled(JOB)
        look = self._jobs.look(waiting | troubled | self._new_jobs, self.index.epoch())
        names, marks = look.names, self.index.job_marks(look.due)
        self._new_jobs = look.due - marks.keys()
        self.open_ids = waiting.intersection(names) | self._new_jobs
        self.failing.keep_if(self._is_of_job, prefix=JOB)
        self.unreadable.keep(names, prefix=JOB)
        if look.is_new:
            with self._looking:
                self._exp_ids = {one: text for one, text in self._exp_ids.items() if one in names}
        due = [
            name
            for name in sorted(look.due)
            if name in self.open_ids or self._marks(name) != marks[name]
        ]
        facts = self.read_jobs(due)
        self._jobs.done(look)
        return facts

    def _is_of_job(self, part: str) -> bool:
        """Whether a part of the turn that threw is still done for a job: what brings it into the
        index is done for every job, all else for those that have not ended.
        """
        name = _name_of(part)
        if part == index_part(name):
            return name in self._jobs.folder.inodes
        return name in self.open_ids

    def _troubled(self, prefix: str) -> set[str]:
        """Ids of the jobs or uploads that could not be read, or not be written to the index."""
        parts = (*self.unreadable.reasons, *self.failing.reasons)
        return {_name_of(part) for part in parts if part.startswith(prefix)}

    def _take_in_uploads(self) -> None:
        """Write new uploads to the index, and remove those that are gone."""
        troubled = self._troubled(FILE)
        look = self._uploads.look(troubled, self.index.epoch())
        if look.is_new:
            self.index.drop_uploads(self.index.upload_ids().difference(look.names))
        self.unreadable.keep(look.names, prefix=FILE)
        self.failing.keep_if(lambda part: _name_of(part) in look.names, prefix=FILE)
        indexed = self.index.upload_ids(look.due)
        for file_id in sorted(look.due):
            if file_id not in indexed or file_id in troubled or self._is_altered(file_id):
                self.run_part(index_part(file_id), partial(self._take_in_upload, file_id), None)
        self._uploads.done(look)

    def _is_altered(self, file_id: str) -> bool:
        """Whether the facts of an upload are no file any more that this server may read."""
        facts_file = self.folder.uploads / file_id / "file.json"
        return not (os.path.isfile(facts_file) and os.access(facts_file, os.R_OK))

    def _take_in_upload(self, file_id: str) -> None:
        folder = self.folder.upload(file_id)
        assert folder is not None, "its name is well-formed"
        try:
            upload = folder.read()
        except Exception as error:  # of any kind: other uploads are read all the same
            self._note_unreadable(file_id, error, folder.path)
            message = reason_for_client(error, folder.path, self.folder.base.path)
            before, since = self.index.upload(file_id), folder.path.lstat().st_mtime
            upload = unreadable(file_id, message, since, before)
        else:
            self.unreadable.end(file_id)
        if upload is not None:
            self.index.write_upload(
                upload.shown(),
                owner=upload.owner,
                created=seconds(upload.created_at),
            )

    def _take_in_runs(self) -> None:
        troubled = {name for name in self.unreadable.reasons if is_exp_id(name)}
        live = self.index.live_runs(ACTIVE)
        look = self._runs.look(live | troubled | self._new_runs, self.index.epoch())
        if look.is_new:
            self.index.drop_runs(self.index.run_ids().difference(look.names))
        self._new_runs = look.due - self.index.run_ids(look.due)
        again = live | troubled | self._new_runs
        reasons = update_index(self.index, self.folder.base, self.observed_by, look.due, again)
        self._runs.done(look)
        for name in troubled - reasons.keys():
            self.unreadable.end(name)
        for name, reason in reasons.items():
            kind = without_numbers(reason)
            self.unreadable.note(name, reason, kind=kind, is_transient=True)

    def _note_unreadable(self, name: str, error: Exception, place: Path) -> bool:
        """Note that a folder cannot be read; returns whether it is so for good."""
        kind, may_pass = kind_of(error), is_transient(error)
        return self.unreadable.note(name, reason_of(error, place), kind=kind, is_transient=may_pass)

    def run_part(self, part: str, work: Callable[[], T], otherwise: T) -> T:
        """The result of a part of the turn. When it throws, its error is logged once, and the
        other parts are done all the same.
        """
        try:
            result = work()
        except Exception as error:
            if part not in self.failing:
                log.exception("%s", part)
            self.failing.note(part, str(error), kind=kind_of(error), is_transient=True)
            return otherwise
        self.failing.end(part)
        return result

    def facts(self, job_id: str, row: Row | None) -> Facts | None:
        """What the files of a job say; None when there is no ticket. OSError, LatheError."""
        folder = self.folder.ticket(job_id)
        ticket = folder.read() if folder is not None else None
        if folder is None or ticket is None:
            return None
        failure, checked = folder.read_failure(), folder.read_checked()
        run = self._run(ticket).path
        refusals = tuple(_readable(lambda: refusals_of(run)) or ())
        return Facts(ticket, checked, folder.wishes(), row, failure, refusals)

    def rows(self, exp_ids: Collection[str]) -> dict[str, Row]:
        """The states of these experiments; those that were never submitted are missing. Reasons are
        as clients may read them, but for that of a folder that cannot be read (`read_jobs`).
        """
        rows = survey(self.folder.base, only=exp_ids, backend_of=self.observed_by)
        return {
            row.exp_id: row if row.read_error else replace(row, reason=self._for_client(row.reason))
            for row in rows
        }

    def _for_client(self, text: str | None) -> str | None:
        """What clients are told of a text: with paths below the savedir_base, and no other ones."""
        return None if text is None else for_client(text, self.folder.base.path)

    def read_jobs(self, job_ids: Collection[str]) -> dict[str, Facts]:
        """Read jobs again and write them to the index."""
        by_id: dict[str, Facts] = {}
        with self._looking:  # older facts must not replace newer ones in the index
            marks = {name: self._marks(name) for name in job_ids}
            exp_ids = {name: self._exp_id(name) for name in job_ids}
            rows = self.rows([name for name in exp_ids.values() if name is not None])
            for name, exp_id in exp_ids.items():
                read = partial(self._read_job, name, rows.get(exp_id or ""), marks[name])
                facts = self.run_part(index_part(name), read, None)
                if facts is not None:
                    by_id[name] = facts
        return by_id

    def is_behind(self, job_id: str) -> bool:
        """Whether the index may hold older facts of a job than its files, because these could not
        be read, or the index not be written, when it was last looked at.
        """
        return job_id in self.unreadable or index_part(job_id) in self.failing

    def _read_job(self, job_id: str, row: Row | None, marks: str) -> Facts | None:
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
            if is_of_index(error):  # its folder is none the worse
                raise
            return self._index_unreadable(job_id, row, marks, error)
        self.unreadable.end(job_id)
        return facts

    def _index_unreadable(
        self, job_id: str, row: Row | None, marks: str, error: Exception
    ) -> Facts | None:
        """Write to the index that a job has failed because it cannot be read, with all of it that
        can be. It stays as it was while that may pass, and when it had ended before.
        """
        folder = TicketFolder(self.folder.tickets / job_id)
        reason = reason_for_client(error, folder.path, self.folder.base.path)
        is_of_run = row is not None and row.read_error is not None
        name = row.exp_id if row is not None and is_of_run else job_id
        is_lasting = self._note_unreadable(name, error, folder.path)
        failure, before = _readable(folder.read_failure), self.index.job(job_id)
        if failure is None and is_lasting:
            failure = Failure(at=_failed_at(before) or now(), message=reason)
        ticket = _readable(folder.read)
        # an unreadable folder is no end of a job
        had_ended = before is not None and before["status"] in FINAL and not _failed_at(before)
        state = row.state if row is not None and row.read_error is None else "unknown"
        if state == "unknown" and before is not None:
            state = before["lathe"]["state"]
        if had_ended and state not in (*ACTIVE, "paused"):
            return None  # a cancelled job that is alive is still to be ended
        if before is not None and failure is None:
            return None
        if ticket is not None:
            wishes = _readable(folder.wishes) or []
            facts = Facts(ticket, _readable(folder.read_checked), wishes, row, failure)
            if not had_ended:
                self._write(facts, marks, is_readable=False)
            return facts if failure is not None else None
        if failure is not None and not had_ended:
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
        ticket, organization = facts.ticket, self.organization
        place = self.index.metrics_place(ticket.id)
        metrics: list[JobEvent] = []
        if is_readable:
            metrics, place = new_metric_events(ticket, self._run(ticket), place)
        events = [*state_events(facts, organization), *metrics]
        is_alive = facts.row is not None and facts.row.state in (*ACTIVE, "paused")
        self.index.write_job(
            self.job_body(facts),
            created=seconds(ticket.created_at),
            model=ticket.tuned_model(organization),
            # a cancelled job may still be running, or its run still be called paused
            is_open=is_alive or standing(facts).status not in FINAL or not is_readable,
            is_deleted=facts.is_deleted,
            facts=marks,
            place=place,
            events=sorted(events, key=lambda event: event.at),
        )

    def job_body(self, facts: Facts) -> dict[str, Any]:
        """The job in the format of the OpenAI API, with paths relative to the savedir_base."""
        body, base = job_object(facts, self.organization), self.folder.base.path
        if body["error"] is not None:
            body["error"]["message"] = without_base(body["error"]["message"], base)
        body["lathe"]["reason"] = self._for_client(body["lathe"]["reason"])
        return body

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


def index_part(name: str) -> str:
    """The part of a turn that brings a job or an upload into the index."""
    return f"{name}: the index"


def _name_of(part: str) -> str:
    """The job, or the upload, that a part of a turn is of."""
    return part.partition(":")[0]


def failure_part(job_id: str) -> str:
    """The part of a turn that writes down why a job cannot go on."""
    return f"{job_id}: its failed.json"


def _failed_at(before: Mapping[str, Any] | None) -> str | None:
    """When a job failed because it could not be read, so that it stays one event where failed.json
    cannot be written; None for any other job. before: as the index has it.
    """
    error = None if before is None else before["error"]
    if before is None or error is None or error["code"] != CANNOT_RUN:
        return None
    at = datetime.fromtimestamp(before["finished_at"], timezone.utc)
    return at.isoformat(timespec="milliseconds")


def _readable(read: Callable[[], T]) -> T | None:
    """What `read` returns; None when it raises."""
    try:
        return read()
    except Exception:  # of any kind: it is told by whoever reads the whole job
        return None


def new_metric_events(
    ticket: Ticket, run: RunFolder, before: MetricsPlace
) -> tuple[list[JobEvent], MetricsPlace]:
    """The events of the lines of metrics.jsonl after a place, and the place after them.

    A run that resumes truncates its file: then the events are made from the first line on, and
    those that the index already has stay as they are.
    """
    try:
        with open_file(run.metrics) as file:
            size, written_at = os.fstat(file.fileno()).st_size, os.fstat(file.fileno()).st_mtime
            is_same = size >= before.end and _digest(file, before.end) == before.mark
            start = before.end if is_same else 0
            if size == start:
                return [], before
            lines, end = metric_lines_from(file, start)
            place = MetricsPlace(end, _digest(file, end))
    except (FileNotFoundError, NotADirectoryError):
        return [], MetricsPlace()
    # After the lines: a training that has just begun says its steps before it writes a line.
    return list(metric_events(ticket, lines, written_at, total_steps(run))), place


def _digest(file: Any, end: int) -> str:
    """A digest of the bytes just before a place in a file."""
    start = max(end - MARK_BYTES, 0)
    file.seek(start)
    return hashlib.sha256(file.read(end - start)).hexdigest()[:16] if end else ""
