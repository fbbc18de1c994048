"""What the server answers when something goes wrong: a request, a disk, a folder, its own code."""

from __future__ import annotations

import errno
import logging
import sqlite3
from pathlib import Path
from typing import Any, Literal

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jobs.errors import is_transient, reason_for_client, without_base, without_places
from jobs.serve import lathe_routes
from jobs.serve.requests import Refusal, is_operator
from trainer.errors import LatheError, StorageError
from trainer.files.atomic import disk_error

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
MANY_FILES = (errno.EMFILE, errno.ENFILE)
# SQLite's own words for the same; Python 3.10 has no error codes for them.
FULL_INDEX = ("disk is full", "readonly database", "disk I/O error", "unable to open database")

log = logging.getLogger(__name__)


async def on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal), "registered for it"
    return error.response()


async def on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    texts = {404: f"Unknown request URL: {request.method} {request.url.path}.", 405: "Not allowed."}
    return Refusal(error.status_code, texts.get(error.status_code, error.detail)).response()


async def on_disk(request: Request, error: Exception) -> Response:
    """The answer when a disk or the index refuses: 507 when it is full, 503 for what passes, 404
    when the file or folder that was asked for has gone meanwhile.
    """
    kind = disk_trouble(error)
    if kind is None and isinstance(error, StorageError | OSError):
        return await on_unreadable(request, error)
    if kind is None:
        raise error
    log.warning("%s %s: %s", request.method, request.url.path, error)
    if kind == "busy":
        text = "The server has too many files open, or waits for its index. Ask again."
        return Refusal(503, text, code="overloaded", retry_after_s=5).response()
    text = "The disk is full or refuses writes, so this was not done. Ask whoever runs the service."
    return Refusal(507, text, code="insufficient_storage").response()


def disk_trouble(error: BaseException | None) -> Literal["full", "busy"] | None:
    """What an error says about the disk: "full" (or read-only), "busy" (too many open files, an
    index that is locked), None for another error.
    """
    if isinstance(error, OSError | StorageError):
        is_full, is_busy = disk_number(error) in FULL, disk_number(error) in MANY_FILES
    elif isinstance(error, sqlite3.Error):
        is_full = any(words in str(error) for words in FULL_INDEX)
        is_busy = "locked" in str(error)
    else:
        return None
    if is_full:
        return "full"
    return "busy" if is_busy else None


def disk_number(error: OSError | StorageError) -> int | None:
    """The errno with which a disk refused; None for a StorageError that is about something else."""
    cause = error.__cause__ if isinstance(error, StorageError) else error
    return disk_error(cause) if isinstance(cause, Exception) else None


async def on_our_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LatheError), "registered for it"
    log.info("%s %s: %s", request.method, request.url.path, error)
    refusal = lathe_routes.refusal_of(error)
    refusal.message = without_base(refusal.message, base_of(request))
    if not is_operator(request):
        refusal.message = without_places(refusal.message)
    return refusal.response()


def base_of(request: Request) -> Path:
    """The savedir_base of the server."""
    return lathe_routes.keeper_of(request).folder.base.path


async def on_unreadable(request: Request, error: Exception) -> Response:
    """The answer when a file is gone (404), or is none that this server may read or write (409)."""
    assert isinstance(error, OSError | StorageError), "registered for it"
    number = disk_number(error)
    if number is not None and is_transient(error):
        return await on_fault(request, error)
    log.warning("%s %s: %s", request.method, request.url.path, error)
    if number == errno.ENOENT and request.path_params:
        text = f"{request.url.path}: it was deleted a moment ago."
        return Refusal(404, text, param="id").response()
    reason = reason_for_client(error, Path(request.url.path), base_of(request))
    return Refusal(409, f"It cannot be read or written: {reason.rstrip('.')}.").response()


async def on_fault(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return Refusal(500, "The server failed. Its log says why.").response()


HANDLERS: dict[Any, Any] = {
    Refusal: on_refusal,
    HTTPException: on_http,
    StorageError: on_disk,
    OSError: on_disk,
    sqlite3.Error: on_disk,
    LatheError: on_our_error,
    Exception: on_fault,
}
