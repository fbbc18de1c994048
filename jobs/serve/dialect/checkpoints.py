"""Checkpoints of fine-tuning jobs: those of which a model can be made, now or later."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.errors import reason_for_client
from jobs.record.metrics import numbers
from jobs.record.paths import RunFolder
from jobs.serve.dialect.jobs import JOBS, ticket_folder, visible_job
from jobs.serve.dialect.names import CHECKPOINT, is_refused, named_model
from jobs.serve.dialect.pages import cut
from jobs.serve.dialect.saved_steps import exportable_steps
from jobs.serve.job_view import SCORES, metric_lines
from jobs.serve.requests import PlainJSON, Refusal, keeper_of, list_object, page_query
from jobs.serve.tickets import Ticket
from trainer.errors import LatheError


def list_checkpoints(request: Request) -> Response:
    """The saved steps of a job that can be asked and tuned further, the newest first."""
    keeper, query = keeper_of(request), page_query(request, usual=10, most=100)
    folder = ticket_folder(request)
    try:
        ticket = folder.read()
        is_deleted = any(wish.wish == "delete" for wish in folder.wishes())
    except (OSError, LatheError) as error:
        base = keeper.folder.base.path
        raise Refusal(409, reason_for_client(error, folder.path, base)) from None
    assert ticket is not None, "its job was found"
    run = keeper.folder.base.run(ticket.exp_id)
    has_none = is_deleted or is_refused(visible_job(request))
    objects = [] if has_none else checkpoints(ticket, run, keeper.config.organization)
    page = cut(objects, query)
    return PlainJSON(list_object(page.data, has_more=page.has_more))


def checkpoints(ticket: Ticket, folder: RunFolder, organization: str) -> list[dict[str, Any]]:
    """The saved steps of a run of which a model can be made, the newest first."""
    times = exportable_steps(folder)
    metrics: dict[int, dict[str, float]] = {}
    for line in metric_lines(folder.metrics):
        step = line.get("step")
        if step in times:
            values = numbers(line)
            scores = {theirs: values[ours] for theirs, ours in SCORES.items() if ours in values}
            metrics.setdefault(step, {}).update(scores)
    name = ticket.tuned_model(organization)
    return [
        {
            "id": f"ftckpt-{ticket.digits}-{step}",
            "object": "fine_tuning.job.checkpoint",
            "created_at": int(times[step]),
            "fine_tuned_model_checkpoint": f"{name}{CHECKPOINT}{step}",
            "fine_tuning_job_id": ticket.id,
            "metrics": {"step": step, **metrics.get(step, {})},
            "step_number": step,
        }
        for step in sorted(times, reverse=True)
    ]


def refuse_permissions(request: Request) -> Response:
    """Permissions share a checkpoint with other projects, which this server does not have."""
    named_model(request, request.path_params["checkpoint"])
    text = (
        "Permissions of a checkpoint: got a request to share it, but this server has no projects. "
        "Whoever has a token of the role admin or read sees every checkpoint; ask for such a token."
    )
    raise Refusal(400, text, code="unsupported")


PERMISSIONS = "/v1/fine_tuning/checkpoints/{checkpoint}/permissions"
ROUTES = [
    Route(f"{JOBS}/{{job_id}}/checkpoints", list_checkpoints),
    Route(PERMISSIONS, refuse_permissions, methods=["GET", "POST"]),
    Route(f"{PERMISSIONS}/{{permission_id}}", refuse_permissions, methods=["DELETE"]),
]
