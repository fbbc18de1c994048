"""New training runs: create_model, and load_weights that begins a run with saved weights.

A run is a job of the service. Its id follows from the session and the client's own number, so a
repeated request makes no second one.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.record.times import now
from jobs.serve.limits.quotas import room_for_job
from jobs.serve.requests import PlainJSON, Refusal, keeper_of, read_body, shares_of, writer_of
from jobs.serve.steps.bodies import AdapterWish, CreateModel, LoadWeights
from jobs.serve.steps.context import (
    client_of_token,
    digest_of,
    metadata_of,
    steps_of,
    visible_session,
    visible_weights,
)
from jobs.serve.steps.experiments import ALPHA, DrivenOffer, driven_experiment
from jobs.serve.steps.futures import API
from jobs.serve.steps.names import MOST_CLIENTS, ClientId, weights_path
from jobs.serve.steps.operations import Wrong, load_fields, load_into_run
from jobs.serve.steps.sessions import RunFacts, refuse_finished
from jobs.serve.tickets import Ticket, id_of_key
from jobs.serve.uploads import refuse_on_full_disk
from trainer import tasks
from trainer.config.identity import exp_id
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from jobs.serve.access import Client
    from jobs.serve.keeper import Keeper

KIND = "steps"  # of the rows of a driven run, which come one operation at a time


async def create_model(request: Request) -> Response:
    """Begin a training run on a base model."""
    body = await read_body(request, CreateModel, keeper_of(request).config)
    session = visible_session(request, body.session_id, writes=True)
    steps = steps_of(request)
    refuse_finished(steps.sessions, session.id)
    offer = steps.offer(body.base_model)
    rank, most = body.lora_config.rank, offer.driven.max_rank
    if rank > most:
        raise Refusal(400, f"lora_config.rank: got {rank}, want 1 to {most}.", param="lora_config")
    async with shares_of(request).turn("create", session.owner):
        facts = await run_in_threadpool(_add_run, request, body, offer, body.lora_config)
    await _append_create(request, facts, body.lora_config, offer)
    return PlainJSON(_future(facts))


async def load_weights(request: Request) -> Response:
    """Load saved weights: into a run, or begin one with them."""
    body = await read_body(request, LoadWeights, keeper_of(request).config)
    if body.model_id is not None:
        return await load_into_run(request, body)
    assert body.session_id is not None, "the body was checked"
    session = visible_session(request, body.session_id, writes=True)
    steps = steps_of(request)
    refuse_finished(steps.sessions, session.id)
    if body.optimizer and body.optimizer_config is not None:
        text = "optimizer_config: the weights are loaded with their optimizer. Leave it out."
        raise Refusal(400, text, param="optimizer_config")
    again = await run_in_threadpool(_begun_before, request, body)
    if again is not None:
        return PlainJSON(_future(again))
    other = client_of_token(request, body.weights_access_token)
    source, _ = await run_in_threadpool(
        visible_weights, request, weights_path(body.path), as_client=other
    )
    offer = steps.offer(source.base_model)
    if body.base_model not in (None, offer.name):
        text = f"base_model: got {body.base_model!r}, and these are weights of {offer.name!r}."
        raise Refusal(400, f"{text} Leave it out.", param="base_model")
    adapters = AdapterWish(
        rank=source.rank,
        train_attn=source.train_attn,
        train_mlp=source.train_mlp,
        train_unembed=source.train_unembed,
    )
    try:  # before there is a run, which would hold a device for weights that it cannot load
        fields = await run_in_threadpool(load_fields, request, source, body)
    except Wrong as error:
        raise Refusal(400, str(error), param="path") from None
    async with shares_of(request).turn("create", session.owner):
        facts = await run_in_threadpool(_add_run, request, body, offer, adapters)
    await _append_create(request, facts, adapters, offer)
    most = offer.driven.log_bytes
    await steps.runs.append(facts, facts.shift, "load_state", fields, most_bytes=most)
    return PlainJSON(_future(facts))


def _begun_before(request: Request, body: LoadWeights) -> RunFacts | None:
    """The run that the same request has begun before: what it begins with may be gone by now. None
    where there is none, or its first operations are not acknowledged.
    """
    steps = steps_of(request)
    assert body.session_id is not None, "the body was checked"
    assert body.model_seq_id is not None, "the body was checked"
    facts = steps.sessions.run(ClientId(body.session_id, "train", body.model_seq_id))
    if facts is None or facts.request_digest != digest_of(body):
        return None
    return facts if steps.runs.is_repeat(facts, facts.shift) else None


def _future(facts: RunFacts) -> dict[str, Any]:
    return {"request_id": f"{facts.id}:0", "model_id": str(facts.id)}


async def _append_create(
    request: Request, facts: RunFacts, adapters: AdapterWish, offer: DrivenOffer
) -> None:
    """Write the first operation of a run."""
    assert facts.job is not None, "a run that trains has a job"
    lora = {
        "rank": adapters.rank,
        "alpha": ALPHA,
        "seed": _seed(facts.job, adapters),
        "attn": adapters.train_attn,
        "mlp": adapters.train_mlp,
        "unembed": adapters.train_unembed,
    }
    fields = {"lora": lora, "base": offer.name, "metadata": facts.user_metadata or {}}
    most = offer.driven.log_bytes
    await steps_of(request).runs.append(facts, 0, "create", fields, most_bytes=most)


def _seed(job_id: str, adapters: AdapterWish) -> int:
    """The seed of a run: the client's, or one that is the same for a repeated request, and another
    one for every run.
    """
    if adapters.seed is not None:
        return adapters.seed
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:4], "big") >> 1


def _add_run(
    request: Request, body: CreateModel | LoadWeights, offer: DrivenOffer, adapters: AdapterWish
) -> RunFacts:
    """The run of a request, with its job; what is there, where the request is repeated. Refusal:
    409 for another request with the same numbers.
    """
    keeper, client, steps = keeper_of(request), writer_of(request), steps_of(request)
    session, number = body.session_id, body.model_seq_id
    assert session is not None, "the body was checked"
    assert number is not None, "the body was checked"
    if number >= MOST_CLIENTS:
        raise Refusal(400, f"model_seq_id: got {number}, want less than {MOST_CLIENTS}.")
    owner = visible_session(request, session).owner
    job_id = id_of_key(owner, f"{session}:train:{number}")
    values = driven_experiment(offer, adapters, job_id, _seed(job_id, adapters))
    is_load = isinstance(body, LoadWeights)
    facts = RunFacts(
        session=session,
        number=number,
        created_at=now(),
        owner=owner,
        base_model=offer.name,
        job=job_id,
        exp_id=exp_id(values),
        rank=adapters.rank,
        train_attn=adapters.train_attn,
        train_mlp=adapters.train_mlp,
        train_unembed=adapters.train_unembed,
        user_metadata=metadata_of(body.user_metadata),
        request_digest=digest_of(body),
        shift=1 if is_load else 0,
        begins_with=body.path if isinstance(body, LoadWeights) else None,
        with_optimizer=isinstance(body, LoadWeights) and body.optimizer,
    )
    before = steps.sessions.run(facts.id)
    if before is None:
        _create_ticket(keeper, client, offer, facts, values)
        before = steps.sessions.add_run(facts)
    if before.request_digest != facts.request_digest:
        text = f"{facts.id} was made of another request. Use the next model_seq_id."
        raise Refusal(409, text, code="idempotency_error")
    return before


def _create_ticket(
    keeper: Keeper, client: Client, offer: DrivenOffer, facts: RunFacts, values: dict[str, Any]
) -> None:
    """Write the job of a run durably. Refusal for what cannot become one."""
    assert facts.job is not None, "a run that trains has a job"
    assert facts.exp_id is not None, "a run that trains has an experiment"
    folder = keeper.folder.ticket(facts.job)
    assert folder is not None, "the id is ours"
    if folder.read() is not None:
        return
    try:
        tasks.parse(values, source=f"base_model {offer.name!r}")
    except ConfigError as error:
        raise Refusal(400, str(error), param="lora_config", code="invalid_value") from None
    ticket = Ticket(
        id=facts.job,
        created_at=now(),
        owner=facts.owner,
        model=offer.key,
        exp_id=facts.exp_id,
        experiment=values,
        request_digest=facts.request_digest,
        kind=KIND,
        num_rows=0,
        seed=0,
        epochs=0,
        batch=0,
        lr_factor=1.0,
        training_file="",
        driven_by=str(facts.id),
    )
    refuse_on_full_disk(keeper, 0)
    try:
        with room_for_job(keeper, client):
            keeper.folder.create(ticket)
    except Refusal as error:
        if error.status != 429:
            raise
        # the SDK would send it again for minutes
        raise Refusal(403, error.message, code="insufficient_quota") from None


ROUTES = [
    Route(f"{API}/create_model", create_model, methods=["POST"]),
    Route(f"{API}/load_weights", load_weights, methods=["POST"]),
]
