"""What a client sees of a job: its status, events and checkpoints, made from its files.

The id of an event follows from its cause (the second start of attempt 1, the loss at step 30), so
every server and every reading gives the same event.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal, cast

from jobs.job_state import JobState
from jobs.record.metrics import numbers
from jobs.record.paths import RunFolder
from jobs.record.row import Row
from jobs.record.state_table import TURN
from jobs.serve.tickets import Checked, Failure, Ticket, Wish
from trainer.errors import EXIT_OK, EXIT_PREEMPTED
from trainer.files.atomic import bounded_lines, open_file
from trainer.files.survival_events import recovery_sentence

Status = Literal["validating_files", "queued", "running", "succeeded", "failed", "cancelled"]
Level = Literal["info", "warn", "error"]
FINAL: tuple[Status, ...] = ("succeeded", "failed", "cancelled")
FAILED: tuple[JobState, ...] = ("failed", "timeout", "oom", "lost")
GATE_REFUSED = "gate_refused"  # code of the error of a job whose gate kept its model back
CANNOT_RUN = "cannot_run"  # code of the error of a job whose files or folders nobody understands
# OpenAI's name -> our name of a metric
SCORES = {
    "train_loss": "loss",
    "valid_loss": "valid/loss",
    "full_valid_loss": "valid/loss",
    "train_mean_token_accuracy": "accuracy",
    "valid_mean_token_accuracy": "valid/accuracy",
    "full_valid_mean_token_accuracy": "valid/accuracy",
}


@dataclass(frozen=True)
class Facts:
    """Everything that the files say about a job. row: None when it was never submitted."""

    ticket: Ticket
    checked: Checked | None
    wishes: list[Wish]
    row: Row | None
    failure: Failure | None = None  # what keeps it from going on, for good
    refusals: tuple[str, ...] = ()  # why the gate of its run keeps its model back

    def last_wish(self, *kinds: str) -> Wish | None:
        """The last wish of one of these kinds."""
        return next((wish for wish in reversed(self.wishes) if wish.wish in kinds), None)

    @property
    def is_deleted(self) -> bool:
        """Whether its model was deleted."""
        return self.last_wish("delete") is not None


@dataclass(frozen=True)
class Standing:
    """The status of a job. finished_at: ISO time."""

    status: Status
    finished_at: str | None = None
    error: dict[str, Any] | None = None


@dataclass(frozen=True)
class JobEvent:
    """Something that happened to a job. at: seconds since 1970."""

    id: str
    at: float
    message: str
    level: Level = "info"
    type: Literal["message", "metrics"] = "message"
    data: dict[str, Any] | None = None


def standing(facts: Facts) -> Standing:
    """The status of a job for clients. A cancelled job stays cancelled."""
    row, cancel, failure = facts.row, facts.last_wish("cancel"), facts.failure
    ends = [one.at for one in (cancel, failure) if one is not None]
    if facts.checked is not None and facts.checked.message is not None:
        error = _error("invalid_training_file", facts.checked.message, facts.checked.param)
        return Standing("failed", facts.checked.at, error)
    if row is not None and row.state in ("succeeded", *FAILED):
        is_first_end = not ends or (row.ended_at or "") <= min(ends)
        if is_first_end and row.state == "succeeded" and facts.refusals:
            message = f"The gate kept its model back: {'; '.join(facts.refusals)}."
            return Standing("failed", _ended_at(row), _error(GATE_REFUSED, message, None))
        if is_first_end and row.state == "succeeded":
            return Standing("succeeded", _ended_at(row))
        may_go_on = facts.ticket.driven_by is not None and failure is None
        if is_first_end and row.ended_at is not None and cancel is None and not may_go_on:
            return _as_failed(row, f"training_{row.state}")
    if failure is not None and failure.at == min(ends):
        return Standing("failed", failure.at, _error(CANNOT_RUN, failure.message, None))
    if cancel is not None:
        return Standing("cancelled", cancel.at)
    if facts.checked is None:
        return Standing("validating_files")
    if row is None or not row.history:
        return Standing("queued")
    if row.state in FAILED and facts.ticket.driven_by is not None:
        return Standing("queued")  # it is begun again, until the keeper writes down why not
    if row.state in FAILED:
        return _as_failed(row, f"training_{row.state}")
    if row.state == "pending" and not has_turn_later(row):
        return _as_failed(row, "refused")
    last = facts.last_wish("pause", "resume")
    # a pause ended the attempt: then the job is resumed, now or later
    was_paused = last is not None and (last.wish == "pause" or row.history[-1].at < last.at)
    if row.state == "cancelled" and not was_paused:
        return Standing("cancelled", _ended_at(row))
    return Standing("running" if row.state == "running" else "queued")


def has_turn_later(row: Row) -> bool:
    """Whether its scheduler took no more jobs when it was sent: then it is sent again."""
    return row.state == "pending" and (row.reason or "").startswith(TURN)


def _as_failed(row: Row, code: str) -> Standing:
    """The standing of a job whose run failed, or was refused by its scheduler."""
    reason = row.reason or f"it ended as {row.state}"
    return Standing("failed", _ended_at(row), _error(code, reason, None))


def _ended_at(row: Row) -> str | None:
    """When a run ended; when that is unknown, when it was last submitted."""
    return row.ended_at or (row.history[-1].at if row.history else row.created_at)


def is_paused(facts: Facts) -> bool:
    """Whether the last wish is a pause."""
    last = facts.last_wish("pause", "resume", "cancel")
    return last is not None and last.wish == "pause"


def _error(code: str, message: str, param: str | None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param}


def job_object(facts: Facts, organization: str) -> dict[str, Any]:
    """The job in the format of the OpenAI API. Source: openai 3.54, types/fine_tuning."""
    ticket, row, now_ = facts.ticket, facts.row, standing(facts)
    numbers_used = {
        "n_epochs": ticket.epochs,
        "batch_size": ticket.batch,
        "learning_rate_multiplier": ticket.lr_factor,
    }
    of_method: dict[str, Any] = dict(numbers_used)
    if ticket.method == "dpo":
        of_method["beta"] = ticket.beta
    has_succeeded = now_.status == "succeeded"
    eta_s = row.eta_s if row is not None and now_.status == "running" else None
    tokens = row.metrics.get("tokens") if row is not None and has_succeeded else None
    return {
        "id": ticket.id,
        "object": "fine_tuning.job",
        "created_at": int(seconds(ticket.created_at)),
        "error": now_.error,
        "fine_tuned_model": ticket.tuned_model(organization) if has_succeeded else None,
        "finished_at": None if now_.finished_at is None else int(seconds(now_.finished_at)),
        "hyperparameters": numbers_used,
        "model": ticket.begins_with or ticket.model,
        "organization_id": organization,
        "result_files": [f"file-{ticket.digits}"] if has_succeeded else [],
        "seed": ticket.seed,
        "status": now_.status,
        "trained_tokens": None if tokens is None else int(tokens),
        "training_file": ticket.training_file,
        "validation_file": ticket.validation_file,
        "estimated_finish": None if eta_s is None else int(time.time() + eta_s),
        "integrations": [],
        "metadata": ticket.metadata,
        "method": {"type": ticket.method, ticket.method: {"hyperparameters": of_method}},
        # facts that the OpenAI API has no field for; clients ignore this extra object
        "lathe": {
            "exp_id": ticket.exp_id,
            "state": row.state if row is not None else "pending",
            "reason": row.reason if row is not None else _reason(facts),
            "is_paused": is_paused(facts),
            "step": row.step if row is not None else None,
            "total": row.total if row is not None else None,
            "attempts": row.attempts if row is not None else 0,
            "gpu_hours": row.gpu_hours if row is not None else 0.0,
            "owner": ticket.owner,
            "suffix": ticket.suffix,
            "driven_by": ticket.driven_by,
            "is_deleted": facts.is_deleted,
        },
    }


def _reason(facts: Facts) -> str:
    """Why nothing of a job was sent."""
    for end in (facts.checked, facts.failure):
        if end is not None and end.message is not None:
            return end.message
    if facts.last_wish("cancel") is not None:
        return "cancelled before it was sent"
    if is_paused(facts):
        return "paused before it was sent"
    return "its files are being checked" if facts.checked is None else "it is sent next"


def unreadable_job(
    job_id: str, message: str, at: float, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The failed job of a ticket that cannot be read, with what was known of it before. at: seconds
    since 1970 when it became so.
    """
    end = {"status": "failed", "error": _error(CANNOT_RUN, message, None), "finished_at": int(at)}
    end |= {"fine_tuned_model": None, "result_files": [], "estimated_finish": None}
    if before is not None:
        return {**before, **end}
    unknown = {"n_epochs": 1, "batch_size": 1, "learning_rate_multiplier": 1.0}
    ours = {"exp_id": "", "state": "held", "reason": message, "is_paused": False, "step": None}
    ours |= {"total": None, "attempts": 0, "gpu_hours": 0.0, "owner": "", "suffix": None}
    return {
        "id": job_id,
        "object": "fine_tuning.job",
        "created_at": int(at),
        "hyperparameters": unknown,
        "model": "unknown",
        "organization_id": "unknown",
        "seed": 0,
        "trained_tokens": None,
        "training_file": "unknown",
        "validation_file": None,
        "integrations": [],
        "metadata": None,
        "method": {"type": "supervised", "supervised": {"hyperparameters": unknown}},
        "lathe": ours,
        **end,
    }


# Events
# --------------------------------------------------------------------------------------------------


def state_events(facts: Facts, organization: str) -> list[JobEvent]:
    """The events of a job except its metrics, in order."""
    ticket, checked = facts.ticket, facts.checked
    text = f"Created fine-tuning job: {ticket.id}"
    events = [_event(facts, "created", ticket.created_at, text)]
    if ticket.driven_by is not None:
        text = f"Its client sends its steps: {ticket.driven_by}"
    else:
        text = f"Validating training file: {ticket.training_file}"
    if ticket.validation_file is not None:
        text += f" and validation file: {ticket.validation_file}"
    events.append(_event(facts, "validating", ticket.created_at, text))
    if checked is not None and checked.message is None:
        text = "Files validated, moving job to queued state"
        events.append(_event(facts, "validated", checked.at, text))
    words = {"pause": "Pause", "resume": "Resumption", "cancel": "Cancellation"}
    for number, wish in enumerate(facts.wishes, start=1):
        if wish.wish in words:
            text = f"{words[wish.wish]} requested"
            events.append(_event(facts, f"wish-{number}", wish.at, text))
    for start in facts.row.starts if facts.row is not None else ():
        verb = "started" if (start.attempt, start.number) == (1, 1) else "resumed"
        key = f"{start.attempt}-{start.number}"
        events.append(_event(facts, f"start-{key}", start.began_at, f"Fine-tuning job {verb}"))
        if start.code == EXIT_PREEMPTED:
            text = "The training saved and stopped"
            events.append(_event(facts, f"stop-{key}", start.ended_at, text))
        elif start.code not in (None, EXIT_OK):
            text = f"The training ended with code {start.code}"
            events.append(_event(facts, f"stop-{key}", start.ended_at, text, "warn"))
    for number, event in enumerate(facts.row.recoveries if facts.row is not None else (), 1):
        events.append(
            _event(facts, f"recovery-{number}", event["at"], recovery_sentence(event), "warn")
        )
    return sorted([*events, *_end(facts, organization)], key=lambda event: event.at)


def _end(facts: Facts, organization: str) -> Iterator[JobEvent]:
    """The last events of a job that has ended. They stay even if a retry starts it again."""
    now_ = standing(facts)
    if now_.status not in FINAL or now_.finished_at is None:
        return
    attempt = facts.row.attempt if facts.row is not None else 0
    if now_.status == "succeeded":
        name = facts.ticket.tuned_model(organization)
        yield _event(facts, "model", now_.finished_at, f"New fine-tuned model created: {name}")
        text = "The job has successfully completed"
        yield _event(facts, "succeeded", now_.finished_at, text)
    elif now_.status == "cancelled":
        yield _event(facts, f"cancelled-{attempt}", now_.finished_at, "The job was cancelled")
    else:
        message = (now_.error or {}).get("message")
        text = f"The job failed: {message}"
        yield _event(facts, f"failed-{attempt}", now_.finished_at, text, "error")


def _event(facts: Facts, key: str, at: str, message: str, level: Level = "info") -> JobEvent:
    return JobEvent(f"ftevent-{facts.ticket.digits}-{key}", seconds(at), message, level)


def metric_events(
    ticket: Ticket, lines: Iterable[Mapping[str, Any]], at: float, total: int | None
) -> Iterator[JobEvent]:
    """The events of some lines of metrics.jsonl. at: about when they were written. total: the steps
    of the run, if its folder says them.
    """
    of_total = "" if total is None else f"/{total}"
    for line in lines:
        values = numbers(dict(line))
        step = values.get("step")
        if step is None or any(name.startswith("grad_norm/") for name in values):
            continue
        scores = {theirs: values[ours] for theirs, ours in SCORES.items() if ours in values}
        rest = {name: value for name, value in values.items() if name != "step"}
        # a step may have several lines, each with its own metrics
        names = ",".join(sorted(rest))
        kind = "train" if "loss" in rest else hashlib.sha256(names.encode()).hexdigest()[:6]
        data = {"step": int(step), "total_steps": total, **scores, **rest}
        key = f"ftevent-{ticket.digits}-{kind}-{int(step)}"
        if "loss" in values:
            text = f"training loss={values['loss']:.4f}"
        else:
            evaluated = [(name, value) for name, value in values.items() if "/" in name]
            text = ", ".join(f"{name}={value:.4f}" for name, value in evaluated[:4])
        text = f"Step {int(step)}{of_total}: {text}"
        yield JobEvent(key, at, text, type="metrics", data=data)


def event_object(event: JobEvent) -> dict[str, Any]:
    """The event in the format of the OpenAI API."""
    return {
        "id": event.id,
        "object": "fine_tuning.job.event",
        "created_at": int(event.at),
        "level": event.level,
        "message": event.message,
        "type": event.type,
        "data": event.data or {},
    }


# Metrics
# --------------------------------------------------------------------------------------------------


def metric_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl; [] when there is no such file, or none to be read."""
    try:
        with open_file(path) as file:
            return metric_lines_from(file, 0)[0]
    except OSError:
        return []


def metric_lines_from(file: IO[bytes], start: int) -> tuple[list[dict[str, Any]], int]:
    """The complete lines after a place, and the place after them."""
    lines: list[dict[str, Any]] = []
    file.seek(start)
    for line in bounded_lines(file):
        if not line.endswith(b"\n"):
            break  # it is being written
        start += len(line)
        with suppress(ValueError, RecursionError):
            value: Any = json.loads(line)
            if isinstance(value, dict):
                lines.append(cast("dict[str, Any]", value))
    return lines, start


def results_csv(folder: RunFolder) -> str:
    """The result file of a job: a CSV table of step, train_loss, valid_loss."""
    by_step: dict[int, dict[str, float]] = {}
    for line in metric_lines(folder.metrics):
        values = numbers(line)
        if "step" in values:
            by_step.setdefault(int(values["step"]), {}).update(values)
    columns = ("loss", "valid/loss")
    rows = [
        ",".join([str(step), *(str(values.get(name, "")) for name in columns)])
        for step, values in sorted(by_step.items())
    ]
    return "\n".join(["step,train_loss,valid_loss", *rows]) + "\n"


def seconds(at: str) -> float:
    """Seconds since 1970 of an ISO time."""
    return datetime.fromisoformat(at).timestamp()
