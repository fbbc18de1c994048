"""What the SDK can ask for and this service does not have: refused by name, never passed over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.serve.requests import Refusal
from jobs.serve.steps.futures import API

WEIGHTS = f"{API}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}"
# By path and method: what is not there, and what to do instead.
NOT_OFFERED: dict[tuple[str, str], str] = {
    ("POST", f"{API}/auth/token"): "Tokens of this server are sent as they are: no JWT is made of "
    "them. Send the token itself.",
    ("GET", f"{API}/auth/apikey/me"): "Who a token belongs to stands in the token file of whoever "
    "runs the service.",
    ("DELETE", f"{API}/auth/apikey/me"): "Tokens are taken back by whoever runs the service.",
    (
        "GET",
        f"{API}/audit",
    ): "There is no audit log: the log of the server is with whoever runs it.",
    ("GET", f"{API}/billing/usage/events"): "Nothing is billed here. GPU hours of runs are in "
    "/lathe/v1/status.",
    ("GET", f"{API}/billing/usage/checkpoints/current"): "Nothing is billed here. list_checkpoints "
    "says sizes.",
    ("PUT", f"{API}/sessions/{{session}}/project"): "There are no projects: what a token makes "
    "belongs to it.",
    ("GET", f"{API}/sessions/{{session}}/trace_export"): "No trace is recorded. The page of the "
    "service shows the curves of a run.",
    ("POST", f"{WEIGHTS}/publish"): "Nothing is published: saved weights belong to their token. "
    "Download them.",
    ("DELETE", f"{WEIGHTS}/publish"): "Nothing is published: saved weights belong to their token.",
    ("POST", f"{API}/create_custom_loss"): "No graph of a request is run here. "
    "forward_backward_custom computes a loss at the client.",
}


def _refuse(text: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise Refusal(400, f"Not offered: {text}", code="not_offered")

    return refuse


ROUTES = [
    Route(path, _refuse(text), methods=[method]) for (method, path), text in NOT_OFFERED.items()
]
