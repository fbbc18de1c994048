"""Tickets and uploads: the requests and files of clients, as files beside the run folders.

<savedir_base>/_service/
    tickets/<job id>/       one folder for each fine-tuning job
        ticket.json         the request, with the experiment made of it; written once
        checked.json        the result of checking its files completely; written once
        failed.json         why it cannot go on, when its files or folders say what nobody
                            understands; written once
        data/               the rows in the format of the task: train.jsonl, valid.jsonl
        wish-<k>.json       the k-th wish: pause, resume, cancel, delete
    uploads/<file id>/      content, file.json; made by one rename
    uploads/.<file id>.tmp/ an upload in progress; the server that receives it locks `content`
    batches/<batch id>/     requests that are answered in the background, see batches/folder.py
    webhooks/               what is told to webhooks, see webhooks/outbox.py
    cache/                  tokenizers and encoded rows of the trainings
    locks/<token's name>    empty; locked while the quota of a token is checked and used
    steps/                  sessions of the Tinker dialect, see steps/sessions.py
    index-<host>.sqlite     a copy of the facts, for fast lists; may be deleted at any time

A ticket's id comes from its Idempotency-Key, so the same key means the same ticket: the server that
writes ticket.json first creates the job. Its further course is in the record of its run folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from jobs.record.paths import BaseFolder, is_there
from jobs.record.times import now
from trainer.config.block import Strict
from trainer.data.formats.json_text import preview
from trainer.errors import LatheError, StorageError
from trainer.files.atomic import create_json, open_file, refusals, sync, write_json
from trainer.run_changes import note_change

WishKind = Literal["pause", "resume", "cancel", "delete"]
JOB, FILE = "ftjob-", "file-"
ID_DIGITS = 24
YOUNG_S = 60.0
MOST_BYTES = 4 << 20  # of a ticket or a wish: they are read at every look at an open job


def _time(text: str) -> str:
    datetime.fromisoformat(text).timestamp()  # ValueError for what is no time
    return text


Time = Annotated[str, AfterValidator(_time)]  # ISO 8601


class Ticket(Strict):
    """The request for a job, with all defaults filled in. Never changed."""

    id: str
    created_at: Time
    owner: str  # the name of the token that sent the request
    model: str  # the offer
    begins_with: str | None = None  # the tuned model that was named instead of the offer
    exp_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    experiment: dict[str, Any]
    request_digest: str  # sha256 of the request, to tell a repeat from another one
    kind: str  # of the rows
    num_rows: int
    seed: int
    epochs: int
    steps: int | None = None  # that the epochs are; None: a ticket of before
    batch: int
    lr_factor: float
    method: Literal["supervised", "dpo"] = "supervised"
    beta: float | None = None  # of dpo
    training_file: str
    validation_file: str | None = None
    suffix: str | None = None
    metadata: dict[str, str] | None = None
    is_method_given: bool = False
    driven_by: str | None = None  # the training run of the Tinker dialect, which sends its rows

    @property
    def digits(self) -> str:
        """The id without its prefix; part of the ids of events, checkpoints and files."""
        return self.id.removeprefix(JOB)

    def tuned_model(self, organization: str) -> str:
        """The name of the model that the job trains."""
        return f"ft:{self.model}:{organization}:{self.suffix or ''}:{self.digits[:12]}"


class Checked(Strict):
    """The result of checking the files of a job: the first mistakes in them, if there are any."""

    at: Time
    param: str | None = None  # training_file, validation_file
    message: str | None = None


class Failure(Strict):
    """Why a job cannot go on: what its files or folders threw, which does not pass by itself."""

    at: Time
    message: str


class Wish(Strict):
    """A request about a job that exists: to pause, resume, cancel or delete it."""

    at: Time
    wish: WishKind
    by: str


class Upload(Strict):
    """The facts of a file that a client uploaded."""

    id: str
    created_at: Time
    owner: str
    filename: str  # as the client called it: never part of a path
    purpose: str
    bytes: int
    sha256: str
    num_rows: int
    kind: str | None
    num_mistakes: int
    mistakes: list[str]
    # place -> how many rows have it, see RowReport; None: an earlier version did not count them
    places: dict[str, int] | None = None

    def shown(self) -> dict[str, Any]:
        """The facts that the index has: all but the places, which would slow down its lists."""
        return self.model_dump(mode="json", exclude={"places"})


@dataclass(frozen=True)
class TicketFolder:
    """The files of one ticket."""

    path: Path

    @property
    def file(self) -> Path:
        return self.path / "ticket.json"

    @property
    def check_file(self) -> Path:
        return self.path / "checked.json"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def failure_file(self) -> Path:
        return self.path / "failed.json"

    def read(self) -> Ticket | None:
        """The ticket; None when there is none. OSError, or LatheError when it is no ticket of this
        folder, or of another version.
        """
        ticket = read_model(self.file, Ticket)
        if ticket is not None and ticket.id != self.path.name:
            raise LatheError(f"{self.file}: it is the ticket of {ticket.id!r}. Remove the folder.")
        return ticket

    def read_checked(self) -> Checked | None:
        """The result of the check; None before the check. OSError, LatheError."""
        return read_model(self.check_file, Checked)

    def read_failure(self) -> Failure | None:
        """Why the job cannot go on; None when it can. OSError, LatheError."""
        return read_model(self.failure_file, Failure)

    def wishes(self) -> list[Wish]:
        """All wishes, in order. OSError, LatheError."""
        wishes: list[Wish] = []
        while (wish := read_model(self._wish(len(wishes) + 1), Wish)) is not None:
            wishes.append(wish)
        return wishes

    def add_wish(self, wish: WishKind, by: str) -> None:
        """Write a wish durably. StorageError."""
        values = {"at": now(), "wish": wish, "by": by}
        number = 1
        while is_there(self._wish(number)):
            number += 1
        while not create_json(self._wish(number), values):
            number += 1  # another server has just written this number
        note_change(self.path.parents[2], self.path.name)  # <base>/_service/tickets/<job id>

    def _wish(self, number: int) -> Path:
        return self.path / f"wish-{number}.json"


@dataclass(frozen=True)
class UploadFolder:
    """The files of one upload."""

    path: Path

    @property
    def content(self) -> Path:
        return self.path / "content"

    def read(self) -> Upload | None:
        """The facts of the upload; None when there is none. OSError, LatheError."""
        return read_model(self.path / "file.json", Upload)


@dataclass(frozen=True)
class ServiceFolder:
    """All files of the service below a savedir_base."""

    base: BaseFolder

    @property
    def path(self) -> Path:
        return self.base.path / "_service"

    @property
    def tickets(self) -> Path:
        return self.path / "tickets"

    @property
    def uploads(self) -> Path:
        return self.path / "uploads"

    @property
    def batches(self) -> Path:
        return self.path / "batches"

    @property
    def webhooks(self) -> Path:
        return self.path / "webhooks"

    @property
    def steps(self) -> Path:
        return self.path / "steps"

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    @property
    def locks(self) -> Path:
        return self.path / "locks"

    @property
    def index(self) -> Path:
        """One index for each host, because SQLite's write-ahead log needs shared memory."""
        return self.path / f"index-{socket.gethostname()}.sqlite"

    def make(self) -> None:
        """Make the folders, and remove uploads and batches that were cut off. StorageError."""
        with refusals(self.path):
            parts = (
                self.tickets,
                self.uploads,
                self.batches,
                self.webhooks,
                self.cache,
                self.steps,
            )
            for folder in parts:
                folder.mkdir(parents=True, exist_ok=True)
        _remove_torn(self.uploads, "content")
        _remove_torn(self.batches, "lock")

    def ticket(self, job_id: str) -> TicketFolder | None:
        """The folder of a job's ticket; None for a malformed id."""
        return TicketFolder(self.tickets / job_id) if is_id(job_id, JOB) else None

    def upload(self, file_id: str) -> UploadFolder | None:
        """The folder of an upload; None for a malformed id."""
        return UploadFolder(self.uploads / file_id) if is_id(file_id, FILE) else None

    def ticket_ids(self) -> list[str]:
        """Ids of all tickets, including folders whose ticket is still being written."""
        return _names(self.tickets, JOB)

    def upload_ids(self) -> list[str]:
        """Ids of all complete uploads."""
        return _names(self.uploads, FILE)

    def create(self, ticket: Ticket) -> bool:
        """Write a new ticket durably; False when this id exists already. StorageError."""
        folder = TicketFolder(self.tickets / ticket.id)
        with refusals(folder.path):
            folder.path.mkdir(exist_ok=True)
        is_new = create_json(folder.file, ticket.model_dump(mode="json"))
        with refusals(folder.path):
            sync(self.tickets)
        return is_new

    @contextmanager
    def receiving(self) -> Generator[ReceivedUpload]:
        """A folder for an upload in progress. Removed at the end, unless `keep` was called."""
        file_id = new_id(FILE)
        folder = self.uploads / f".{file_id}.tmp"
        with refusals(folder):
            folder.mkdir()
        try:
            with refusals(folder), (folder / "content").open("xb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield ReceivedUpload(file_id, folder, self.uploads / file_id)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class ReceivedUpload:
    """An upload that is being received."""

    id: str
    folder: Path
    target: Path

    @property
    def content(self) -> Path:
        return self.folder / "content"

    def keep(self, upload: Upload) -> None:
        """Make it a file of the service, by one rename. StorageError."""
        with refusals(self.target):
            sync(self.content)
            write_json(self.folder / "file.json", upload.model_dump(mode="json"))
            os.rename(self.folder, self.target)
            sync(self.target.parent)


def _remove_torn(folder: Path, locked: str) -> None:
    """Remove what a server that died was writing: nobody holds the lock of its file `locked`."""
    for path in folder.glob(".*.tmp"):
        with suppress(OSError, StorageError):
            if time.time() - path.stat().st_mtime < YOUNG_S:
                continue  # another server may be about to lock it
            with alone(path / locked) as is_ours:
                if is_ours:
                    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def alone(path: Path) -> Generator[bool]:
    """Whether no other process, and no other part of this one, holds the lock of a file; then none
    does inside. StorageError where it cannot be locked.
    """
    with refusals(path):
        file = path.open("ab")
    with file:
        is_free = True
        with refusals(path):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_free = False
        yield is_free


R = TypeVar("R", bound=Strict)


def read_model(path: Path, kind: type[R]) -> R | None:
    """What one of our files holds, which was written at once; None when there is none. OSError, or
    LatheError when it holds something else.
    """
    try:
        with open_file(path) as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    try:
        if len(content) <= MOST_BYTES:
            return kind.model_validate(json.loads(content))
        problem = f"more than {MOST_BYTES >> 20} MiB"
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        problem = f"{place}: got {preview(first['input'])}. {first['msg']}"
    except (ValueError, RecursionError):
        problem = "no JSON, or one that is nested too deeply"
    name = kind.__name__.lower()
    raise LatheError(f"{path}: {problem}; want a {name} as this version writes it. Mend the file.")


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return prefix + secrets.token_hex(ID_DIGITS // 2)


def id_of_key(owner: str, key: str, prefix: str = JOB) -> str:
    """The id of what a request with an Idempotency-Key of a token makes: always the same."""
    digest = hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()
    return prefix + digest[:ID_DIGITS]


def is_id(text: str, prefix: str) -> bool:
    """Whether a text is a well-formed id, which is safe as the name of a folder."""
    digits = text.removeprefix(prefix)
    is_hex = all(letter in "0123456789abcdef" for letter in digits)
    return text.startswith(prefix) and len(digits) == ID_DIGITS and is_hex


def _names(folder: Path, prefix: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if is_id(entry.name, prefix)]
    except FileNotFoundError:
        return []
