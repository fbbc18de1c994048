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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jobs.backends import BackendCache
from jobs.code.snapshot import Snapshot, take
from jobs.config import JobConfig
from jobs.job_state import ACTIVE, JobState
from jobs.record.paths import RunFolder
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
)
from jobs.serve.live.runs import mark, update_index
from jobs.serve.offers import ServiceConfig, num_held_out
from jobs.serve.tickets import Checked, ServiceFolder, Ticket, TicketFolder
from jobs.submit import control, prepare
from jobs.submit import group as group_of_jobs
from jobs.submit.policy import Limits
from jobs.submit.request import Request
from trainer.config.block import validate
from trainer.errors import LatheError
from trainer.files.atomic import create_json, refusals

GROUP = "service"  # of every job that the service sends
ASK_AGAIN_S = 10.0  # between two requests for the end of the same attempt
MARK_BYTES = (
    4096  # before a place in metrics.jsonl; their digest shows whether the file is the same
)

log = logging.getLogger(__name__)


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
        marks, waiting = self.index.job_marks(), self.index.open_jobs()
        changed = [
            name
            for name in self.folder.ticket_ids()
            if name not in marks or name in waiting or self._marks(name) != marks[name]
        ]
        facts = self._look(changed)
        on_disk, indexed = set(self.folder.upload_ids()), self.index.upload_ids()
        self.index.drop_uploads(indexed - on_disk)
        for file_id in on_disk - indexed:
            folder = self.folder.upload(file_id)
            upload = folder.read() if folder is not None else None
            if upload is not None:
                self.index.write_upload(
                    upload.model_dump(mode="json"),
                    owner=upload.owner,
                    created=seconds(upload.created_at),
                )
        update_index(self.index, self.folder.base, self.observed_by)
        return facts

    def _act(self, facts: Mapping[str, Facts]) -> None:
        """Advance jobs, and read again those for which something was done."""
        self._look([name for name in facts if self._advance(facts[name])])

    def look(self, job_id: str) -> dict[str, Any] | None:
        """A job as its files are now, also written to the index; None for an unknown id."""
        self._look([job_id])
        return self.index.job(job_id)

    # Reading

    def facts(self, job_id: str, row: Row | None) -> Facts | None:
        """What the files of a job say; None when there is no ticket."""
        folder = self.folder.ticket(job_id)
        ticket = folder.read() if folder is not None else None
        if folder is None or ticket is None:
            return None
        return Facts(ticket, folder.read_checked(), folder.wishes(), row)

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
                facts = self.facts(name, rows.get(exp_id or ""))
                if facts is None:
                    continue
                by_id[name] = facts
                ticket, organization = facts.ticket, self.config.organization
                before = self.index.metrics_place(ticket.id)
                metrics, place = new_metric_events(ticket, self._run(ticket), before)
                events = [*state_events(facts, organization), *metrics]
                is_alive = facts.row is not None and facts.row.state in ACTIVE
                self.index.write_job(
                    job_object(facts, organization),
                    created=seconds(ticket.created_at),
                    model=ticket.tuned_model(organization),
                    # a cancelled job may still be running
                    is_open=is_alive or standing(facts).status not in FINAL,
                    is_deleted=facts.is_deleted,
                    facts=marks[name],
                    place=place,
                    events=sorted(events, key=lambda event: event.at),
                )
        return by_id

    def _exp_id(self, job_id: str) -> str | None:
        """The experiment of a ticket, which never changes; None while there is no ticket."""
        if job_id not in self._exp_ids:
            folder = self.folder.ticket(job_id)
            ticket = folder.read() if folder is not None else None
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
        """Take the next step of a job, if there is one; returns whether anything was done."""
        folder = self.folder.ticket(facts.ticket.id)
        assert folder is not None, "a ticket has a folder"
        row = facts.row
        try:
            is_unwanted = facts.last_wish("cancel") is not None or is_paused(facts)
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
        # a full disk, a scheduler: the next turn tries again
        except (LatheError, OSError) as error:
            log.warning("%s: %s", facts.ticket.id, error)
            return False

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
        count = num_held_out(self.config.models[ticket.model], ticket.num_rows)
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
        values = dict(self.config.models[ticket.model].job)
        if self.send.python_binary:
            values["python_binary"] = self.send.python_binary
        job = validate(JobConfig, values, source=f"job of model {ticket.model!r}")
        flags = {"data_path": str(folder.data), "cache_dir": str(self.folder.cache)}
        request = self.request([ticket.experiment], GROUP, job, flags)
        for result in group_of_jobs.submit(request):
            log.info("%s: %s: %s", ticket.id, result.action, result.text)
        return True

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
        if row.history[-1].is_cancelled and key not in self._asked:
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
            return False
        return True


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
