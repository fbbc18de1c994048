"""What names of models stand for: an offer, a tuned model, or a checkpoint of its job.

A tuned model is called as its job says (`ft:...`), and a saved step of the job the same with
`:ckpt-step-N` behind it, as OpenAI does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from jobs.record.paths import is_there
from jobs.serve.dialect.saved_steps import exportable_steps
from jobs.serve.job_view import GATE_REFUSED
from jobs.serve.requests import Refusal, client_of, keeper_of, quote
from jobs.serve.uploads import refuse_on_full_disk

if TYPE_CHECKING:
    from jobs.serve.keeper import Keeper

CHECKPOINT = ":ckpt-step-"
_STEP = re.compile(r"[1-9]\d{0,11}")


@dataclass(frozen=True)
class NamedModel:
    """A model that a job has made. job: in the format of the OpenAI API. step: of a checkpoint;
    None: the model of its last step.
    """

    job: dict[str, Any]
    step: int | None = None

    @property
    def exp_id(self) -> str:
        return self.job["lathe"]["exp_id"]

    @property
    def weights(self) -> str:
        """The folder of the model in its run folder."""
        return "final" if self.step is None else f"step-{self.step}"


def is_refused(job: Mapping[str, Any]) -> bool:
    """Whether a gate kept the model of a job back: then no saved step of it is a model either."""
    return job["error"] is not None and job["error"]["code"] == GATE_REFUSED


def model_of(keeper: Keeper, name: str, sees: Callable[[str], bool]) -> NamedModel | None:
    """The model of a name; None when there is none. sees: whether the jobs of an owner count."""
    tuned, sign, step = name.rpartition(CHECKPOINT)
    if not sign:
        job = keeper.index.job_of_model(name)
        return NamedModel(job) if job is not None and sees(job["lathe"]["owner"]) else None
    job = keeper.index.job_of_model(tuned, has_ended=False)
    if job is None or not sees(job["lathe"]["owner"]) or not _STEP.fullmatch(step):
        return None
    if is_refused(job):
        return None
    run = keeper.folder.base.run(job["lathe"]["exp_id"])
    return NamedModel(job, int(step)) if int(step) in exportable_steps(run) else None


def named_model(request: Request, name: str) -> NamedModel:
    """The model of a name, if this client sees it. Refusal for any other name."""
    model = model_of(keeper_of(request), name, client_of(request).sees)
    if model is None:
        kind = "checkpoint" if CHECKPOINT in name else "model"
        text = f"The {kind} {quote(name)} does not exist, or is not yours."
        if kind == "checkpoint":
            text += " `fine_tuning.jobs.checkpoints.list` names those that are on the disk."
        elif name in keeper_of(request).config.models:
            text = f"{name!r} is tuned by jobs, and answers nothing itself. Ask the model of a job."
        raise Refusal(404, text, param="model", code="model_not_found")
    return model


def run_of(request: Request, name: str) -> tuple[Path, str]:
    """The run folder of a named model, and which of its models it is (NamedModel.weights). Refusal
    where the disk has no room for a model that is yet to be made of a checkpoint.
    """
    keeper, model = keeper_of(request), named_model(request, name)
    run = keeper.folder.base.run(model.exp_id).path
    if model.step is not None and not is_there(run / model.weights):
        refuse_on_full_disk(keeper, 0)
    return run, model.weights
