"""One experiment as `status` shows it, and the times at which it ran."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, cast

from jobs.gres import gpus_of
from jobs.job_state import ACTIVE
from jobs.record.paths import is_there
from trainer.data.formats.json_text import is_too_deep
from trainer.errors import LatheError
from trainer.files.atomic import read_json

if TYPE_CHECKING:
    from jobs.job_state import JobState
    from jobs.record.events import Sent
    from jobs.record.paths import Attempt, RunFolder


@dataclass(frozen=True)
class Start:
    """One start of an attempt. `ended_at` is the last sign of life while it runs, or when it left
    no outcome.
    """

    attempt: int
    number: int  # a scheduler that requeues starts one attempt several times
    began_at: str
    ended_at: str
    host: str | None
    gpus: int  # of all nodes
    code: int | None  # exit code; None: it runs, or was killed without a word

    @property
    def hours(self) -> float:
        """How long it ran."""
        return max(seconds_between(self.began_at, self.ended_at), 0.0) / 3600


@dataclass(frozen=True)
class Row:
    """One experiment as status shows it.

    Times are UTC in ISO 8601, those of the last attempt unless said otherwise.
    """

    exp_id: str
    group: str
    state: JobState
    folder: str
    reason: str | None = None
    step: int | None = None
    total: int | None = None
    # the last value of each: loss, lr, valid/loss
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    eta_s: float | None = None
    host: str | None = None
    backend: str | None = None  # None: run by hand, or never sent
    job_id: str | None = None
    attempt: int = 0
    attempts: int = 0
    preemptions: int = 0  # of all attempts, with those that the scheduler made up for by itself
    gpu_hours: float = 0.0  # of all attempts
    created_at: str | None = None
    submitted_at: str | None = None
    started_at: str | None = None
    ended_at: str | None = None
    # since then its scheduler cannot be reached, and the state may be old
    unseen_since: str | None = None
    unseen_reason: str | None = None
    heartbeat_age_s: float | None = None
    sync_hint: str | None = None  # the command that brings its offline wandb runs to the service
    history: tuple[Sent, ...] = ()
    starts: tuple[Start, ...] = ()
    # of ranks that died or hung, as trainer/files/survival_events.py writes them down
    recoveries: tuple[Mapping[str, Any], ...] = ()
    # for people: what tells it from its siblings, or how the training calls itself
    name: str = ""
    by_hand: bool = False  # nothing was ever submitted: only its own status.json tells of it
    # why the state is "held" and nothing else is known: its folder cannot be read, as `reason` says
    read_error: Literal["transient", "permanent"] | None = None

    @property
    def is_live(self) -> bool:
        """Whether it is on its way or runs. A folder that cannot be read keeps nobody waiting."""
        return self.state in ACTIVE and self.read_error is None


def starts_of(attempt: Attempt) -> list[Start]:
    """The starts of an attempt in order, with their ends, from the wrapper's files."""
    paths = attempt.starts()
    if not paths:
        return []
    job = cast("dict[str, Any]", (read_json(attempt.spec) or {}).get("job") or {})
    if job.get("gres"):
        try:
            gpus_of_node = gpus_of(str(job["gres"]))
        except ValueError:  # what an earlier version had accepted and nobody can read
            gpus_of_node = 0
    else:
        gpus_of_node = int(cast("dict[str, Any]", job.get("resources") or {}).get("gpu", 0))
    gpus: int = gpus_of_node * job.get("nodes", 1)
    began = [read_json(path) or {} for path in paths]
    last_exit = read_json(attempt.exit)
    starts: list[Start] = []
    for k, facts in enumerate(began, 1):
        is_last = k == len(began)
        outcome = None if is_last else read_json(attempt.folder / f"exit-{k}.json")
        if outcome is None and last_exit is not None and last_exit.get("start", len(began)) == k:
            outcome = last_exit
        begin = str(facts.get("at") or "")
        end = str((outcome or {}).get("at") or "")
        if not end:
            # a start that was killed without a word ended before the next one began: no later time
            # is known to be better
            beat = (read_json(attempt.heartbeat) or {}).get("at") if is_last else None
            guess = beat if is_last else began[k].get("at")
            end = str(max(guess or begin, begin))
        host, code = facts.get("host"), (outcome or {}).get("code")
        starts.append(Start(attempt.number, k, begin, end, host, gpus, code))
    return starts


def as_shown(row: Row) -> Row:
    """`row`, if all its values can be shown. ValueError otherwise: the files of a run may hold
    anything, and one odd value must not end the table of all runs.
    """
    texts: dict[str, Any] = {
        name: getattr(row, name) for name in ("reason", "host", "job_id", "created_at", "ended_at")
    }
    texts |= {f"host of start {start.number}": start.host for start in row.starts}
    for name, value in texts.items():
        if not isinstance(value, str | None):
            raise ValueError(f"{name}: got {value!r}, want a text")
    codes: list[Any] = [start.code for start in row.starts]
    if any(type(code) not in (int, type(None)) for code in codes):
        raise ValueError(f"exit codes: got {codes!r}, want whole numbers")
    if not math.isfinite(row.gpu_hours):
        raise ValueError(f"GPU-hours: got {row.gpu_hours}, want a number")
    return row


def experiment_of(folder: RunFolder) -> dict[str, Any] | None:
    """The dictionary of an experiment; None when its folder has none. OSError, or LatheError when
    the file holds no dictionary that can be used.
    """
    values = read_json(folder.exp_dict)
    if values is None and not is_there(folder.exp_dict):
        return None
    if values is None or is_too_deep(values):
        raise LatheError(
            f"{folder.exp_dict}: no JSON object, or one that is nested too deeply. Write it again, "
            "or `reset` the experiment."
        )
    return values


def seconds_between(begin: str, end: str) -> float:
    """Seconds from one ISO time to another; 0 when either is no time."""
    try:
        return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()
    except (ValueError, TypeError):
        return 0.0
