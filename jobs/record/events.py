"""job.jsonl: the append-only record of one experiment, and what it adds up to.

Every line is one JSON object with `at` (UTC) and `event`, written with one write and fsynced. A
torn last line (its writer was killed) is ignored, and the next writer starts on a line of its own.
Events:

    created    exp_id, digest, group, nonce                  once, the first line
    intent     attempt, token, name, index, backend, by      before anything is sent
    resent     attempt                                       sent again under the same name
    submitted  attempt, id, adopted                          the scheduler has it
    refused    attempt, reason                               the scheduler said no: nothing was sent
    observed   attempt, state, reason, host                  the state changed
    cancel     attempt                                       somebody asked for its end
    unseen     reason                                        the scheduler cannot be reached ...
    seen                                                     ... and can again
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from filelock import FileLock, Timeout

from jobs.errors import Busy
from jobs.job_state import STATES
from jobs.record.times import now
from trainer.errors import LatheError
from trainer.files.atomic import read_small, refusals
from trainer.run_changes import note_change

if TYPE_CHECKING:
    from jobs.job_state import JobState
    from jobs.record.paths import RunFolder

HEARTBEAT_LOST_S = 600.0  # the wrapper beats every 30 s


@dataclass(frozen=True)
class Sent:
    """One attempt, as the record has it."""

    number: int
    token: str
    name: str  # what the scheduler calls it: the token, or the name of the array that holds it
    index: int | None  # its place in that array
    backend: str
    at: str  # when it was sent last: the intent, or `resent`
    id: str | None = None
    submitted_at: str | None = None
    was_adopted: bool = False
    state: JobState = "submitting"
    reason: str | None = None
    host: str | None = None
    is_cancelled: bool = False  # somebody asked for its end
    end_wanted_for: str | None = None  # why, where it was for something else than its end


@dataclass(frozen=True)
class Job:
    """The state that the events of job.jsonl add up to."""

    exp_id: str
    digest: str
    group: str
    nonce: str
    created_at: str
    attempts: tuple[Sent, ...] = field(default=())
    unseen_since: str | None = None
    unseen_reason: str | None = None

    @property
    def last(self) -> Sent | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def state(self) -> JobState:
        return self.last.state if self.last else "pending"


def append(folder: RunFolder, *events: dict[str, Any], is_durable: bool = True) -> None:
    """Add events to the record, durably and each on a line of its own.

    The caller holds the lock of the folder.
    """
    lines = b"".join(json.dumps({"at": now(), **event}).encode() + b"\n" for event in events)
    path = folder.record
    with refusals(path), path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            lines = b"\n" + lines  # the last writer was killed in the middle of its line
        file.write(lines)
        if is_durable:
            os.fsync(file.fileno())
    note_change(folder.path.parent, folder.path.name)


def new_nonce() -> str:
    """Six random letters that tell the names of one record's attempts from those of another."""
    return secrets.token_hex(3)


def create(
    folder: RunFolder, *, exp_id: str, digest: str, group: str, nonce: str | None = None
) -> None:
    """Begin the record of an experiment, with this nonce or a new one.

    The intent that follows makes it durable: before that, nothing was sent.
    """
    nonce = nonce or new_nonce()
    event = {"event": "created", "exp_id": exp_id, "digest": digest, "group": group, "nonce": nonce}
    append(folder, event, is_durable=False)


def intent(
    number: int, token: str, *, name: str, index: int | None, backend: str
) -> dict[str, Any]:
    """The event that must be on the disk before anything is sent."""
    by = f"{socket.gethostname()}:{os.getpid()}"
    return {
        "event": "intent",
        "attempt": number,
        "token": token,
        "name": name,
        "index": index,
        "backend": backend,
        "by": by,
    }


def read(folder: RunFolder) -> Job | None:
    """The job of a record; None when there is no record. LatheError when it was altered, or is that
    of another experiment.
    """
    try:
        content = read_small(folder.record)
    except (FileNotFoundError, NotADirectoryError):
        return None
    job, problem = None, None
    try:
        job = fold(_whole(content))
        problem = None if job is None else _problem(job, folder.path.name)
        if job is None and b"\n" in content:  # without one, its first writer was killed
            problem = "no line begins a record"
    except KeyError as error:
        problem = f"an event lacks {error}"
    except (TypeError, AttributeError) as error:
        problem = f"an event is malformed ({error})"
    except RecursionError:
        problem = "a line is nested too deeply"
    if problem is not None:
        raise LatheError(f"{folder.record}: {problem}. `reset` the experiment, or mend that line.")
    return job


def _problem(job: Job, exp_id: str) -> str | None:
    """What is wrong with a job that a record adds up to; None when it is as our events make it."""
    if job.exp_id != exp_id:
        return f"it is the record of the experiment {job.exp_id!r}, want {exp_id!r}"
    texts: list[Any] = [job.digest, job.group, job.nonce, job.created_at, job.unseen_since or ""]
    numbers: list[Any] = []
    for one in job.attempts:
        texts += [one.token, one.name, one.backend, one.at, one.id or "", one.submitted_at or ""]
        texts += [one.reason or "", one.host or ""]
        numbers += [one.number, one.index or 0]
        if one.state not in STATES:
            return f"there is no state {one.state!r}"
    strays = [value for value in texts if not isinstance(value, str)]
    strays += [value for value in numbers if type(value) is not int]
    return f"{strays[0]!r} is no value that an event of ours has" if strays else None


def _whole(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.splitlines():
        with contextlib.suppress(ValueError):
            event: Any = json.loads(line)
            if isinstance(event, dict):
                yield cast("dict[str, Any]", event)


def fold(events: Iterable[dict[str, Any]]) -> Job | None:
    """The job that a sequence of events makes; None when it does not begin with `created`."""
    job: Job | None = None
    for event in events:
        kind = event.get("event")
        if job is None:
            if kind == "created":
                job = Job(
                    event["exp_id"], event["digest"], event["group"], event["nonce"], event["at"]
                )
        elif kind == "intent":
            attempt = Sent(
                event["attempt"],
                event["token"],
                event["name"],
                event["index"],
                event["backend"],
                at=event["at"],
            )
            job = replace(job, attempts=(*job.attempts, attempt))
        elif kind == "unseen":
            job = replace(
                job, unseen_since=job.unseen_since or event["at"], unseen_reason=event["reason"]
            )
        elif kind == "seen":
            job = replace(job, unseen_since=None, unseen_reason=None)
        else:
            job = _apply(job, event)
    return job


def _apply(job: Job, event: dict[str, Any]) -> Job:
    changes: dict[str, Any] = {}
    if event["event"] == "submitted":
        changes = {"id": event["id"], "submitted_at": event["at"], "was_adopted": event["adopted"]}
        changes["state"] = "submitted"
    elif event["event"] == "resent":
        changes = {"at": event["at"]}
    elif event["event"] == "refused":
        changes = {"state": "pending", "reason": event["reason"]}
    elif event["event"] == "observed":
        changes = {
            "state": event["state"],
            "reason": event.get("reason"),
            "host": event.get("host"),
        }
    elif event["event"] == "cancel":
        changes = {"is_cancelled": True, "end_wanted_for": event.get("why")}
    attempts = tuple(
        _paused_or_not(replace(attempt, **changes))
        if attempt.number == event["attempt"]
        else attempt
        for attempt in job.attempts
    )
    return replace(job, attempts=attempts)


def _paused_or_not(attempt: Sent) -> Sent:
    """`attempt` as "paused" or "cancelled" by the last wish for its end: a record from before 26
    November 2026 says "cancelled" of both, and who is paused may be cancelled later.
    """
    why = attempt.end_wanted_for
    if attempt.state == "cancelled" and why is not None:
        return replace(attempt, state="paused", reason=why)
    if attempt.state == "paused" and why is None and attempt.is_cancelled:
        return replace(attempt, state="cancelled", reason=None)
    return attempt


@contextlib.contextmanager
def lock(folder: RunFolder, *, wait_s: float) -> Generator[None]:
    """Hold the lock of an experiment. Busy when another process holds it for more than `wait_s`."""
    with refusals(folder.lock):
        folder.lock.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            _take(folder, stack, wait_s)
        except Timeout:  # an OSError too
            how_long = f"has held this for {wait_s:.0f} s" if wait_s >= 1 else "holds this now"
            raise Busy(f"{folder.lock}: another process {how_long}. Let it finish.") from None
        yield


def _take(folder: RunFolder, stack: contextlib.ExitStack, wait_s: float) -> None:
    try:
        stack.enter_context(FileLock(folder.lock, timeout=wait_s, poll_interval=0.02))
    except Timeout:
        raise
    except OSError as error:
        with refusals(folder.lock):
            raise error
