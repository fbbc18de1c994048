"""New fine-tuning jobs of the OpenAI dialect. Every shape is that of openai 3.54."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from jobs.record.times import now
from jobs.serve import uploads
from jobs.serve.dialect.files import visible_upload
from jobs.serve.dialect.job_now import job_now
from jobs.serve.dialect.names import model_of
from jobs.serve.limits.quotas import room_for_job
from jobs.serve.offers import (
    TuningRequest,
    after,
    fill,
    held_out_per_mille,
    kinds_of,
    offer_for,
)
from jobs.serve.requests import (
    CreateJob,
    PlainJSON,
    Refusal,
    idempotency_key,
    keeper_of,
    quote,
    read_body,
    shares_of,
    writer_of,
)
from jobs.serve.tickets import JOB, Ticket, Upload, id_of_key, new_id
from trainer import tasks
from trainer.config.identity import exp_id
from trainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from jobs.serve.access import Client
    from jobs.serve.keeper import Keeper
    from jobs.serve.offers import Offer


async def create_job(request: Request) -> Response:
    keeper, client = keeper_of(request), writer_of(request)
    body = await read_body(request, CreateJob, keeper.config)
    key = idempotency_key(request)
    async with shares_of(request).turn("create", client.name):
        return PlainJSON(await run_in_threadpool(_create, keeper, client, body, key))


def _create(keeper: Keeper, client: Client, body: CreateJob, key: str | None) -> dict[str, Any]:
    """The new job, or the job that a request with the same key has created before."""
    job_id = new_id(JOB) if key is None else id_of_key(client.name, key)
    folder = keeper.folder.ticket(job_id)
    assert folder is not None, "the id is ours"
    before = folder.read()
    if before is None:
        ticket = new_ticket(keeper, client, body, job_id)
        uploads.refuse_on_full_disk(keeper, 0)
        with room_for_job(keeper, client):
            if not keeper.folder.create(ticket):
                before = folder.read()
    if before is not None and before.request_digest != body.digest():
        text = f"The Idempotency-Key {quote(key)} made {job_id} of another request. Use a new key."
        raise Refusal(409, text, code="idempotency_error")
    keeper.poke()
    job = job_now(keeper, job_id)
    assert job is not None, "its ticket is on the disk"
    return job


def new_ticket(keeper: Keeper, client: Client, body: CreateJob, job_id: str) -> Ticket:
    """The ticket of a request. It is not written. Refusal for what cannot become a job."""
    offer, name = _offer_of(keeper, client, body)
    training = _training_file(keeper, client, body.training_file, "training_file")
    if body.validation_file is not None:
        _training_file(keeper, client, body.validation_file, "validation_file")
    kinds, num_rows = kinds_of(offer), training.num_rows
    # the check of the complete file reports mistakes
    if body.validation_file is None and not training.num_mistakes:
        places = uploads.places_of(keeper, training)
        try:
            limit = held_out_per_mille(offer, places)
        except DataError as error:
            code = "invalid_training_file"
            raise Refusal(400, str(error), param="training_file", code=code) from None
        num_rows -= sum(count for place, count in places.items() if place < limit)
    request = TuningRequest(
        num_rows=max(num_rows, 1),
        # the check of the complete file reports rows of another kind
        kind=training.kind if training.kind in kinds else kinds[0],
        seed=secrets.randbelow(2**31) if body.seed is None else body.seed,
        label=job_id,
        epochs=body.effective_hyperparameters.n_epochs,
        batch=body.effective_hyperparameters.batch_size,
        lr_factor=body.effective_hyperparameters.learning_rate_multiplier,
        beta=body.beta,
    )
    try:
        filled = fill(offer, request)
        tasks.parse(filled.experiment, source=f"model {body.model!r}")
    except ConfigError as error:
        raise Refusal(400, str(error), param="hyperparameters", code="invalid_value") from None
    return Ticket(
        id=job_id,
        created_at=now(),
        owner=client.name,
        model=name,
        begins_with=None if name == body.model else body.model,
        exp_id=exp_id(filled.experiment),
        experiment=filled.experiment,
        request_digest=body.digest(),
        kind=request.kind,
        num_rows=training.num_rows,
        seed=request.seed,
        epochs=filled.epochs,
        steps=filled.steps,
        batch=filled.batch,
        lr_factor=filled.lr_factor,
        method=body.method_name,
        beta=filled.beta,
        training_file=body.training_file,
        validation_file=body.validation_file,
        suffix=body.suffix,
        metadata=body.metadata,
    )


def _offer_of(keeper: Keeper, client: Client, body: CreateJob) -> tuple[Offer, str]:
    """The offer that a request names, as its method trains it, and what it is called there: by its
    name, or by that of a model, or a checkpoint, which an earlier job of this client made of it,
    and with which the new one begins.
    """
    offer = keeper.config.models.get(body.model)
    if offer is not None:
        return _by_method(offer, body.model, body), body.model
    model = model_of(keeper, body.model, client.may_change)
    if model is not None:
        folder = keeper.folder.ticket(model.job["id"])
        ticket = None if folder is None else folder.read()
        offer = None if ticket is None else keeper.config.models.get(ticket.model)
        if ticket is not None and offer is not None:
            offer = _by_method(offer, ticket.model, body)
            run = keeper.folder.base.run(ticket.exp_id).path
            return after(offer, ticket.experiment, run, model.weights), ticket.model
    names = ", ".join(sorted(keeper.config.models))
    text = f"model: got {quote(body.model)}, want one of {names}, or a model that you have tuned."
    raise Refusal(404, text, param="model", code="model_not_found")


def _by_method(offer: Offer, name: str, body: CreateJob) -> Offer:
    try:
        return offer_for(offer, name, body.method_name)
    except ConfigError as error:
        raise Refusal(400, str(error), param="method", code="unsupported_method") from None


def _training_file(keeper: Keeper, client: Client, file_id: str, param: str) -> Upload:
    match = visible_upload(keeper, client, file_id)
    if match is None or not client.may_change(match[1].owner):
        text = f"{param}: there is no file {quote(file_id)} of yours. Upload it first."
        raise Refusal(400, text, param=param, code="file_not_found")
    if match[1].purpose != uploads.FINE_TUNE:
        text = (
            f"{param}: {file_id} has the purpose {quote(match[1].purpose)}, want "
            f"{uploads.FINE_TUNE!r}. Upload the rows with that purpose."
        )
        raise Refusal(400, text, param=param, code="invalid_file_purpose")
    return match[1]
