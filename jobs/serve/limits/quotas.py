"""Quotas: what a token may keep and run. The check and what it allows are one step.

The step is under a lock of the owner, a file that all servers of the folder see. It counts the
folders themselves, because a server's index may lag behind what another server has just created.
"""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

from jobs.serve.requests import Refusal
from trainer.files.atomic import refusals

if TYPE_CHECKING:
    from jobs.serve.access import Client
    from jobs.serve.keeper import Keeper

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Folder(Protocol[T_co]):
    """The folder of a ticket or an upload."""

    def read(self) -> T_co | None: ...


@contextmanager
def room_for_job(keeper: Keeper, client: Client) -> Generator[None]:
    """Inside, the client may create one job. Refusal when its quota allows none; StorageError."""
    quota = client.quota
    if quota.jobs is None and quota.gpu_hours is None:
        yield
        return
    with quota_lock(keeper, client):
        live, hours = num_live_jobs(keeper, client.name), keeper.index.gpu_hours(client.name)
        if quota.jobs is not None and live >= quota.jobs:
            text = f"{live} jobs of {client.name} have not ended, at most {quota.jobs} may. Wait."
            raise Refusal(429, text, code="rate_limit_exceeded", retry_after_s=60)
        if quota.gpu_hours is not None and hours >= quota.gpu_hours:
            text = f"{client.name} has used {hours:.1f} of {quota.gpu_hours:.1f} GPU hours."
            raise Refusal(429, text, code="insufficient_quota")
        yield


@contextmanager
def room_for_file(keeper: Keeper, client: Client, size: int) -> Generator[None]:
    """Inside, the client may keep a file of this size. Refusal when its quota has no room for it;
    StorageError.
    """
    if client.quota.bytes is None:
        yield
        return
    with quota_lock(keeper, client):
        refuse_bytes(client, bytes_kept(keeper, client.name), size)
        yield


def refuse_bytes(client: Client, kept: int, more: int) -> None:
    """Return if the client may keep so many bytes more; else Refusal (429)."""
    most = client.quota.bytes
    if most is not None and kept + more > most:
        text = (
            f"{client.name} keeps {kept} bytes of files, and {more} more are above the quota of "
            f"{most}. Delete some files."
        )
        raise Refusal(429, text, code="insufficient_quota")


def num_live_jobs(keeper: Keeper, owner: str) -> int:
    """The jobs of an owner that have not ended, with those that the index does not have yet."""
    num_indexed, indexed = keeper.index.live_jobs(owner), keeper.index.job_marks()
    tickets = (
        _readable(keeper.folder.ticket(job_id))
        for job_id in keeper.folder.ticket_ids()
        if job_id not in indexed
    )
    return num_indexed + sum(ticket is not None and ticket.owner == owner for ticket in tickets)


def bytes_kept(keeper: Keeper, owner: str) -> int:
    """The bytes of an owner's files, with those that the index does not have yet."""
    indexed, total = keeper.index.upload_sizes(), 0
    for file_id in keeper.folder.upload_ids():
        if file_id in indexed:
            of, size = indexed[file_id]
            total += size if of == owner else 0
            continue
        upload = _readable(keeper.folder.upload(file_id))
        total += upload.bytes if upload is not None and upload.owner == owner else 0
    return total


def _readable(folder: Folder[T] | None) -> T | None:
    """What a folder holds; None for one that cannot be read, which may be another owner's."""
    with suppress(Exception):  # of any kind: it keeps nobody from creating a job
        return None if folder is None else folder.read()
    return None


@contextmanager
def quota_lock(keeper: Keeper, client: Client) -> Generator[None]:
    """Inside, no other server and no other thread checks a quota of this client."""
    path = keeper.folder.locks / client.name
    with refusals(path):
        keeper.folder.locks.mkdir(exist_ok=True)
        file = path.open("ab")
    with file:
        with refusals(path):
            fcntl.flock(file, fcntl.LOCK_EX)  # ends when the file is closed
        yield
