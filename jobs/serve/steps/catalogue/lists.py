"""Training runs and sessions: shown, listed, searched."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.serve.requests import PlainJSON, Refusal, client_of, keeper_of, read_body
from jobs.serve.steps.bodies import SearchSessions, StatusQuery
from jobs.serve.steps.catalogue.checkpoints import (
    page_of,
    readable_checkpoints_of,
    runs_of_client,
    texts_of,
)
from jobs.serve.steps.context import (
    OWN_PROJECT,
    Steps,
    check_project,
    steps_of,
    visible_run,
    visible_session,
)
from jobs.serve.steps.futures import API
from jobs.serve.steps.sessions import FinishFacts, RunFacts, SessionFacts


def show_run(request: Request) -> Response:
    """A training run."""
    return PlainJSON(run_object(request, visible_run(request, request.path_params["run"])))


def list_runs(request: Request) -> Response:
    """The training runs of a client, the newest first."""
    limit, offset = page_of(request, usual=20)
    project = request.query_params.get("project_id")
    check_project(project, "project_id")
    runs = sorted(runs_of_client(request), key=lambda run: run.created_at, reverse=True)
    cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
    page = [run_object(request, run) for run in runs[offset : offset + limit]]
    return PlainJSON({"training_runs": page, "cursor": cursor})


def run_object(request: Request, run: RunFacts) -> dict[str, Any]:
    """A run in the format of the SDK. Source: `TrainingRun` of tinker 0.38.0."""
    steps = steps_of(request)
    readable = readable_checkpoints_of(steps, run)
    saved = sorted(readable or (), key=lambda one: one["time"])
    states = [one for one in saved if one["checkpoint_type"] == "training"]
    of_samplers = [one for one in saved if one["checkpoint_type"] == "sampler"]
    job = None if run.job is None else keeper_of(request).index.job(run.job)
    return {
        "training_run_id": str(run.id),
        "base_model": run.base_model,
        "model_owner": run.owner,
        "is_lora": True,
        "corrupted": readable is None or (job is not None and job["status"] == "failed"),
        "lora_rank": run.rank,
        "last_request_time": _last_request(steps, run),
        "last_checkpoint": states[-1] if states else None,
        "last_sampler_checkpoint": of_samplers[-1] if of_samplers else None,
        "user_metadata": texts_of(run.user_metadata),
    }


def _last_request(steps: Steps, run: RunFacts) -> str:
    """When the last operation of a run was written; when it was made, if there is none."""
    times: list[float] = []
    if run.exp_id is not None:
        folder = steps.runs.of(run).folder
        with suppress(OSError):
            names = [name for name in os.listdir(folder) if name.startswith("log-")]
            times = [os.stat(folder / name).st_mtime for name in names]
    if not times:
        return run.created_at
    return datetime.fromtimestamp(max(times), timezone.utc).isoformat()


def show_session(request: Request) -> Response:
    """A session with its runs and samplers."""
    session = visible_session(request, request.path_params["session"])
    sessions = steps_of(request).sessions
    shown = {
        "training_run_ids": [str(run.id) for run in sessions.runs(session.id)],
        "sampler_ids": [str(one.id) for one in sessions.samplers(session.id)],
        "user_metadata": texts_of(session.user_metadata),
        "display_name": session.display_name,
    }
    return PlainJSON(shown)


def list_sessions(request: Request) -> Response:
    """The ids of a client's sessions, the newest first."""
    limit, offset = page_of(request, usual=20)
    ids = [session.id for session in _sessions(request)]
    return PlainJSON({"sessions": ids[offset : offset + limit]})


def _sessions(request: Request) -> list[SessionFacts]:
    """The sessions that a client sees, the newest first."""
    sessions, client = steps_of(request).sessions, client_of(request)
    return sorted(
        sessions.all_visible(client), key=lambda one: (one.created_at, one.id), reverse=True
    )


async def search_sessions(request: Request) -> Response:
    """Sessions by their names, their metadata, their owner or their status."""
    body = await read_body(request, SearchSessions, keeper_of(request).config)
    for project in body.project_ids or ():
        check_project(project, "project_ids")
    return PlainJSON(await run_in_threadpool(_search, request, body))


def _search(request: Request, body: SearchSessions) -> dict[str, Any]:
    steps, client = steps_of(request), client_of(request)
    matches = [
        session
        for session in _sessions(request)
        if (body.owner.type != "own" or session.owner == client.name)
        and (body.owner.type != "user" or session.owner in (body.owner.owner_urns or ()))
        and _matches(steps, session, body)
    ]
    if body.cursor is not None:
        start = (_time(body.cursor.last_created_at), body.cursor.last_session_id)
        matches = [one for one in matches if (_time(one.created_at), one.id) < start]
    page, rest = matches[: body.limit], matches[body.limit :]
    cursor = None
    if rest:
        last = page[-1]
        cursor = {"last_created_at": last.created_at, "last_session_id": last.id}
    return {"sessions": [_summary(steps, one) for one in page], "next_cursor": cursor}


def _time(text: str) -> float:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        raise Refusal(400, "cursor: want the next_cursor of an answer.", param="cursor") from None


def _matches(steps: Steps, session: SessionFacts, body: SearchSessions) -> bool:
    """Whether a session is one that a search wants."""
    metadata = texts_of(session.user_metadata) or {}
    if any(metadata.get(key) != value for key, value in body.user_metadata.items()):
        return False
    if body.session_id is not None or body.display_name is not None:
        name = (session.display_name or "").casefold()
        words = (body.display_name or "").casefold().split()
        has_name = bool(words) and all(word in name for word in words)
        if session.id != body.session_id and not has_name:
            return False
    queries = body.statuses
    return queries is None or any(_has_status(steps, session, one) for one in queries)


def _has_status(steps: Steps, session: SessionFacts, query: StatusQuery) -> bool:
    end = steps.sessions.finished(session.id)
    if query.type == "active":
        return end is None and steps.sessions.is_alive(session.id)
    if query.type == "client_finished" and end is not None:
        return query.reasons is None or end.type in query.reasons
    return False


def _status(end: FinishFacts | None, *, is_alive: bool) -> dict[str, Any] | None:
    if end is not None:
        return {"type": "client_finished", "reason": {"type": end.type}, "detail": end.detail}
    return {"type": "active"} if is_alive else None


def _summary(steps: Steps, session: SessionFacts) -> dict[str, Any]:
    """A session in the format of a search. Source: `SessionSummary` of tinker 0.38.0."""
    sessions = steps.sessions
    runs = sessions.runs(session.id)
    saved = [one for run in runs for one in readable_checkpoints_of(steps, run) or ()]
    end, is_alive = sessions.finished(session.id), sessions.is_alive(session.id)
    return {
        "session_id": session.id,
        "created_at": session.created_at,
        "owner": session.owner,
        "project_id": OWN_PROJECT,
        "status": _status(end, is_alive=is_alive),
        "checkpoints_count": len(saved),
        "display_name": session.display_name,
        "user_metadata": texts_of(session.user_metadata),
        "checkpoint_storage_bytes": sum(one["size_bytes"] for one in saved),
    }


ROUTES = [
    Route(f"{API}/training_runs", list_runs),
    Route(f"{API}/training_runs/{{run}}", show_run),
    Route(f"{API}/sessions", list_sessions),
    Route(f"{API}/sessions/search", search_sessions, methods=["POST"]),
    Route(f"{API}/sessions/{{session}}", show_session),
]
