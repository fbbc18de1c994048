"""Fine-tuning jobs of the OpenAI dialect: listed, shown, paused, cancelled."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.serve.dialect.job_now import job_now
from jobs.serve.dialect.new_jobs import create_job
from jobs.serve.dialect.pages import page_of
from jobs.serve.index import PageRequest
from jobs.serve.job_view import FINAL
from jobs.serve.requests import (
    PlainJSON,
    Refusal,
    client_of,
    keeper_of,
    list_object,
    metadata_query,
    page_query,
    quote,
    writer_of,
)
from jobs.serve.tickets import JOB, TicketFolder, WishKind, is_id

JOBS = "/v1/fine_tuning/jobs"
PAST = {"pause": "paused", "resume": "resumed", "cancel": "cancelled"}


def list_jobs(request: Request) -> Response:
    keeper, query = keeper_of(request), page_query(request, usual=20, most=100)
    metadata, has_none = metadata_query(request)
    cut = PageRequest(client_of(request).owner, query.after, query.limit)
    page = page_of(lambda: keeper.index.jobs(cut, metadata, has_none=has_none), query.after)
    return PlainJSON(list_object(page.data, has_more=page.has_more))


def retrieve_job(request: Request) -> Response:
    return PlainJSON(visible_job(request))


def visible_job(request: Request) -> dict[str, Any]:
    """The job in the request's path. Refusal when this client sees no such job."""
    keeper, job_id = keeper_of(request), request.path_params["job_id"]
    job = keeper.index.job(job_id) if is_id(job_id, JOB) else None
    if job is None and is_id(job_id, JOB):  # another server may have just created it
        job = job_now(keeper, job_id)
    if job is None or not client_of(request).sees(job["lathe"]["owner"]):
        raise Refusal(404, f"No such fine-tuning job: {quote(job_id)}.", param="id")
    return job


def list_events(request: Request) -> Response:
    keeper, query = keeper_of(request), page_query(request, usual=20, most=1000)
    job = visible_job(request)
    cut = PageRequest(None, query.after, query.limit)
    page = page_of(lambda: keeper.index.events(job["id"], cut), query.after)
    return PlainJSON(list_object(page.data, has_more=page.has_more))


def cancel_job(request: Request) -> Response:
    return _wish(request, "cancel")


def pause_job(request: Request) -> Response:
    return _wish(request, "pause")


def resume_job(request: Request) -> Response:
    return _wish(request, "resume")


def _wish(request: Request, wish: WishKind) -> Response:
    """Add a wish about a job that has not ended, unless it is already fulfilled."""
    client, keeper = writer_of(request), keeper_of(request)
    folder, job_id = ticket_folder(request), request.path_params["job_id"]
    job = job_now(keeper, job_id)
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
    return PlainJSON(job_now(keeper, job_id))


def ticket_folder(request: Request) -> TicketFolder:
    """The folder of the job in the request's path. Refusal."""
    folder = keeper_of(request).folder.ticket(visible_job(request)["id"])
    assert folder is not None, "a job has a ticket"
    return folder


ROUTES = [
    Route(JOBS, create_job, methods=["POST"]),
    Route(JOBS, list_jobs),
    Route(f"{JOBS}/{{job_id}}", retrieve_job),
    Route(f"{JOBS}/{{job_id}}/cancel", cancel_job, methods=["POST"]),
    Route(f"{JOBS}/{{job_id}}/pause", pause_job, methods=["POST"]),
    Route(f"{JOBS}/{{job_id}}/resume", resume_job, methods=["POST"]),
    Route(f"{JOBS}/{{job_id}}/events", list_events),
]
