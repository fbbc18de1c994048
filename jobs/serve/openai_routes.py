"""The OpenAI dialect: files, fine-tuning jobs, models. Every shape is that of openai 3.54."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from jobs.errors import reason_for_client
from jobs.record.times import now
from jobs.serve import uploads
from jobs.serve.index import Page, PageRequest, may_lag
from jobs.serve.job_view import FINAL, checkpoints, results_csv, seconds
from jobs.serve.limits.quotas import room_for_job
from jobs.serve.offers import Offer, TuningRequest, after, fill, held_out_per_mille, kinds_of
from jobs.serve.requests import (
    CreateJob,
    PlainJSON,
    Refusal,
    client_of,
    keeper_of,
    list_object,
    metadata_query,
    one_of,
    page_query,
    quote,
    read_body,
    shares_of,
    tuned_job,
    writer_of,
)
from jobs.serve.tickets import (
    FILE,
    JOB,
    Ticket,
    TicketFolder,
    Upload,
    UploadFolder,
    WishKind,
    id_of_key,
    is_id,
    new_id,
)
from trainer import tasks
from trainer.config.identity import exp_id
from trainer.errors import ConfigError, DataError, LatheError
from trainer.files.atomic import refusals

if TYPE_CHECKING:
    from jobs.serve.access import Client
    from jobs.serve.keeper import Keeper

MAX_KEY = 255  # letters of an Idempotency-Key
PAST = {"pause": "paused", "resume": "resumed", "cancel": "cancelled"}


# Files
# --------------------------------------------------------------------------------------------------


async def create_file(request: Request) -> Response:
    client = writer_of(request)
    upload = await uploads.receive(request, keeper_of(request), client)
    return PlainJSON(uploads.file_object(upload))


def list_files(request: Request) -> Response:
    keeper, query = keeper_of(request), page_query(request, usual=10_000, most=10_000)
    order = one_of(request, "order", ("asc", "desc"), "desc")
    cut = PageRequest(client_of(request).owner, query.after, query.limit)
    purpose = request.query_params.get("purpose")
    page = _page(lambda: keeper.index.uploads(cut, purpose, is_rising=order == "asc"), query.after)
    data = [uploads.file_object(Upload.model_validate(body)) for body in page.data]
    return PlainJSON(list_object(data, has_more=page.has_more))


def retrieve_file(request: Request) -> Response:
    result = _result_file(request)
    if result is not None:
        return PlainJSON(result)
    return PlainJSON(uploads.file_object(_upload(request)[1]))


def file_content(request: Request) -> Response:
    """The bytes of a file: only for its owner and for admins."""
    if _result_file(request) is not None:
        return PlainTextResponse(_results(request), media_type="text/csv")
    folder, upload = _upload(request)
    client = client_of(request)
    if not client.may_change(upload.owner):
        raise Refusal(403, f"{upload.id} belongs to another token: its content is not shown.")
    if not folder.content.is_file():
        raise Refusal(409, f"The content of {upload.id} cannot be read. Upload the file again.")
    headers = {"content-disposition": "attachment"}
    return FileResponse(folder.content, media_type="application/octet-stream", headers=headers)


def delete_file(request: Request) -> Response:
    client = writer_of(request)
    folder, upload = _upload(request)
    if not client.may_change(upload.owner):
        raise Refusal(403, f"{upload.id} belongs to another token.")
    with refusals(folder.path):
        uploads.remove(folder)
    with may_lag():
        keeper_of(request).index.drop_uploads([upload.id])
    return PlainJSON({"id": upload.id, "object": "file", "deleted": True})


def _upload(request: Request) -> tuple[UploadFolder, Upload]:
    """The file in the request's path. Refusal when this client sees no such file."""
    keeper, client = keeper_of(request), client_of(request)
    file_id = request.path_params["file_id"]
    match = visible_upload(keeper, client, file_id)
    match = match or _unreadable_upload(keeper, client, file_id)
    if match is None:
        raise Refusal(404, f"No such file: {quote(file_id)}.", param="id")
    return match


def visible_upload(
    keeper: Keeper, client: Client, file_id: str
) -> tuple[UploadFolder, Upload] | None:
    """A file that can be read, if this client sees it; None for any other id."""
    folder = keeper.folder.upload(file_id)
    try:
        upload = folder.read() if folder is not None else None
    except (OSError, LatheError):
        return None
    if folder is None or upload is None or not client.sees(upload.owner):
        return None
    return folder, upload


def _unreadable_upload(
    keeper: Keeper, client: Client, file_id: str
) -> tuple[UploadFolder, Upload] | None:
    """A file whose facts cannot be read, with what the index has of it, if this client sees it."""
    folder, body = keeper.folder.upload(file_id), keeper.index.upload(file_id)
    if folder is None or body is None or not client.sees(body["owner"]):
        return None
    try:
        is_gone = folder.read() is None
    except (OSError, LatheError) as error:
        reason = reason_for_client(error, folder.path, keeper.folder.base.path)
        return folder, uploads.unreadable(file_id, reason, seconds(body["created_at"]), body)
    return None if is_gone else (folder, Upload.model_validate(body))


def _result_file(request: Request) -> dict[str, Any] | None:
    """The file of a job's scores, which is computed on each reading; None for other ids."""
    file_id = request.path_params["file_id"]
    if not is_id(file_id, FILE):
        return None
    job = keeper_of(request).index.job(JOB + file_id.removeprefix(FILE))
    if job is None or file_id not in job["result_files"]:
        return None
    if not client_of(request).sees(job["lathe"]["owner"]):
        return None
    return {
        "id": file_id,
        "object": "file",
        "bytes": len(_results(request)),
        "created_at": job["finished_at"],
        "filename": "step_metrics.csv",
        "purpose": "fine-tune-results",
        "status": "processed",
        "status_details": None,
        "expires_at": None,
    }


def _results(request: Request) -> str:
    keeper = keeper_of(request)
    job = keeper.index.job(JOB + request.path_params["file_id"].removeprefix(FILE))
    assert job is not None, "found a moment ago"
    return results_csv(keeper.folder.base.run(job["lathe"]["exp_id"]))


def _page(look: Any, after: str | None) -> Page:
    try:
        return look()
    except KeyError:
        raise Refusal(400, f"after: there is no {quote(after)} here.", param="after") from None


# Jobs
# --------------------------------------------------------------------------------------------------


async def create_job(request: Request) -> Response:
    keeper, client = keeper_of(request), writer_of(request)
    body = await read_body(request, CreateJob, keeper.config)
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= MAX_KEY:
        raise Refusal(400, f"Idempotency-Key: want 1 to {MAX_KEY} letters.")
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
    job = _job_now(keeper, job_id)
    assert job is not None, "its ticket is on the disk"
    return job


def _job_now(keeper: Keeper, job_id: str) -> dict[str, Any] | None:
    """A job as its files are now; None for an unknown id. An index that cannot be written is no
    reason to say that nothing was done.
    """
    job = None
    with may_lag():
        job = keeper.read_job(job_id)
    if job is not None and not keeper.reader.is_behind(job_id):
        return job
    try:
        facts = keeper.reader.facts(job_id, None)
    except Exception:  # of any kind: the job cannot be read, and the index says so
        if job is None:
            raise
        facts = None
    if facts is None:
        return job
    rows = keeper.reader.rows([facts.ticket.exp_id])
    facts = replace(facts, row=rows.get(facts.ticket.exp_id))
    return keeper.reader.job_body(facts)


def new_ticket(keeper: Keeper, client: Client, body: CreateJob, job_id: str) -> Ticket:
    """The ticket of a request. It is not written. Refusal for what cannot become a job."""
    offer, name = _offer_of(keeper, client, body.model)
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
        training_file=body.training_file,
        validation_file=body.validation_file,
        suffix=body.suffix,
        metadata=body.metadata,
    )


def _offer_of(keeper: Keeper, client: Client, model: str) -> tuple[Offer, str]:
    """The offer that a request names, and what it is called there: by its name, or by that of a
    model which an earlier job of this client made of it, and with which the new one begins.
    """
    offer = keeper.config.models.get(model)
    if offer is not None:
        return offer, model
    job = keeper.index.job_of_model(model)
    if job is not None and client.may_change(job["lathe"]["owner"]):
        folder = keeper.folder.ticket(job["id"])
        ticket = None if folder is None else folder.read()
        offer = None if ticket is None else keeper.config.models.get(ticket.model)
        if ticket is not None and offer is not None:
            final = keeper.folder.base.run(ticket.exp_id).path / "final"
            return after(offer, ticket.experiment, final), ticket.model
    names = ", ".join(sorted(keeper.config.models))
    text = f"model: got {quote(model)}, want one of {names}, or a model that you have tuned."
    raise Refusal(404, text, param="model", code="model_not_found")


def _training_file(keeper: Keeper, client: Client, file_id: str, param: str) -> Upload:
    match = visible_upload(keeper, client, file_id)
    if match is None or not client.may_change(match[1].owner):
        text = f"{param}: there is no file {quote(file_id)} of yours. Upload it first."
        raise Refusal(400, text, param=param, code="file_not_found")
    return match[1]


def list_jobs(request: Request) -> Response:
    keeper, query = keeper_of(request), page_query(request, usual=20, most=100)
    metadata, has_none = metadata_query(request)
    cut = PageRequest(client_of(request).owner, query.after, query.limit)
    page = _page(lambda: keeper.index.jobs(cut, metadata, has_none=has_none), query.after)
    return PlainJSON(list_object(page.data, has_more=page.has_more))


def retrieve_job(request: Request) -> Response:
    return PlainJSON(visible_job(request))


def visible_job(request: Request) -> dict[str, Any]:
    """The job in the request's path. Refusal when this client sees no such job."""
    keeper, job_id = keeper_of(request), request.path_params["job_id"]
    job = keeper.index.job(job_id) if is_id(job_id, JOB) else None
    if job is None and is_id(job_id, JOB):  # another server may have just created it
        job = _job_now(keeper, job_id)
    if job is None or not client_of(request).sees(job["lathe"]["owner"]):
        raise Refusal(404, f"No such fine-tuning job: {quote(job_id)}.", param="id")
    return job


def list_events(request: Request) -> Response:
    keeper, query = keeper_of(request), page_query(request, usual=20, most=1000)
    job = visible_job(request)
    cut = PageRequest(None, query.after, query.limit)
    page = _page(lambda: keeper.index.events(job["id"], cut), query.after)
    return PlainJSON(list_object(page.data, has_more=page.has_more))


def list_checkpoints(request: Request) -> Response:
    keeper, query = keeper_of(request), page_query(request, usual=10, most=100)
    folder = _ticket_folder(request)
    try:
        ticket = folder.read()
    except (OSError, LatheError) as error:
        base = keeper.folder.base.path
        raise Refusal(409, reason_for_client(error, folder.path, base)) from None
    assert ticket is not None, "its job was found"
    run = keeper.folder.base.run(ticket.exp_id)
    objects = checkpoints(ticket, run, keeper.config.organization)
    ids = [one["id"] for one in objects]
    if query.after is not None and query.after not in ids:
        raise Refusal(400, f"after: there is no {quote(query.after)} here.", param="after")
    start = ids.index(query.after) + 1 if query.after is not None else 0
    data, rest = objects[start : start + query.limit], objects[start + query.limit :]
    return PlainJSON(list_object(data, has_more=bool(rest)))


def cancel_job(request: Request) -> Response:
    return _wish(request, "cancel")


def pause_job(request: Request) -> Response:
    return _wish(request, "pause")


def resume_job(request: Request) -> Response:
    return _wish(request, "resume")


def _wish(request: Request, wish: WishKind) -> Response:
    """Add a wish about a job that has not ended, unless it is already fulfilled."""
    client, keeper = writer_of(request), keeper_of(request)
    folder, job_id = _ticket_folder(request), request.path_params["job_id"]
    job = _job_now(keeper, job_id)
    assert job is not None, "found a moment ago"
    if not client.may_change(job["lathe"]["owner"]):
        raise Refusal(403, f"{job_id} belongs to another token.")
    if job["status"] in FINAL:
        text = f"{job_id} has {job['status']}: it can no longer be {PAST[wish]}."
        raise Refusal(400, text, code="job_has_ended")
    is_paused = job["lathe"]["is_paused"]
    if wish == "resume" and not is_paused:
        raise Refusal(400, f"{job_id} is not paused: it is {job['status']}.", code="not_paused")
    if not (wish == "pause" and is_paused):
        folder.add_wish(wish, client.name)
    keeper.poke()
    return PlainJSON(_job_now(keeper, job_id))


def _ticket_folder(request: Request) -> TicketFolder:
    folder = keeper_of(request).folder.ticket(visible_job(request)["id"])
    assert folder is not None, "a job has a ticket"
    return folder


# Models
# --------------------------------------------------------------------------------------------------


def list_models(request: Request) -> Response:
    keeper, client = keeper_of(request), client_of(request)
    bases = [_model(name, 0, "system") for name in sorted(keeper.config.models)]
    tuned = [_tuned_model(job) for job in keeper.index.tuned_models(client.owner)]
    return PlainJSON({"object": "list", "data": bases + tuned})


def retrieve_model(request: Request) -> Response:
    name = request.path_params["model"]
    if name in keeper_of(request).config.models:
        return PlainJSON(_model(name, 0, "system"))
    return PlainJSON(_tuned_model(tuned_job(request, name)))


def delete_model(request: Request) -> Response:
    """Move a tuned model into deleted/, from where `lathe-jobs gc` removes it."""
    client, keeper = writer_of(request), keeper_of(request)
    name = request.path_params["model"]
    if name in keeper.config.models:
        raise Refusal(403, f"{name} is offered by the service: it cannot be deleted.")
    job = tuned_job(request, name)
    if not client.may_change(job["lathe"]["owner"]):
        raise Refusal(403, f"{name} belongs to another token.")
    folder = keeper.folder.ticket(job["id"])
    assert folder is not None, "a job has a ticket"
    run, base = keeper.folder.base.run(job["lathe"]["exp_id"]), keeper.folder.base
    aside = base.deleted_folder / f"{run.path.name}-{time.strftime('%Y%m%d-%H%M%S')}-model"
    with refusals(aside):
        aside.mkdir(parents=True, exist_ok=True)
        for part in ("final", "best"):
            if (run.path / part).exists():
                os.rename(run.path / part, aside / part)
    # last: a disk that refuses has deleted nothing, and the same request may come again
    folder.add_wish("delete", client.name)
    _job_now(keeper, job["id"])
    return PlainJSON({"id": name, "object": "model", "deleted": True})


def _tuned_model(job: dict[str, Any]) -> dict[str, Any]:
    return _model(job["fine_tuned_model"], job["finished_at"], job["lathe"]["owner"])


def _model(name: str, created: int, owner: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner}


JOBS = "/v1/fine_tuning/jobs"
ROUTES = [
    Route("/v1/files", create_file, methods=["POST"]),
    Route("/v1/files", list_files),
    Route("/v1/files/{file_id}", retrieve_file),
    Route("/v1/files/{file_id}", delete_file, methods=["DELETE"]),
    Route("/v1/files/{file_id}/content", file_content),
    Route(JOBS, create_job, methods=["POST"]),
    Route(JOBS, list_jobs),
    Route(f"{JOBS}/{{job_id}}", retrieve_job),
    Route(f"{JOBS}/{{job_id}}/cancel", cancel_job, methods=["POST"]),
    Route(f"{JOBS}/{{job_id}}/pause", pause_job, methods=["POST"]),
    Route(f"{JOBS}/{{job_id}}/resume", resume_job, methods=["POST"]),
    Route(f"{JOBS}/{{job_id}}/events", list_events),
    Route(f"{JOBS}/{{job_id}}/checkpoints", list_checkpoints),
    Route("/v1/models", list_models),
    Route("/v1/models/{model}", retrieve_model),
    Route("/v1/models/{model}", delete_model, methods=["DELETE"]),
]
