"""Batches as files, so that a server that was killed, or another one, goes on with them.

<savedir_base>/_service/batches/<batch id>/     made by one rename
    batch.json          the request; written once
    input.jsonl         the uploaded lines, which stay if the upload is deleted
    checked.json        the result of checking all lines; written once
    output.jsonl        one line for each request that was answered, in the order of the answers
    errors.jsonl        one line for each request that was refused
    progress.json       how many there are of both, now and then
    cancel.json         somebody asked for its end; written once
    end.json            how it ended, and the files that hold its lines; written once
    lock                held by the server that works on it

A line stands in output.jsonl or in errors.jsonl once: whoever goes on leaves out what stands there.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Literal

from jobs.errors import is_transient, kind_of, reason_for_client, reason_of
from jobs.record.paths import is_there
from jobs.record.times import now
from jobs.serve.tickets import ServiceFolder, Time, alone, is_id, read_model
from jobs.serve.turn.troubles import Troubles
from jobs.serve.turn.watched import FolderNames
from trainer.config.block import Strict
from trainer.errors import LatheError, StorageError
from trainer.files.atomic import create_json, refusals, sync, write_json

BATCH = "batch_"
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
EndStatus = Literal["completed", "failed", "expired", "cancelled"]
_NOT_EMPTY = (errno.EEXIST, errno.ENOTEMPTY)  # a folder in the way of a rename


class Batch(Strict):
    """The request for a batch. Never changed."""

    id: str
    created_at: Time
    expires_at: Time
    owner: str  # the name of the token that sent the request
    role: Literal["run", "admin"]
    endpoint: Endpoint
    completion_window: Literal["24h"]
    input_file_id: str
    metadata: dict[str, str] | None = None

    @property
    def digits(self) -> str:
        """The id without its prefix; part of the ids of its files."""
        return self.id.removeprefix(BATCH)

    @property
    def has_expired(self) -> bool:
        """Whether its time is over."""
        return datetime.now(timezone.utc) >= datetime.fromisoformat(self.expires_at)


class BatchMistake(Strict):
    """Why a batch cannot be answered. line: of its file, counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchCheck(Strict):
    """The result of checking the lines of a batch: how many there are, the first mistakes."""

    at: Time
    total: int
    model: str | None = None
    mistakes: list[BatchMistake]


class BatchCounts(Strict):
    """How many requests were answered, and how many refused."""

    completed: int = 0
    failed: int = 0


class BatchWish(Strict):
    """A request to cancel a batch."""

    at: Time
    by: str


class BatchEnd(BatchCounts):
    """How a batch ended. The files: None where no line would be in one. reason: why it could not go
    on; None when it could.
    """

    at: Time
    status: EndStatus
    reason: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None


@dataclass(frozen=True)
class BatchFolder:
    """The files of one batch."""

    path: Path

    @property
    def input(self) -> Path:
        return self.path / "input.jsonl"

    @property
    def output(self) -> Path:
        return self.path / "output.jsonl"

    @property
    def errors(self) -> Path:
        return self.path / "errors.jsonl"

    def read(self) -> Batch | None:
        """The request; None when there is none. OSError, or LatheError when it is that of another
        folder, or of another version.
        """
        batch = read_model(self.path / "batch.json", Batch)
        if batch is not None and batch.id != self.path.name:
            raise LatheError(f"{self.path}: it is the batch {batch.id!r}. Remove the folder.")
        return batch

    def read_check(self) -> BatchCheck | None:
        """The result of the check; None before it. OSError, LatheError."""
        return read_model(self.path / "checked.json", BatchCheck)

    def read_cancel(self) -> BatchWish | None:
        """The request to cancel it; None without one. OSError, LatheError."""
        return read_model(self.path / "cancel.json", BatchWish)

    def read_counts(self) -> BatchCounts:
        """How many lines there were a moment ago. OSError, LatheError."""
        return read_model(self.path / "progress.json", BatchCounts) or BatchCounts()

    def read_end(self) -> BatchEnd | None:
        """How it ended; None before. OSError, LatheError."""
        return read_model(self.path / "end.json", BatchEnd)

    def is_cancelled(self) -> bool:
        """Whether somebody asked for its end."""
        return is_there(self.path / "cancel.json")

    def has_ended(self) -> bool:
        """Whether nothing is to be done any more."""
        return is_there(self.path / "end.json")

    def cancel(self, by: str) -> None:
        """Write the request to cancel it durably. StorageError."""
        create_json(self.path / "cancel.json", {"at": now(), "by": by})

    def write_check(self, check: BatchCheck) -> None:
        """Write the result of the check durably. StorageError."""
        create_json(self.path / "checked.json", check.model_dump(mode="json"))

    def write_counts(self, counts: BatchCounts) -> None:
        """Write how many lines there are. StorageError."""
        write_json(self.path / "progress.json", counts.model_dump(mode="json"))

    def write_end(self, end: BatchEnd) -> None:
        """Write how it ended durably, and remove what nobody needs then. StorageError."""
        create_json(self.path / "end.json", end.model_dump(mode="json"))
        with refusals(self.path):
            for path in (self.input, self.output, self.errors):
                path.unlink(missing_ok=True)

    def alone(self) -> AbstractContextManager[bool]:
        """Whether no other server works on it; then none does inside. StorageError."""
        return alone(self.path / "lock")


@dataclass
class BatchFolders:
    """All batches of a service. What has ended is read once. unreadable: those that cannot be."""

    service: ServiceFolder
    unreadable: Troubles = field(default_factory=lambda: Troubles(0.0))
    _ended: dict[str, BatchState] = field(default_factory=dict[str, "BatchState"])
    _guard: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def _names(self) -> FolderNames:
        return FolderNames(self.service.batches, lambda name: is_id(name, BATCH))

    def folder(self, batch_id: str) -> BatchFolder | None:
        """The folder of a batch; None for a malformed id."""
        return BatchFolder(self.service.batches / batch_id) if is_id(batch_id, BATCH) else None

    def create(self, batch: Batch, content: Path) -> bool:
        """Write a new batch durably and at once; False when its id is there already. content: of
        its file. StorageError.
        """
        target = self.service.batches / batch.id
        new = BatchFolder(target.with_name(f".{batch.id}.{secrets.token_hex(4)}.tmp"))
        try:
            with refusals(target):
                new.path.mkdir(parents=True)
            with new.alone(), refusals(target):
                _link_or_copy(content, new.input)
                write_json(new.path / "batch.json", batch.model_dump(mode="json"))
                os.rename(new.path, target)
                sync(self.service.batches)
        except StorageError as error:
            is_there_already = getattr(error.__cause__, "errno", None) in _NOT_EMPTY
            if is_there_already and is_there(target / "batch.json"):
                return False
            raise
        finally:
            shutil.rmtree(new.path, ignore_errors=True)
        return True

    def ids(self) -> list[str]:
        """Ids of all batches. OSError."""
        with self._guard:
            self._names.read()
            return sorted(self._names.inodes)

    def open(self) -> Iterator[tuple[Batch, BatchFolder]]:
        """The batches that have not ended, of those whose request can be read. OSError."""
        with self._guard:
            self._names.read()
            names = self._names.inodes
        self.unreadable.keep(names, prefix=BATCH)
        for name in sorted(names.keys() - self._ended.keys()):
            folder, state = BatchFolder(self.service.batches / name), self.state(name)
            # nobody owns one whose request cannot be read
            if state is not None and state.batch.owner and not folder.has_ended():
                yield state.batch, folder

    def ended(self) -> Iterator[tuple[Batch, BatchEnd]]:
        """The batches that have ended, and how. OSError."""
        for name in self.ids():
            state = self.state(name)
            if state is not None and state.end is not None:
                yield state.batch, state.end

    def state(self, batch_id: str) -> BatchState | None:
        """Everything about a batch; None for an unknown id. What cannot be read is noted, and is
        the trouble of this batch.
        """
        if batch_id in self._ended:
            return self._ended[batch_id]
        folder, batch = self.folder(batch_id), None
        if folder is None:
            return None
        try:
            batch = folder.read()
            if batch is None:
                return None
            check, end, wish = folder.read_check(), folder.read_end(), folder.read_cancel()
            counts = folder.read_counts() if end is None else end
            state = BatchState(batch, check, wish, counts, end)
        except (OSError, LatheError) as error:
            kind, may_pass = kind_of(error), is_transient(error)
            reason = reason_of(error, folder.path)
            self.unreadable.note(batch_id, reason, kind=kind, is_transient=may_pass)
            reason = reason_for_client(error, folder.path, self.service.base.path)
            is_final = not may_pass and (batch is None or folder.has_ended())
            trouble = BatchTrouble(reason, is_final)
            return BatchState(batch or _unknown(folder.path), None, trouble=trouble)
        self.unreadable.end(batch_id)
        if end is not None:
            self._ended[batch_id] = state
        return state


def _link_or_copy(source: Path, target: Path) -> None:
    """Make a file of the same content. OSError."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _unknown(path: Path) -> Batch:
    """What is shown of a batch whose request cannot be read. Nobody owns it."""
    try:
        made_s = path.lstat().st_mtime
    except OSError:  # its folder has just been removed
        made_s = 0.0
    created = datetime.fromtimestamp(made_s, timezone.utc).isoformat(timespec="milliseconds")
    return Batch(
        id=path.name,
        created_at=created,
        expires_at=created,
        owner="",
        role="run",
        endpoint="/v1/chat/completions",
        completion_window="24h",
        input_file_id="unknown",
    )


@dataclass(frozen=True)
class BatchTrouble:
    """Why the files of a batch cannot be read. is_final: it does not pass by itself, and no server
    will end the batch because of it.
    """

    reason: str
    is_final: bool


@dataclass(frozen=True)
class BatchState:
    """What the files of a batch say."""

    batch: Batch
    check: BatchCheck | None
    wish: BatchWish | None = None
    counts: BatchCounts = BatchCounts()  # noqa: RUF009 (frozen)
    end: BatchEnd | None = None
    trouble: BatchTrouble | None = None


def ids_of_lines(path: Path) -> list[str]:
    """The custom_id of each line of output.jsonl or errors.jsonl; [] where there is none. The last
    line is cut off if a killed server wrote a part of it. StorageError.
    """
    if not path.is_file():
        return []
    ids: list[str] = []
    with refusals(path), path.open("r+b") as file:
        end = 0
        for line in file:
            try:
                ids.append(json.loads(line)["custom_id"])
            except (ValueError, KeyError, TypeError):  # torn by a power cut
                break
            if not line.endswith(b"\n"):
                ids.pop()
                break
            end += len(line)
        file.truncate(end)
    return ids
