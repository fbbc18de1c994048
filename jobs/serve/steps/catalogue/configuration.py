"""What a client is told before it begins: its configuration, the models, that the server is up."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.record.times import now
from jobs.serve.requests import PlainJSON, keeper_of, read_body, read_content, writer_of
from jobs.serve.steps.bodies import ClientVersion, CreateSession, FinishSession, SessionBeat
from jobs.serve.steps.context import (
    check_project,
    metadata_of,
    steps_of,
    visible_session,
)
from jobs.serve.steps.futures import API
from jobs.serve.steps.names import SESSION
from jobs.serve.steps.operations import end_run
from jobs.serve.steps.sessions import FinishFacts, SessionFacts
from jobs.serve.tickets import id_of_key, new_id

SDK = "0.38.0"  # whose requests are understood (docs/decisions/40-the-tinker-dialect.md)
CHUNK_ROWS = 1024  # of one operation
# What the SDK does is what is supported here. Source: tinker 0.38.0, ClientConfigResponse.
CONFIG: dict[str, Any] = {
    "pjwt_auth_enabled": False,  # keys are sent as they are
    "credential_default_source": "api_key",
    # the chunks of a batch come in order, and none waits at the server for the first one
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,  # what is never compressed cannot grow without bound
    "fwdbwd_max_chunk_len": CHUNK_ROWS,
    "use_pyqwest_transport": False,
    # one request waits for all samples of a session
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    # no graph of a request is run: the client computes losses of its own itself
    "custom_loss_server_side": False,
    # samples wait for a model that is loaded, which may take minutes
    "sample_enable_stuck_detection": False,
}
DYNAMIC: dict[str, Any] = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}
MOST_TELEMETRY = 4 << 20


async def client_config(request: Request) -> Response:
    """How the SDK is to behave."""
    config = keeper_of(request).config
    await read_body(request, ClientVersion, config)
    most = min(5_000_000, config.max_operation // 2)
    return PlainJSON({**CONFIG, "fwdbwd_max_chunk_bytes_count": most})


async def dynamic_config(request: Request) -> Response:
    """The part of it that the SDK asks for again."""
    await read_body(request, ClientVersion, keeper_of(request).config)
    return PlainJSON(DYNAMIC)


async def capabilities(request: Request) -> Response:
    """The models that may be driven."""
    models = [
        {
            "model_name": name,
            "max_context_length": offer.driven.max_tokens,
            "trainable": True,
            "sampleable": keeper_of(request).config.sampled_models > 0,
        }
        for name, offer in sorted(steps_of(request).offers.items())
    ]
    return PlainJSON({"supported_models": models})


async def health(request: Request) -> Response:
    """That the server is up."""
    return PlainJSON({"status": "ok"})


async def telemetry(request: Request) -> Response:
    """Take what the SDK tells of itself, and drop it."""
    await read_content(request, MOST_TELEMETRY, keeper_of(request).config.body_s)
    return PlainJSON({"status": "accepted"})


async def create_session(request: Request) -> Response:
    """Begin a session. The SDK sends one key with every repetition of a request."""
    keeper, client = keeper_of(request), writer_of(request)
    body = await read_body(request, CreateSession, keeper.config)
    check_project(body.project_id, "project_id")
    key = request.headers.get("x-idempotency-key", "")
    facts = SessionFacts(
        id=id_of_key(client.name, f"session {key[:256]}", SESSION) if key else new_id(SESSION),
        created_at=now(),
        owner=client.name,
        sdk_version=body.sdk_version,
        tags=body.tags,
        user_metadata=metadata_of(body.user_metadata),
        display_name=body.display_name,
    )
    session = await run_in_threadpool(steps_of(request).sessions.create, facts)
    answer: dict[str, Any] = {"type": "create_session", "session_id": session.id}
    if body.sdk_version != SDK:
        answer["warning_message"] = (
            f"This server understands tinker {SDK}, and you have {body.sdk_version}: what is new "
            f"in it may be refused. pip install tinker=={SDK}"
        )
    return PlainJSON(answer)


async def session_beat(request: Request) -> Response:
    """Note that the client of a session lives; 410 when the session has ended."""
    body = await read_body(request, SessionBeat, keeper_of(request).config)
    session, steps = visible_session(request, body.session_id, writes=True), steps_of(request)
    if steps.sessions.finished(session.id) is not None:
        return PlainJSON({"error": {"message": f"{session.id} has ended."}}, 410)
    steps.sessions.beat(session.id)
    return PlainJSON({"type": "session_heartbeat"})


async def finish_session(request: Request) -> Response:
    """End a session: its runs save their states and give their devices back."""
    body = await read_body(request, FinishSession, keeper_of(request).config)
    session = visible_session(request, request.path_params["session"], writes=True)
    steps = steps_of(request)
    end = FinishFacts(at=now(), type=body.reason.type, detail=body.detail)
    for run in steps.sessions.runs(session.id):
        if run.exp_id is not None:
            await end_run(request, run)
    await run_in_threadpool(steps.sessions.finish, session.id, end)
    return Response(status_code=204)


ROUTES = [
    Route(f"{API}/client/config", client_config, methods=["POST"]),
    Route(f"{API}/client/dynamic_config", dynamic_config, methods=["POST"]),
    Route(f"{API}/get_server_capabilities", capabilities),
    Route(f"{API}/healthz", health),
    Route(f"{API}/telemetry", telemetry, methods=["POST"]),
    Route(f"{API}/create_session", create_session, methods=["POST"]),
    Route(f"{API}/session_heartbeat", session_beat, methods=["POST"]),
    Route(f"{API}/sessions/{{session}}/finish", finish_session, methods=["POST"]),
]
