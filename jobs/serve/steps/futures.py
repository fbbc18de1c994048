"""Futures of the dialect: what became of an operation or of a request for samples.

The id of a future says what it is of, so any server process answers for it, before and after a
restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.serve.requests import PlainJSON, keeper_of, read_body
from jobs.serve.steps.bodies import CancelFuture, RetrieveFuture, RetrieveFutures
from jobs.serve.steps.context import Steps, is_saved_by, steps_of, visible_run, visible_sampler
from jobs.serve.steps.datums import forward_output
from jobs.serve.steps.names import ClientId, WeightsPath, future_id
from jobs.serve.steps.sessions import RunFacts, SavedFacts
from trainer.operations.results import OperationResult

PROTOBUF = "application/x-protobuf"
WAIT_S = 25.0  # that an answer is waited for; the SDK gives up after 45 s
INLINE_BYTES = 1 << 20  # of an answer; a larger one is announced first where the client wants so


async def retrieve(request: Request) -> Response:
    """The result of a request; 408 while there is none, upon which the SDK asks again at once."""
    body = await read_body(request, RetrieveFuture, keeper_of(request).config)
    client, seq = future_id(body.request_id)
    if client.kind == "train":
        answer = await _of_operation(request, client, seq)
    else:
        answer = await _of_sample(request, client, seq)
    if answer is None:
        return _later(request, client)
    is_large = isinstance(answer, bytes) and len(answer) > INLINE_BYTES
    if is_large and body.allow_metadata_only:
        size = len(answer)
        return PlainJSON({"status": "complete_metadata", "response_payload_size": size})
    if isinstance(answer, bytes):
        return Response(answer, media_type=PROTOBUF)
    return PlainJSON(answer)


def _later(request: Request, client: ClientId) -> Response:
    """The answer while a request waits: 408 with the state of its queue, as the SDK reads it."""
    state: dict[str, Any] = {"type": "try_again", "queue_state": "active"}
    run = steps_of(request).sessions.run(client) if client.kind == "train" else None
    job = None if run is None or run.job is None else keeper_of(request).index.job(run.job)
    if job is not None and job["lathe"]["state"] != "running":
        state["queue_state"] = "paused_capacity"
        state["queue_state_reason"] = job["lathe"]["reason"] or "its run waits for a device"
    return PlainJSON(state, 408, {"x-should-retry": "true"})


async def _of_operation(
    request: Request, client: ClientId, seq: int
) -> dict[str, Any] | bytes | None:
    """What the SDK reads of an operation; None while it has no result."""
    steps, facts = steps_of(request), visible_run(request, str(client))
    result = await steps.runs.result(facts, seq + facts.shift, within_s=WAIT_S)
    return None if result is None else operation_answer(steps, facts, result)


def operation_answer(
    steps: Steps, facts: RunFacts, result: OperationResult
) -> dict[str, Any] | bytes:
    """A result in the format of the SDK, by what the result says."""
    fields = result.fields
    if result.error is not None:
        return {"error": result.error, "category": fields.get("category", "server")}
    if result.payload or "outputs" in fields:
        outputs: Mapping[str, Mapping[str, Sequence[int]]] = fields.get("outputs") or {}
        trailing = {name: one["trailing"] for name, one in outputs.items()}
        return forward_output(result.payload, fields.get("metrics", {}), trailing)
    saved = steps.sessions.saved_by(facts.id, result.seq)
    if saved is not None and is_saved_by(saved, result):
        return _saved_answer(facts, saved)
    if result.seq == 0:
        return {"type": "create_model", "model_id": str(facts.id)}
    if "metrics" in fields:
        return {"metrics": fields["metrics"]}
    if result.work.get("kind") == "end":
        return {"type": "unload_model", "model_id": str(facts.id)}
    return {"type": "load_weights", "model_id": str(facts.id)}


def _saved_answer(facts: RunFacts, saved: SavedFacts) -> dict[str, Any]:
    if saved.sampler is not None:
        return {"type": "save_weights_for_sampler", "sampling_session_id": saved.sampler}
    kinds = {
        "weights": "save_weights",
        "sampler_weights": "save_weights_for_sampler",
        "external_weights": "save_weights_external",
    }
    path = WeightsPath(facts.id, saved.kind, saved.name)
    return {"type": kinds[saved.kind], "path": str(path)}


async def _of_sample(request: Request, client: ClientId, seq: int) -> dict[str, Any] | bytes | None:
    """What the SDK reads of a request for samples; None while it has no result."""
    facts = visible_sampler(request, str(client))
    return await steps_of(request).samples.answer(facts, seq, within_s=WAIT_S)


async def retrieve_many(request: Request) -> Response:
    """Which requests of a sampling session have ended since a cursor, as soon as there is one."""
    body = await read_body(request, RetrieveFutures, keeper_of(request).config)
    target = body.target
    facts = visible_sampler(request, target.sampling_session_id)
    within_s = WAIT_S if body.timeout is None else min(body.timeout, WAIT_S)
    clone, cursor = target.cloned_sampler_id, body.prev_cursor
    samples = steps_of(request).samples
    await samples.forget(facts, [future_id(one) for one in body.retrieved_request_ids])
    completions, cursor = await samples.completions(facts, clone, cursor, within_s=within_s)
    return PlainJSON({"completions": completions, "cursor": cursor})


async def cancel(request: Request) -> Response:
    """Give up a request for samples that nobody waits for; operations of a run are never left out,
    because those behind them build on them.
    """
    body = await read_body(request, CancelFuture, keeper_of(request).config)
    client, seq = future_id(body.request_id)
    if client.kind == "sample":
        facts = visible_sampler(request, str(client), writes=True)
        await steps_of(request).samples.cancel(facts, seq)
    else:
        visible_run(request, str(client), writes=True)
    return Response(status_code=204)


API = "/api/v1"
ROUTES = [
    Route(f"{API}/retrieve_future", retrieve, methods=["POST"]),
    Route(f"{API}/retrieve_futures", retrieve_many, methods=["POST"]),
    Route(f"{API}/cancel_future", cancel, methods=["POST"]),
]
