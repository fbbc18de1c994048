"""Models of the OpenAI dialect: the offered ones, and those that jobs have tuned."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.serve.dialect.job_now import job_now
from jobs.serve.dialect.names import CHECKPOINT, NamedModel, named_model
from jobs.serve.job_view import FINAL
from jobs.serve.requests import PlainJSON, Refusal, client_of, keeper_of, quote, writer_of
from trainer.files.atomic import refusals

if TYPE_CHECKING:
    from jobs.serve.keeper import Keeper


def list_models(request: Request) -> Response:
    keeper, client = keeper_of(request), client_of(request)
    bases = [_model(name, 0, "system") for name in sorted(keeper.config.models)]
    jobs = keeper.index.tuned_models(client.owner)
    tuned = [_tuned_model(NamedModel(job), job["fine_tuned_model"]) for job in jobs]
    return PlainJSON({"object": "list", "data": bases + tuned})


def retrieve_model(request: Request) -> Response:
    name = request.path_params["model"]
    if name in keeper_of(request).config.models:
        return PlainJSON(_model(name, 0, "system"))
    return PlainJSON(_tuned_model(named_model(request, name), name))


def delete_model(request: Request) -> Response:
    """Move a tuned model into deleted/, from where `lathe-jobs gc` removes it."""
    client, keeper = writer_of(request), keeper_of(request)
    name = request.path_params["model"]
    if name in keeper.config.models:
        raise Refusal(403, f"{name} is offered by the service: it cannot be deleted.")
    model = named_model(request, name)
    job = model.job
    if not client.may_change(job["lathe"]["owner"]):
        raise Refusal(403, f"{name} belongs to another token.")
    if model.step is not None:
        tuned = name.rpartition(CHECKPOINT)[0]
        text = f"{name} is a checkpoint, from which its job may go on. Delete {tuned}, with which"
        raise Refusal(400, f"{text} its checkpoints are no longer listed.", param="model")
    if job["lathe"].get("driven_by") is not None:
        run = job["lathe"]["exp_id"]
        text = f"{name} was made by a driven run. Delete that: DELETE /lathe/v1/runs/{run}."
        raise Refusal(409, text, param="model", code="model_of_driven_run")
    later = jobs_after(keeper, name)
    if later:
        text = f"{name}: {quote(', '.join(later))} begin with it and have not ended. Cancel them."
        raise Refusal(409, text, param="model", code="model_in_use")
    folder = keeper.folder.ticket(job["id"])
    assert folder is not None, "a job has a ticket"
    run, base = keeper.folder.base.run(job["lathe"]["exp_id"]), keeper.folder.base
    aside = base.deleted_folder / f"{run.path.name}-{time.strftime('%Y%m%d-%H%M%S')}-model"
    with refusals(aside):
        aside.mkdir(parents=True, exist_ok=True)
        steps = [path.name for path in run.path.glob("step-*") if path.is_dir()]
        for part in ("final", "best", *steps):
            if (run.path / part).exists():
                os.rename(run.path / part, aside / part)
    # last: a disk that refuses has deleted nothing, and the same request may come again
    folder.add_wish("delete", client.name)
    job_now(keeper, job["id"])
    return PlainJSON({"id": name, "object": "model", "deleted": True})


def jobs_after(keeper: Keeper, name: str) -> list[str]:
    """Ids of the jobs that begin with a model, or with a checkpoint of its job, and have not ended.
    They read it whenever they start, or go on.
    """
    jobs = [keeper.index.job(one) for one in sorted(keeper.index.open_jobs())]
    return [
        job["id"]
        for job in jobs
        if job is not None
        and job["status"] not in FINAL
        and job["model"].partition(CHECKPOINT)[0] == name
    ]


def _tuned_model(model: NamedModel, name: str) -> dict[str, Any]:
    job = model.job
    created = job["finished_at"] if model.step is None else job["created_at"]
    return _model(name, created, job["lathe"]["owner"])


def _model(name: str, created: int, owner: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner}


ROUTES = [
    Route("/v1/models", list_models),
    Route("/v1/models/{model}", retrieve_model),
    Route("/v1/models/{model}", delete_model, methods=["DELETE"]),
]
