"""/v1/batches of the OpenAI dialect. Every shape is that of openai 3.54, its type Batch."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, cast

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.record.times import now
from jobs.serve import uploads
from jobs.serve.batches.folder import (
    BATCH,
    Batch,
    BatchFolders,
    BatchMistake,
    BatchState,
    Endpoint,
)
from jobs.serve.batches.runner import BatchRunner
from jobs.serve.dialect.files import visible_upload
from jobs.serve.dialect.pages import cut
from jobs.serve.job_view import CANNOT_RUN, seconds
from jobs.serve.requests import (
    Body,
    Metadata,
    PlainJSON,
    Refusal,
    client_of,
    idempotency_key,
    keeper_of,
    list_object,
    page_query,
    quote,
    read_body,
    shares_of,
    writer_of,
)
from jobs.serve.tickets import UploadFolder, id_of_key, new_id

WINDOW = timedelta(hours=24)


class CreateBatch(Body):
    """The request for a batch. Source: openai 3.54, its type BatchCreateParams."""

    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


async def create_batch(request: Request) -> Response:
    """Make a batch of an uploaded file, which is checked and answered in the background."""
    keeper, client = keeper_of(request), writer_of(request)
    if not keeper.config.batch_models:
        text = "batches: this service answers none (batch_models=0). Send the requests one by one."
        raise Refusal(400, text, code="unsupported")
    body = await read_body(request, CreateBatch, keeper.config)
    key = idempotency_key(request)
    async with shares_of(request).turn("create", client.name):
        batch = await run_in_threadpool(_create, request, body, key)
    runner_of(request).poke()
    return PlainJSON(batch)


def _create(request: Request, body: CreateBatch, key: str | None) -> dict[str, Any]:
    """The new batch, or the one that a request with the same key has made before."""
    client, batches = writer_of(request), batches_of(request)
    batch_id = new_id(BATCH) if key is None else id_of_key(client.name, key, BATCH)
    state = batches.state(batch_id)
    if state is None:
        batch, content = _new_batch(request, body, batch_id)
        if batches.create(batch, content.content):
            return batch_object(BatchState(batch, None))
        state = batches.state(batch_id)  # another server has just made it
        assert state is not None, "it is there"
    before = state.batch.model_dump()
    if any(before[name] != value for name, value in body.model_dump().items()):
        text = f"The Idempotency-Key {quote(key)} made {batch_id} of another request."
        raise Refusal(409, f"{text} Use a new key.", code="idempotency_error")
    return batch_object(state)


def _new_batch(request: Request, body: CreateBatch, batch_id: str) -> tuple[Batch, UploadFolder]:
    """The batch of a request, which is not written, and the file of its lines. Refusal."""
    keeper, client, batches = keeper_of(request), writer_of(request), batches_of(request)
    content = _content(request, body.input_file_id)
    most = keeper.config.batches_at_once
    open_ones = sum(batch.owner == client.name for batch, _ in batches.open())
    if open_ones >= most:
        text = f"{open_ones} batches of {client.name} have not ended, at most {most} may. Wait."
        raise Refusal(429, text, code="rate_limit_exceeded", retry_after_s=60)
    uploads.refuse_on_full_disk(keeper, 0)
    created = now()
    batch = Batch(
        id=batch_id,
        created_at=created,
        expires_at=(datetime.fromisoformat(created) + WINDOW).isoformat(timespec="milliseconds"),
        owner=client.name,
        role="admin" if client.is_operator else "run",
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        input_file_id=body.input_file_id,
        metadata=body.metadata,
    )
    return batch, content


def _content(request: Request, file_id: str) -> UploadFolder:
    """The file of a batch. Refusal for one of somebody else, of another purpose, or too large."""
    keeper, client = keeper_of(request), writer_of(request)
    match = visible_upload(keeper, client, file_id)
    if match is None or not client.may_change(match[1].owner):
        text = f"input_file_id: there is no file {quote(file_id)} of yours. Upload it first."
        raise Refusal(400, text, param="input_file_id", code="file_not_found")
    folder, upload = match
    if upload.purpose != uploads.BATCH:
        text = f"input_file_id: {file_id} has the purpose {quote(upload.purpose)}, want 'batch'."
        text += " Upload the requests with that purpose."
        raise Refusal(400, text, param="input_file_id", code="invalid_file_purpose")
    if upload.bytes > keeper.config.batch_bytes:
        text = f"input_file_id: {upload.bytes} bytes, at most {keeper.config.batch_bytes} are"
        text += " allowed (batch_bytes). Make several batches."
        raise Refusal(400, text, param="input_file_id", code="file_too_large")
    return folder


def retrieve_batch(request: Request) -> Response:
    """A batch as it is now."""
    return PlainJSON(batch_object(_state(request)))


def list_batches(request: Request) -> Response:
    """The batches that the client sees, the newest first."""
    query, client = page_query(request, usual=20, most=100), client_of(request)
    batches = batches_of(request)
    states = [state for name in batches.ids() if (state := batches.state(name)) is not None]
    own = [state for state in states if client.sees(state.batch.owner)]
    own.sort(key=lambda state: (state.batch.created_at, state.batch.id), reverse=True)
    page = cut([batch_object(state) for state in own], query)
    return PlainJSON(list_object(page.data, has_more=page.has_more))


def cancel_batch(request: Request) -> Response:
    """Cancel a batch: what is answered stays."""
    client, state = writer_of(request), _state(request)
    name = state.batch.id
    if not client.may_change(state.batch.owner):
        raise Refusal(403, f"{name} belongs to another token.")
    if state.end is not None:
        text = f"{name} has {state.end.status}: it can no longer be cancelled."
        raise Refusal(400, text, code="batch_has_ended")
    folder = batches_of(request).folder(name)
    assert folder is not None, "its state was read"
    folder.cancel(client.name)
    return PlainJSON(batch_object(_state(request)))


def _state(request: Request) -> BatchState:
    """The batch in the request's path. Refusal when this client sees no such batch."""
    batch_id = request.path_params["batch_id"]
    state = batches_of(request).state(batch_id)
    if state is None or not client_of(request).sees(state.batch.owner):
        raise Refusal(404, f"No such batch: {quote(batch_id)}.", param="id")
    return state


def batch_object(state: BatchState) -> dict[str, Any]:
    """The batch in the format of the OpenAI API."""
    batch, check, end, wish = state.batch, state.check, state.end, state.wish
    status = "validating" if check is None else "in_progress"
    if end is not None:
        status = end.status
    elif state.trouble is not None and state.trouble.is_final:
        status = "failed"
    elif wish is not None:
        status = "cancelling"
    ended_at = None if end is None else int(seconds(end.at))
    counts = state.counts
    checked_at = None if check is None or check.mistakes else int(seconds(check.at))
    errors = None
    if mistakes := _mistakes(state):
        data = [one.model_dump(mode="json") for one in mistakes]
        errors = {"object": "list", "data": data}
    total = 0 if check is None or check.mistakes else check.total
    is_final = status in ("completed", "expired", "cancelled")
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": None if check is None else check.model,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": status,
        "output_file_id": None if end is None else end.output_file_id,
        "error_file_id": None if end is None else end.error_file_id,
        "created_at": int(seconds(batch.created_at)),
        "in_progress_at": checked_at,
        "expires_at": int(seconds(batch.expires_at)),
        "finalizing_at": ended_at if is_final else None,
        "completed_at": ended_at if status == "completed" else None,
        "failed_at": ended_at if status == "failed" else None,
        "expired_at": ended_at if status == "expired" else None,
        "cancelling_at": None if wish is None else int(seconds(wish.at)),
        "cancelled_at": ended_at if status == "cancelled" else None,
        "request_counts": {"total": total, "completed": counts.completed, "failed": counts.failed},
        "metadata": batch.metadata,
    }


def _mistakes(state: BatchState) -> list[BatchMistake]:
    """What is wrong with a batch: with its lines, or why it could not go on."""
    reasons = [None if state.end is None else state.end.reason]
    reasons.append(None if state.trouble is None else state.trouble.reason)
    mistakes = [] if state.check is None else state.check.mistakes
    cannot_run = [BatchMistake(code=CANNOT_RUN, message=reason) for reason in reasons if reason]
    return [*mistakes, *cannot_run]


def batches_of(request: Request) -> BatchFolders:
    """The batches of the server that received the request."""
    return cast("BatchFolders", request.app.state.batches)


def runner_of(request: Request) -> BatchRunner:
    """What answers the batches of the server that received the request."""
    return cast("BatchRunner", request.app.state.batch_runner)


ROUTES = [
    Route("/v1/batches", create_batch, methods=["POST"]),
    Route("/v1/batches", list_batches),
    Route("/v1/batches/{batch_id}", retrieve_batch),
    Route("/v1/batches/{batch_id}/cancel", cancel_batch, methods=["POST"]),
]
