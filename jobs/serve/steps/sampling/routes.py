"""/api/v1/asample and sampling sessions."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.record.times import now
from jobs.serve.requests import PlainJSON, Refusal, keeper_of, quote, read_body
from jobs.serve.steps.bodies import AskSample, CreateSampler, JoinSampler
from jobs.serve.steps.context import (
    steps_of,
    visible_sampler,
    visible_session,
    visible_weights,
)
from jobs.serve.steps.futures import API
from jobs.serve.steps.names import MOST_CLIENTS, ClientId, weights_path
from jobs.serve.steps.sessions import SamplerFacts, SessionFacts, refuse_finished
from jobs.serve.steps.upkeep.usage import Demand, room_for
from jobs.serve.uploads import refuse_on_full_disk


async def create_sampler(request: Request) -> Response:
    """Begin a sampling session with a base model or saved weights."""
    body = await read_body(request, CreateSampler, keeper_of(request).config)
    session = visible_session(request, body.session_id, writes=True)
    refuse_finished(steps_of(request).sessions, session.id)
    if not keeper_of(request).config.sampled_models:
        raise Refusal(400, "Samples are not offered here: this service only trains.")
    facts = await run_in_threadpool(_sampler, request, body, session)
    return PlainJSON({"type": "create_sampling_session", "sampling_session_id": str(facts.id)})


def _sampler(request: Request, body: CreateSampler, session: SessionFacts) -> SamplerFacts:
    """The sampler of a request; what is there, where the request is repeated. Refusal."""
    steps, number = steps_of(request), body.sampling_session_seq_id
    if number >= MOST_CLIENTS:
        text = f"sampling_session_seq_id: got {number}, want less than {MOST_CLIENTS}."
        raise Refusal(400, text)
    before = steps.sessions.sampler(ClientId(session.id, "sample", number))
    if before is not None:  # its weights may be gone by now
        return _same(before, body)
    facts = SamplerFacts(
        session=session.id,
        number=number,
        created_at=now(),
        owner=session.owner,
        base_model=body.base_model or "",
    )
    if body.model_path is not None:
        path = weights_path(body.model_path, param="model_path")
        run, saved = visible_weights(request, path)
        if saved.kind == "weights":
            text = f"model_path: got {quote(body.model_path)}, a state to train from. Want weights "
            raise Refusal(400, f"{text}that save_weights_for_sampler has saved.")
        if body.base_model not in (None, run.base_model):
            text = f"base_model: got {quote(body.base_model)}, and these are weights of "
            raise Refusal(400, f"{text}{run.base_model!r}. Leave it out.")
        of_run = {"of_run": str(run.id), "of_operation": saved.seq} if run.exp_id else {}
        update = {
            "base_model": run.base_model,
            "model_path": body.model_path,
            "exp_id": run.exp_id,
            "folder": saved.folder,
            **of_run,
        }
        facts = facts.model_copy(update=update)
    steps.offer(facts.base_model)
    return _same(steps.sessions.add_sampler(facts), body)


def _same(facts: SamplerFacts, body: CreateSampler) -> SamplerFacts:
    """A sampler that is there, if it is that of a request. Refusal (409)."""
    is_of_save = facts.model_path is None and facts.of_run is not None
    is_other = facts.model_path != body.model_path or is_of_save
    if is_other or body.base_model not in (None, facts.base_model):
        text = f"{facts.id} was made of another request. Use the next sampling_session_seq_id."
        raise Refusal(409, text, code="idempotency_error")
    return facts


async def join_sampler(request: Request) -> Response:
    """A number of its own for one more client of a sampling session."""
    body = await read_body(request, JoinSampler, keeper_of(request).config)
    facts = visible_sampler(request, body.sampling_session_id, writes=True)
    number = await steps_of(request).samples.join(facts)
    return PlainJSON({"type": "join_sampling_session", "client_counter": number})


async def show_sampler(request: Request) -> Response:
    """What a sampler samples from."""
    facts = visible_sampler(request, request.path_params["sampler"])
    shown = {
        "sampler_id": str(facts.id),
        "base_model": facts.base_model,
        "model_path": facts.model_path,
    }
    return PlainJSON(shown)


async def ask_sample(request: Request) -> Response:
    """Ask for continuations of a prompt, as token ids; their future."""
    body = await read_body(request, AskSample, keeper_of(request).config)
    facts = visible_sampler(request, body.sampling_session_id, writes=True)
    refuse_finished(steps_of(request).sessions, facts.session)
    await run_in_threadpool(steps_of(request).sessions.beat, facts.session)
    await run_in_threadpool(refuse_on_full_disk, keeper_of(request), 0)
    async with room_for(request, Demand()):
        ids = await steps_of(request).samples.add(facts, body)
    future = {"request_id": f"{facts.id}:{body.seq_id}", "sample_sequence_ids": ids}
    return PlainJSON(future)


ROUTES = [
    Route(f"{API}/create_sampling_session", create_sampler, methods=["POST"]),
    Route(f"{API}/join_sampling_session", join_sampler, methods=["POST"]),
    Route(f"{API}/samplers/{{sampler}}", show_sampler),
    Route(f"{API}/asample", ask_sample, methods=["POST"]),
]
