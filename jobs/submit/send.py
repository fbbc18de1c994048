"""Sending one attempt so that it starts exactly once, even if the submitting process is killed.

    intent on the disk -> sent under a name that only this attempt has -> the scheduler's id on the
    disk

The next submission that finds an intent without an id asks the scheduler for the name first, and
records the id of the job that has it. Only a name that the scheduler does not know is sent again,
under the same name. Should two copies run all the same, the wrapper lets only the first one start
(jobs/node/wrapper.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import ValidationError

from jobs.errors import NotYet, Refused, Unreachable, reason_of
from jobs.protocol import ArrayBackend, Backend, JobSpec, Rendered, array_token
from jobs.record import events as record
from jobs.record.paths import RunFolder
from jobs.record.state_table import TURN
from jobs.record.times import seconds_since
from jobs.submit.request import as_attempt
from trainer.errors import ConfigError
from trainer.files.atomic import read_json, refusals, replace_file, write_json

if TYPE_CHECKING:
    from jobs.record.events import Job, Sent
    from jobs.submit.request import AttemptDraft

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """The result of sending one attempt."""

    is_sent: bool
    text: str
    is_refused: bool = False
    is_waiting: bool = False  # its scheduler takes no more jobs now; `reconcile` sends it


def fresh(job: Job, template: JobSpec, folder: RunFolder) -> JobSpec:
    """`template` as the next attempt of `job`: its own number, token and wrapper."""
    return as_attempt(template, len(job.attempts) + 1, job.nonce, folder=folder)


def read_spec(folder: RunFolder, number: int) -> JobSpec:
    """The spec of an attempt as it was sent. ConfigError when it cannot be read."""
    values = read_json(folder.attempt(number).spec)
    if values is None:
        raise ConfigError(
            f"{folder.attempt(number).spec}: absent or not whole. Submit the group again, or "
            "`reset` it."
        )
    try:
        return JobSpec.model_validate(values)
    except ValidationError as error:  # written by another version
        raise ConfigError(
            f"{folder.attempt(number).spec}: {error}. Submit the group again."
        ) from None


def ids_of(sent: Sent, backend: Backend) -> list[str]:
    """The scheduler's ids of one attempt, looked up by its name; of an array's element, its own.

    Unreachable when the scheduler cannot be seen.
    """
    array_ids = sorted(backend.find(sent.name), key=lambda text: (len(text), text))
    if sent.index is not None and isinstance(backend, ArrayBackend):
        return [backend.element(array_id, sent.index) for array_id in array_ids]
    return array_ids


def send(
    folder: RunFolder, spec: JobSpec, backend: Backend, *, draft: AttemptDraft | None = None
) -> Outcome:
    """Send a new attempt. The caller holds the lock and knows that no other attempt runs.

    draft: its text is sent if it is of this very attempt; else the attempt is rendered here.
    """
    is_of_spec = draft is not None and draft.spec == spec
    rendered = draft.rendered if draft is not None and is_of_spec else backend.render(spec)
    # one that was thought lost may still stand in a queue somewhere
    for earlier in range(1, spec.attempt):
        give_up(folder, earlier)
    _write(folder, spec, rendered)
    record.append(
        folder,
        record.intent(spec.attempt, spec.token, name=spec.token, index=None, backend=backend.name),
    )
    return _submit(folder, spec, backend, rendered)


def settle_intent(folder: RunFolder, sent: Sent, backend: Backend, *, resend_s: float) -> Outcome:
    """Find out what became of an intent without an id.

    Adopt it, or send it again once it is `resend_s` seconds old.
    """
    ids = ids_of(sent, backend)
    if ids:
        return _adopt(folder, sent, backend, ids[0])
    if folder.attempt(sent.number).starts():
        return Outcome(True, "it has started, and its scheduler has forgotten under which id")
    if sent.is_cancelled:
        return Outcome(True, "cancelled, and its scheduler does not know it")
    age_s = seconds_since(sent.at)
    if age_s < resend_s:
        return Outcome(
            False,
            f"sent {age_s:.0f} s ago without an answer, and {backend.name} does not know it yet",
        )
    if sent.index is not None:  # its array never was: it goes alone now, under its own name
        if not give_up(folder, sent.number):
            return Outcome(True, "it has started just now")
        reason = f"array {sent.name} never arrived"
        record.append(folder, {"event": "refused", "attempt": sent.number, "reason": reason})
        return _send_next(folder, sent, backend)
    spec = read_spec(folder, sent.number)
    record.append(folder, {"event": "resent", "attempt": sent.number})
    return _submit(folder, spec, backend, backend.render(spec))


def take_turn(folder: RunFolder, sent: Sent, backend: Backend) -> Outcome:
    """Send an attempt again for which its scheduler had no room, under the same name.

    Its record stays as it is while there is still none: it may wait for days.
    """
    if ids := ids_of(sent, backend):
        return _adopt(folder, sent, backend, ids[0])
    if sent.index is not None:  # its array had no room: it goes alone, under its own name
        give_up(folder, sent.number)
        return _send_next(folder, sent, backend)
    spec = read_spec(folder, sent.number)
    return _submit(folder, spec, backend, backend.render(spec))


def _adopt(folder: RunFolder, sent: Sent, backend: Backend, job_id: str) -> Outcome:
    record.append(
        folder, {"event": "submitted", "attempt": sent.number, "id": job_id, "adopted": True}
    )
    _tell_haven(folder, job_id, read_spec(folder, sent.number))
    if sent.is_cancelled:
        backend.cancel(job_id)
    return Outcome(True, f"adopted {job_id}: an earlier submission had sent it")


def _send_next(folder: RunFolder, sent: Sent, backend: Backend) -> Outcome:
    job = record.read(folder)
    assert job is not None, "the record was read a moment ago"
    return send(folder, fresh(job, read_spec(folder, sent.number), folder), backend)


def give_up(folder: RunFolder, number: int) -> bool:
    """Forbid an attempt to start from now on; False when it has started already (and goes on).

    The wrapper writes its start, then looks for the mark; here the mark comes first: one of the two
    sees the other.
    """
    attempt = folder.attempt(number)
    with refusals(attempt.folder):
        attempt.folder.mkdir(parents=True, exist_ok=True)
        attempt.give_up_file.touch()
    if not attempt.starts():
        return True
    attempt.give_up_file.unlink(missing_ok=True)
    return False


def send_array(
    specs: Mapping[str, JobSpec], backend: Backend, index_folder: Path, *, max_parallel: int | None
) -> dict[str, Outcome | Exception]:
    """Send many attempts in one submission; by folder the outcome, or the error of that attempt
    alone. The caller holds all the locks.

    An attempt whose intent cannot be written is left out, and the array is made again without it.
    What concerns all (the backend cannot express the array, its index cannot be written) is raised;
    then nothing is on record.
    """
    assert isinstance(backend, ArrayBackend), "asked for by the caller"
    members = list(specs.values())
    results: dict[str, Outcome | Exception] = {}
    while members:
        token = array_token([spec.token for spec in members])
        index_file = index_folder / f"{token}.json"
        rendered = backend.render_array(
            members, token=token, index_file=str(index_file), max_parallel=max_parallel
        )
        with refusals(index_folder):
            index_folder.mkdir(parents=True, exist_ok=True)
        places = {str(i): [spec.folder, spec.attempt] for i, spec in enumerate(members)}
        write_json(index_file, places)
        errors = _write_intents(members, rendered, backend)
        if not errors:
            return results | _submit_array(members, rendered, backend)
        results |= errors
        index_file.unlink(missing_ok=True)
        culprit, error = next(iter(errors.items()))
        reason = f"array {token} was not sent: {reason_of(error, Path(culprit))}"
        intact = [spec for spec in members if spec.folder not in errors]
        members = list[JobSpec]()
        for spec in intact:
            try:
                folder = RunFolder(Path(spec.folder))
                event = {"event": "refused", "attempt": spec.attempt, "reason": reason}
                record.append(folder, event)
                job = record.read(folder)
                assert job is not None, "its intent was written a moment ago"
                members.append(fresh(job, spec, folder))
            except Exception as error:  # of any kind: it is this attempt's
                results[spec.folder] = error
    return results


def _write_intents(
    members: Sequence[JobSpec], rendered: Rendered, backend: Backend
) -> dict[str, Exception]:
    """The errors of those members of an array whose intent cannot be written, by folder."""
    errors: dict[str, Exception] = {}
    for i, spec in enumerate(members):
        folder = RunFolder(Path(spec.folder))
        try:
            for number in range(1, spec.attempt):
                give_up(folder, number)
            _write(folder, spec, rendered)
            event = record.intent(
                spec.attempt, spec.token, name=rendered.token, index=i, backend=backend.name
            )
            record.append(folder, event)
        except Exception as error:  # of any kind: it is this attempt's
            errors[spec.folder] = error
    return errors


def _submit_array(
    members: Sequence[JobSpec], rendered: Rendered, backend: ArrayBackend
) -> dict[str, Outcome | Exception]:
    """Send an array whose intents are on the disk, and record the answer for each member."""
    answer: str | Exception
    try:
        answer = cast("Backend", backend).submit(rendered)
    except Exception as error:  # of any kind: each record says what is known
        answer = error
    results: dict[str, Outcome | Exception] = {}
    for i, spec in enumerate(members):
        folder = RunFolder(Path(spec.folder))
        try:
            if isinstance(answer, str):
                results[spec.folder] = _note_id(folder, spec, backend.element(answer, i))
            elif isinstance(answer, NotYet | Refused | Unreachable):
                results[spec.folder] = _not_sent(folder, spec, answer)
            else:
                results[spec.folder] = answer
        except Exception as error:  # of any kind: it is this attempt's
            results[spec.folder] = error
    return results


def _submit(folder: RunFolder, spec: JobSpec, backend: Backend, rendered: Rendered) -> Outcome:
    try:
        job_id = backend.submit(rendered)
    except (NotYet, Refused, Unreachable) as error:
        return _not_sent(folder, spec, error)
    return _note_id(folder, spec, job_id)


def _note_id(folder: RunFolder, spec: JobSpec, job_id: str) -> Outcome:
    record.append(
        folder, {"event": "submitted", "attempt": spec.attempt, "id": job_id, "adopted": False}
    )
    _tell_haven(folder, job_id, spec)
    return Outcome(True, f"submitted as {job_id}")


def _not_sent(folder: RunFolder, spec: JobSpec, error: Exception) -> Outcome:
    if isinstance(error, Refused):
        record.append(folder, {"event": "refused", "attempt": spec.attempt, "reason": str(error)})
        return Outcome(False, f"refused: {error}", is_refused=True)
    if isinstance(error, NotYet):
        reason = f"{TURN}{error}"
        job = record.read(folder)
        if job is None or job.last is None or job.last.reason != reason:
            record.append(folder, {"event": "refused", "attempt": spec.attempt, "reason": reason})
        return Outcome(False, f"{reason}: `reconcile` sends it", is_waiting=True)
    record.append(folder, {"event": "unseen", "reason": str(error)})
    return Outcome(False, f"no answer, so it may have arrived: {error}")


def _write(folder: RunFolder, spec: JobSpec, rendered: Rendered) -> None:
    attempt = folder.attempt(spec.attempt)
    with refusals(attempt.folder):
        attempt.folder.mkdir(parents=True, exist_ok=True)
    replace_file(attempt.spec, spec.model_dump_json().encode())
    replace_file(attempt.folder / rendered.file, rendered.text.encode(), is_durable=False)


def _tell_haven(folder: RunFolder, job_id: str, spec: JobSpec) -> None:
    """job_dict.json, which haven's notebooks read."""
    write_json(
        folder.job_dict,
        {"job_id": job_id, "command": " ".join([*spec.launcher, *spec.program])},
        is_durable=False,
    )
