"""Batches as files, so that a server that was killed, or another one, goes on with them.

<savedir_base>/_service/batches/<batch id>/
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

import fcntl
import json
import os
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from jobs.record.paths import is_there
from jobs.record.times import now
from jobs.serve.tickets import ServiceFolder, Time, is_id, read_model
from trainer.config.block import Strict
from trainer.errors import LatheError
from trainer.files.atomic import create_json, refusals, sync, write_json

BATCH = "batch_"
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
EndStatus = Literal["completed", "failed", "expired", "cancelled"]


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
    """How a batch ended. The files: None where no line would be in one."""

    at: Time
    status: EndStatus
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
        """The request; None when there is none. OSError, LatheError."""
        return read_model(self.path / "batch.json", Batch)

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

    @contextmanager
    def alone(self) -> Generator[bool]:
        """Whether no other server works on it; then none does inside. StorageError."""
        with refusals(self.path):
            file = (self.path / "lock").open("ab")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True


@dataclass
class BatchFolders:
    """All batches of a service. What has ended is read once."""

    service: ServiceFolder
    _ended: dict[str, tuple[Batch, BatchCheck | None, BatchEnd]] = field(
        default_factory=dict[str, tuple[Batch, "BatchCheck | None", BatchEnd]]
    )

    def folder(self, batch_id: str) -> BatchFolder | None:
        """The folder of a batch; None for a malformed id."""
        return BatchFolder(self.service.batches / batch_id) if is_id(batch_id, BATCH) else None

    def create(self, batch: Batch, content: Path) -> None:
        """Write a new batch durably. content: of its file. StorageError."""
        folder = BatchFolder(self.service.batches / batch.id)
        with refusals(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.input.unlink(missing_ok=True)  # of a server that was killed here
            try:
                os.link(content, folder.input)
            except OSError:  # a file system without hard links
                shutil.copyfile(content, folder.input)
        create_json(folder.path / "batch.json", batch.model_dump(mode="json"))
        with refusals(folder.path):
            sync(self.service.batches)

    def ids(self) -> list[str]:
        """Ids of all batches, those that are just being written among them."""
        try:
            names = os.listdir(self.service.batches)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if is_id(name, BATCH))

    def open(self) -> Iterator[tuple[Batch, BatchFolder]]:
        """The batches that have not ended. One that cannot be read is left out."""
        for name in self.ids():
            folder = BatchFolder(self.service.batches / name)
            try:
                batch = None if name in self._ended or folder.has_ended() else folder.read()
            except (OSError, LatheError):
                continue  # its routes tell why
            if batch is not None:
                yield batch, folder

    def ended(self) -> Iterator[tuple[Batch, BatchEnd]]:
        """The batches that have ended, and how."""
        for name in self.ids():
            state = self.state(name)
            if state is not None and state.end is not None:
                yield state.batch, state.end

    def state(self, batch_id: str) -> BatchState | None:
        """Everything about a batch; None for an unknown id, or one that cannot be read."""
        known = self._ended.get(batch_id)
        if known is not None:
            batch, check, end = known
            return BatchState(batch, check, end=end)
        folder = self.folder(batch_id)
        try:
            batch = None if folder is None else folder.read()
            if folder is None or batch is None:
                return None
            check, end = folder.read_check(), folder.read_end()
            if end is not None:
                self._ended[batch_id] = batch, check, end
            return BatchState(batch, check, folder.read_cancel(), folder.read_counts(), end)
        except (OSError, LatheError):
            return None


@dataclass(frozen=True)
class BatchState:
    """What the files of a batch say."""

    batch: Batch
    check: BatchCheck | None
    wish: BatchWish | None = None
    counts: BatchCounts = BatchCounts()  # noqa: RUF009 (frozen)
    end: BatchEnd | None = None


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
