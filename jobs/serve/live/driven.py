"""Driven runs on the page: their operations, who drives them, what they have saved; and the actions
that only they have (put aside, delete).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.job_state import ACTIVE
from jobs.report.operations import operations_of
from jobs.serve.dialect.job_now import job_now
from jobs.serve.dialect.models import jobs_after
from jobs.serve.job_view import FINAL
from jobs.serve.lathe_routes import find_run
from jobs.serve.limits.disclosure import for_tenant
from jobs.serve.requests import PlainJSON, Refusal, is_operator, keeper_of, writer_of
from jobs.serve.steps.catalogue.checkpoints import checkpoints_of
from jobs.serve.steps.context import Steps, steps_of
from jobs.serve.steps.names import client_id
from jobs.submit import control
from trainer.files.atomic import refusals
from trainer.operations.operation_log import FOLDER

if TYPE_CHECKING:
    from jobs.record.paths import RunFolder
    from jobs.serve.steps.sessions import RunFacts

PUT_ASIDE = "put aside in the service: the next operation wakes it"
# What a deleted run has below its folder. Its record stays, as that of any job.
PARTS = (FOLDER, "saved", "sampler", "checkpoints", "final", "best")


def show_operations(request: Request) -> Response:
    """The operations of a driven run: `totals`, the `last` ones, `failures`, those that are
    `waiting`, its `driver`, and what it has `saved`. 404 for a run that nobody drives.
    """
    folder = find_run(request)
    operations = operations_of(folder.path)
    if operations is None:
        raise Refusal(404, "This run has no operations: no client drives it.", code="not_driven")
    body, facts = operations.shown(), _facts(request, folder)
    if not is_operator(request):  # what a client has said itself stays as it is
        body = for_tenant(body, keeper_of(request).folder.base.path)
    if facts is None:
        body |= {"driver": None, "saved": []}
    else:
        steps = steps_of(request)
        body |= {"driver": _driver(steps, facts), "saved": checkpoints_of(steps, facts)}
    return PlainJSON(body)


def _facts(request: Request, folder: RunFolder) -> RunFacts | None:
    """The training run of a session that a run folder belongs to; None without one."""
    job = keeper_of(request).index.job_of_run(folder.path.name)
    driven_by = None if job is None else job["lathe"].get("driven_by")
    if driven_by is None:
        return None
    return steps_of(request).sessions.run(client_id(driven_by, "train"))


def _driver(steps: Steps, facts: RunFacts) -> dict[str, Any]:
    """Who drives a run, by its session."""
    sessions = steps.sessions
    session, end = sessions.session(facts.session), sessions.finished(facts.session)
    beat_at = None
    with suppress(OSError):
        beaten_at = os.stat(sessions.folder(facts.session) / "alive").st_mtime
        beat_at = datetime.fromtimestamp(beaten_at, timezone.utc).isoformat()
    return {
        "token": facts.owner,
        "session": facts.session,
        "run": str(facts.id),
        "base_model": facts.base_model,
        "rank": facts.rank,
        "begins_with": facts.begins_with,
        "run_metadata": facts.user_metadata,
        "display_name": None if session is None else session.display_name,
        "sdk_version": None if session is None else session.sdk_version,
        "tags": [] if session is None else session.tags,
        "metadata": None if session is None else session.user_metadata,
        "last_heartbeat": beat_at,
        "is_alive": end is None and sessions.is_alive(facts.session),
        "finished": None if end is None else end.model_dump(mode="json"),
    }


def put_aside(request: Request) -> Response:
    """Let a driven run save its state and give its device back; its next operation wakes it."""
    keeper, folder = keeper_of(request), find_run(request)
    job = _own_job(request, folder)
    if job["status"] in FINAL:
        text = f"The run has {job['status']}: nothing is there to be put aside."
        raise Refusal(400, text, code="job_has_ended")
    row = keeper.reader.rows([folder.path.name]).get(folder.path.name)
    if row is None or row.state not in ACTIVE:
        state = "waits to be sent" if row is None else f"is {row.state}"
        raise Refusal(409, f"The run {state}: it holds no device.", code="run_not_active")
    results = control.cancel(keeper.folder.base, [row], keeper.backend_of, why=PUT_ASIDE)
    return PlainJSON([asdict(result) for result in results])


def delete_run(request: Request) -> Response:
    """Move the operations, the states and the weights of a driven run that has ended into deleted/,
    from where `lathe-jobs gc` removes them. For the clients of the dialect it is absent then.
    """
    keeper, folder, client = keeper_of(request), find_run(request), writer_of(request)
    job = _own_job(request, folder)
    if job["status"] not in FINAL:
        text = f"The run is {job['status']}. Cancel it first: POST /v1/fine_tuning/jobs/{job['id']}"
        raise Refusal(409, f"{text}/cancel.", code="job_goes_on")
    row = keeper.reader.rows([folder.path.name]).get(folder.path.name)
    if row is not None and row.state in ACTIVE:
        text = "The run was cancelled, and is saving its last state. Ask again."
        raise Refusal(409, text, code="job_goes_on", retry_after_s=5)
    later = jobs_after(keeper, job["fine_tuned_model"] or "")
    if later:
        text = f"{', '.join(later)} begin with its model and have not ended. Cancel them."
        raise Refusal(409, text, code="model_in_use")
    steps, facts = steps_of(request), _facts(request, folder)
    if facts is not None:
        steps.sessions.mark_run_deleted(facts.id)  # first: no operation comes from now on
        steps.runs.forget(facts)
    deleted = keeper.folder.base.deleted_folder
    aside = deleted / f"{folder.path.name}-{time.strftime('%Y%m%d-%H%M%S')}-driven"
    with refusals(aside):
        aside.mkdir(parents=True, exist_ok=True)
        for part in PARTS:
            if (folder.path / part).exists():
                os.rename(folder.path / part, aside / part)
    ticket = keeper.folder.ticket(job["id"])
    assert ticket is not None, "a job has a ticket"
    # last: a disk that refuses has not deleted all, and the same request may come again
    ticket.add_wish("delete", client.name)
    job_now(keeper, job["id"])
    return PlainJSON({"id": folder.path.name, "object": "run", "deleted": True})


def _own_job(request: Request, folder: RunFolder) -> dict[str, Any]:
    """The job of a driven run that the client may change. Refusal."""
    client, keeper = writer_of(request), keeper_of(request)
    job = keeper.index.job_of_run(folder.path.name)
    if job is None or job["lathe"].get("driven_by") is None:
        text = "No client of the service drives this run: cancel, pause or delete it as any other."
        raise Refusal(409, text, code="not_driven")
    if not client.may_change(job["lathe"]["owner"]):
        raise Refusal(403, f"{job['id']} belongs to another token.")
    return job_now(keeper, job["id"]) or job


RUN = "/lathe/v1/runs/{exp_id}"
ROUTES = [
    Route(f"{RUN}/operations", show_operations),
    Route(f"{RUN}/put_aside", put_aside, methods=["POST"]),
    Route(RUN, delete_run, methods=["DELETE"]),
]
