"""Whether the model that an experiment begins with is there, where that model is another
experiment of the same folder.

The training needs that one's final/ folder, which comes into being as a whole. Standard library
only, for the runner of the local queue.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jobs.errors import reason_of
from jobs.job_state import ENDED_BADLY, STATES
from jobs.record import events as record
from jobs.record.paths import BaseFolder, RunFolder
from jobs.record.state_table import end_of
from trainer.config.identity import base_id
from trainer.config.origin.continues import MANIFEST
from trainer.errors import ConfigError, LatheError
from trainer.files.atomic import read_json
from trainer.metrics.judge_record import refusals_of

if TYPE_CHECKING:
    from jobs.job_state import JobState


def has_model(folder: Path, model: str = "final") -> bool:
    """Whether the run in `folder` has left the model that others begin with, whole or as adapters.
    False where it cannot be read. model: "final", or "step-N", made of a saved step.
    """
    names = ("config.json", "adapter_config.json")
    return any(os.path.isfile(folder / model / name) for name in names)


def has_needed(folder: Path, values: Mapping[str, Any]) -> bool:
    """Whether the run in `folder` has left what an experiment begins with: the saved step that it
    goes on from, or a model.
    """
    continues, base = values.get("continues"), values.get("base")
    if isinstance(continues, dict):
        step = cast("dict[str, Any]", continues).get("step")
        return os.path.isfile(folder / "checkpoints" / f"step-{step}" / MANIFEST)
    model = cast("dict[str, Any]", base).get("model") if isinstance(base, dict) else None
    if isinstance(model, str) and model.startswith("step-"):
        return has_model(folder, model)
    return has_model(folder)


def base_of(folder: RunFolder, values: Mapping[str, Any]) -> RunFolder | None:
    """The run that an experiment begins with; None when it begins with something else."""
    name = base_id(values)
    return None if name is None else BaseFolder(folder.path.parent).run(name)


def why_it_waits(folder: RunFolder, values: Mapping[str, Any]) -> str | None:
    """A sentence about the base that has no model yet, and what brings one; None when the
    experiment may begin, or its dictionary is none.
    """
    try:
        base = base_of(folder, values)
    except ConfigError:
        return None
    return None if base is None or has_needed(base.path, values) else sentence(base)[0]


def sentence(base: RunFolder) -> tuple[str, bool]:
    """What is awaited of a base that has no model yet, and whether a person must act for it."""
    name = base.path.name
    try:
        state, reason = _state(base)
    except (OSError, KeyError, TypeError, ValueError, LatheError) as error:
        return f"the folder of its base {name} cannot be read: {reason_of(error, base.path)}", True
    if state is None:
        return f"its base {name} was never run. Submit that one's group", True
    if state in ENDED_BADLY:
        because = f": {reason}" if reason else ""
        return f"its base {name} is {state}{because}. `retry {name}` first", True
    refusals = refusals_of(base.path) if state == "succeeded" else []
    if refusals:
        because = "; ".join(refusals)
        return f"the gate of its base {name} kept its model back: {because}. Name another", True
    if state == "succeeded":
        return f"its base {name} has succeeded, but left no model in final/. `reset` it", True
    if state == "paused":
        how = (
            reason
            if reason and reason.startswith("paused")
            else f"paused: {reason or 'by --until'}"
        )
        return f"its base {name} is {how}", True
    return f"it waits until its base {name}, now {state}, has succeeded", False


def _state(base: RunFolder) -> tuple[JobState | None, str | None]:
    """State and reason of a run, from its own files alone; (None, None) without any. OSError,
    KeyError, TypeError, ValueError or LatheError where they cannot be read.
    """
    job = record.read(base)
    if job is None or job.last is None:
        status = read_json(base.status) or {}
        state = status.get("state")
        own: JobState | None = state if state in STATES else None
        return ("pending" if job is not None and own is None else own), status.get("error")
    ended = read_json(base.attempt(job.last.number).exit)
    if ended is None:
        return job.last.state, job.last.reason
    end = end_of(ended.get("code"), ended.get("kind"))
    if end != "succeeded" and job.last.is_cancelled:
        why = job.last.end_wanted_for
        return ("cancelled" if why is None else "paused"), why
    return ("failed" if end == "bad input" else end), ended.get("reason")
