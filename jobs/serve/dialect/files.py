"""Files of the OpenAI dialect. Every shape is that of openai 3.54."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from jobs.errors import reason_for_client
from jobs.serve import uploads
from jobs.serve.dialect.pages import page_of
from jobs.serve.index import PageRequest, may_lag
from jobs.serve.job_view import results_csv, seconds
from jobs.serve.requests import (
    PlainJSON,
    Refusal,
    client_of,
    keeper_of,
    list_object,
    one_of,
    page_query,
    quote,
    writer_of,
)
from jobs.serve.tickets import FILE, JOB, Upload, UploadFolder, is_id
from trainer.errors import LatheError
from trainer.files.atomic import refusals

if TYPE_CHECKING:
    from jobs.serve.access import Client
    from jobs.serve.keeper import Keeper


async def create_file(request: Request) -> Response:
    client = writer_of(request)
    upload = await uploads.receive(request, keeper_of(request), client)
    return PlainJSON(uploads.file_object(upload))


def list_files(request: Request) -> Response:
    keeper, query = keeper_of(request), page_query(request, usual=10_000, most=10_000)
    order = one_of(request, "order", ("asc", "desc"), "desc")
    cut = PageRequest(client_of(request).owner, query.after, query.limit)
    purpose = request.query_params.get("purpose")
    page = page_of(
        lambda: keeper.index.uploads(cut, purpose, is_rising=order == "asc"), query.after
    )
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


ROUTES = [
    Route("/v1/files", create_file, methods=["POST"]),
    Route("/v1/files", list_files),
    Route("/v1/files/{file_id}", retrieve_file),
    Route("/v1/files/{file_id}", delete_file, methods=["DELETE"]),
    Route("/v1/files/{file_id}/content", file_content),
]
