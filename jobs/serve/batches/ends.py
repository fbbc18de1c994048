"""The end of a batch: its answers and its errors become files of the service."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.record.times import now
from jobs.serve.batches.folder import Batch, BatchEnd, EndStatus
from jobs.serve.batches.lines import requests_of
from jobs.serve.batches.turn import BatchTurn, append
from jobs.serve.index import may_lag
from jobs.serve.tickets import FILE, Upload
from trainer.errors import LatheError
from trainer.files.atomic import refusals, sha256_of, sync, write_json

if TYPE_CHECKING:
    from jobs.serve.keeper import Keeper

OUTPUT = "batch_output"  # the purpose of such a file
EXPIRED = "This request could not be executed before the completion window expired."


def finish(keeper: Keeper, turn: BatchTurn, status: EndStatus) -> None:
    """End a batch: write down how, with the files of its lines. It may be repeated by whoever goes
    on after a server that was killed. StorageError.
    """
    folder = turn.folder
    turn.read()
    if status == "expired":
        for request in requests_of(folder.input, keeper.config):
            if not turn.is_answered(request["custom_id"]):
                append(folder.errors, _expired(request["custom_id"]))
        turn.read()
    _end(keeper, turn, status, None)


def fail(keeper: Keeper, turn: BatchTurn, reason: str | None) -> None:
    """End a batch that cannot go on. reason: None where its file has mistakes. What was answered
    becomes a file as far as it can be read. StorageError.
    """
    with suppress(OSError, LatheError):
        turn.read()
    _end(keeper, turn, "failed", reason)


def _end(keeper: Keeper, turn: BatchTurn, status: EndStatus, reason: str | None) -> None:
    batch, folder = turn.batch, turn.folder
    output_id = FILE + batch.digits
    error_id = FILE + hashlib.sha256(f"{batch.digits} errors".encode()).hexdigest()[:24]
    has_output = _publish(keeper, batch, folder.output, output_id, "output")
    has_errors = _publish(keeper, batch, folder.errors, error_id, "error")
    counts = turn.counts.model_dump()
    folder.write_end(
        BatchEnd(
            at=now(),
            status=status,
            reason=reason,
            output_file_id=output_id if has_output else None,
            error_file_id=error_id if has_errors else None,
            **counts,
        )
    )


def _expired(custom_id: str) -> dict[str, Any]:
    error = {"code": "batch_expired", "message": EXPIRED}
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": None,
        "error": error,
    }


def _publish(keeper: Keeper, batch: Batch, source: Path, file_id: str, what: str) -> bool:
    """Make a file of the service of some lines, unless it is there; False when there are no lines.

    StorageError.
    """
    target = keeper.folder.uploads / file_id
    if target.exists():
        return True
    if not source.is_file() or not source.stat().st_size:
        return False
    temporary = target.with_name(f".{file_id}.tmp")
    with refusals(target):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            os.link(source, temporary / "content")
        except OSError:  # a file system without hard links
            shutil.copyfile(source, temporary / "content")
        sync(temporary / "content")
        with source.open("rb") as file:
            num_rows = sum(1 for _ in file)
        upload = Upload(
            id=file_id,
            created_at=now(),
            owner=batch.owner,
            filename=f"{batch.id}_{what}.jsonl",
            purpose=OUTPUT,
            bytes=source.stat().st_size,
            sha256=sha256_of(source),
            num_rows=num_rows,
            kind=None,
            num_mistakes=0,
            mistakes=[],
        )
        write_json(temporary / "file.json", upload.model_dump(mode="json"))
        os.rename(temporary, target)
        sync(target.parent)
    created = datetime.fromisoformat(upload.created_at).timestamp()
    with may_lag():
        keeper.index.write_upload(upload.shown(), owner=upload.owner, created=created)
    return True
