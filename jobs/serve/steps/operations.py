"""Operations of training runs: forward_backward, optim_step, save_..., load_... below /api/v1.

What is wrong with an operation is told by its future: its number is used, so that the operations
behind it run. Only what cannot be an operation at all is refused with a 4xx.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import DecodeError
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.record.times import now
from jobs.serve.requests import PlainJSON, Refusal, keeper_of, quote, read_body, read_content
from jobs.serve.steps import wire
from jobs.serve.steps.bodies import (
    AdamWish,
    LoadWeights,
    ModelWish,
    OptimStep,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
)
from jobs.serve.steps.catalogue.checkpoints import expired, remove
from jobs.serve.steps.context import (
    client_of_token,
    digest_of,
    metadata_of,
    steps_of,
    visible_run,
    visible_weights,
)
from jobs.serve.steps.datums import rows_operation
from jobs.serve.steps.experiments import Driven
from jobs.serve.steps.futures import API, PROTOBUF
from jobs.serve.steps.names import MOST_CLIENTS, ClientId, WeightsKind, is_name, weights_path
from jobs.serve.steps.sessions import (
    LoadFacts,
    RunFacts,
    SamplerFacts,
    SavedFacts,
    later,
    refuse_finished,
)
from jobs.serve.steps.upkeep.usage import Demand, QuotaRoom, room_for
from jobs.serve.uploads import refuse_on_full_disk
from trainer.errors import DataError
from trainer.operations.operation_log import Kind

MOST_PARTS = 200_000  # of rows in one request: 1,024 rows have about 6,000
MOST_TTL_S = 10 * 366 * 86400
# The folder of what is saved, below the run folder, by what it is saved for. What is sampled from
# never changes: a name that was deleted and is saved again has another folder.
FOLDERS: Mapping[WeightsKind, str] = {
    "weights": "saved/{name}",
    "sampler_weights": "sampler/named.{seq}.{name}",
    "external_weights": "sampler/external.{seq}.{name}",
}


class Wrong(Exception):
    """What is wrong with an operation, for its future."""


async def forward_backward(request: Request) -> Response:
    """Losses of rows, and their gradients unless forward_only says not."""
    config = keeper_of(request).config
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != PROTOBUF:
        raise Refusal(415, f"Content-Type: got {quote(kind)}, want {PROTOBUF}.")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        text = f"Content-Encoding: got {quote(encoding)}, want none: /api/v1/client/config says so."
        raise Refusal(415, text)
    content = await read_content(request, config.max_operation, config.body_s)
    message = await run_in_threadpool(_message_of, content)
    facts = visible_run(request, message.model_id, writes=True)
    offer = steps_of(request).offer(facts.base_model)
    name: Kind = "forward" if message.forward_only else "forward_backward"
    digest = functools.partial(_digest_of_message, message)
    again = await _refused_before(request, facts, message.seq_id, name, digest)
    if again is not None:
        return again
    try:
        fields, payload, num_tokens = await run_in_threadpool(
            rows_operation, message, max_tokens=offer.driven.max_tokens
        )
    except DataError as error:
        return await refuse(request, facts, message.seq_id, name, str(error), digest)
    more = Demand(tokens=num_tokens, bytes=len(payload), seq=message.seq_id + facts.shift)
    async with room_for(request, more, facts) as room:
        return await acknowledge(request, facts, message.seq_id, name, fields, payload, room=room)


def _digest_of_message(message: Any) -> str:
    """A digest that is the same for the same ForwardBackwardRequest."""
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()


def _message_of(content: bytes) -> Any:
    """The ForwardBackwardRequest in a body. Refusal."""
    message = wire.ForwardBackwardRequest()
    try:
        if wire.num_parts(content, MOST_PARTS) > MOST_PARTS:
            raise Refusal(413, f"The rows have more than {MOST_PARTS} parts. Send fewer rows.")
        message.ParseFromString(content)
    except DecodeError:
        raise Refusal(400, "The body is no ForwardBackwardRequest. Use tinker 0.38.") from None
    if message.seq_id < 0:
        raise Refusal(400, f"seq_id: got {message.seq_id}, want 0 or more.", param="seq_id")
    return message


async def optim_step(request: Request) -> Response:
    """A step of Adam with the gradients since the last one."""
    body = await read_body(request, OptimStep, keeper_of(request).config)
    facts = visible_run(request, body.model_id, writes=True)
    values = body.adam_params or body.optim_params
    digest = functools.partial(digest_of, body)
    again = await _refused_before(request, facts, body.seq_id, "optim_step", digest)
    if again is not None:
        return again
    try:
        if body.adam_params is not None and body.optim_params is not None:
            raise Wrong("optim_params: adam_params is there, too. Send one of the two.")
        if body.optimizer_params is not None:
            kind = quote(body.optimizer_params.get("type"))
            raise Wrong(
                f"optim_params: got {kind}, want AdamParams: no other optimizer steps here."
            )
        params = AdamWish.model_validate(values or {})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        text = f"adam_params.{place}: got {quote(first['input'])}. {first['msg']}."
        return await refuse(request, facts, body.seq_id, "optim_step", text, digest)
    except Wrong as error:
        return await refuse(request, facts, body.seq_id, "optim_step", str(error), digest)
    return await acknowledge(request, facts, body.seq_id, "optim_step", params.model_dump())


async def save_weights(request: Request) -> Response:
    """Weights, optimizer and the place in the log, from which training goes on as if it had never
    stopped.
    """
    body = await read_body(request, SaveWeights, keeper_of(request).config)
    facts = visible_run(request, body.model_id, writes=True)
    return await _save(request, facts, body, "weights", "save_state")


async def save_for_sampler(request: Request) -> Response:
    """Weights for samplers: by a name, or for a sampling session that begins with them."""
    body = await read_body(request, SaveForSampler, keeper_of(request).config)
    facts = visible_run(request, body.model_id, writes=True)
    return await _save(request, facts, body, "sampler_weights", "save_for_sampler")


async def save_external(request: Request) -> Response:
    """Weights as files that peft and others read."""
    body = await read_body(request, SaveExternal, keeper_of(request).config)
    facts = visible_run(request, body.model_id, writes=True)
    if body.age_encryption_recipients:
        text = "age_encryption_recipients: files are not encrypted here. Leave it out, or encrypt "
        text += "what you have downloaded."
        digest = functools.partial(digest_of, body)
        return await refuse(request, facts, body.seq_id, "save_for_sampler", text, digest)
    return await _save(request, facts, body, "external_weights", "save_for_sampler")


async def _save(
    request: Request,
    facts: RunFacts,
    body: SaveWeights | SaveForSampler | SaveExternal,
    kind: WeightsKind,
    operation: Kind,
) -> Response:
    """Write down what is to be saved, and the operation that saves it."""
    steps, seq = steps_of(request), body.seq_id
    refuse_finished(steps.sessions, facts.session)
    digest = functools.partial(digest_of, body)
    again = await _refused_before(request, facts, seq, operation, digest)
    if again is not None:
        return again
    try:
        saved = await run_in_threadpool(_to_save, request, facts, body, kind)
    except (Wrong, Refusal) as error:
        return await refuse(request, facts, seq, operation, str(error), digest)
    await run_in_threadpool(refuse_on_full_disk, keeper_of(request), 0)
    async with room_for(request, Demand(seq=saved.seq), facts):
        await run_in_threadpool(steps.sessions.add_saved, facts.id, saved)
        fields: dict[str, Any] = {"name": saved.folder.partition("/")[2]}
        if operation == "save_state":
            fields["overwrite"] = saved.overwrite
        if saved.sampler is not None:
            assert isinstance(body, SaveForSampler), "others have no sampler"
            await run_in_threadpool(_add_sampler, request, facts, saved, body)
        return await acknowledge(request, facts, seq, operation, fields)


def _to_save(
    request: Request,
    facts: RunFacts,
    body: SaveWeights | SaveForSampler | SaveExternal,
    kind: WeightsKind,
) -> SavedFacts:
    """What a request is to save; as it was, where the request is repeated. Wrong."""
    steps, seq = steps_of(request), body.seq_id + facts.shift
    name, sampler = body.path, None
    number = body.sampling_session_seq_id if isinstance(body, SaveForSampler) else None
    if number is not None:
        sampler_id = ClientId(facts.session, "sample", number)
        other = steps.sessions.sampler(sampler_id)
        if other is not None and (other.of_run, other.of_operation) != (str(facts.id), seq):
            raise Wrong(
                f"sampling_session_seq_id: got {number}, which names the sampler of other weights. "
                "Save for samplers by a name (save_weights_for_sampler), or use another number."
            )
        sampler = str(sampler_id)
        name, folder = f"session-{number}", f"sampler/session.{number}"
    else:
        name = f"{seq:06d}" if name is None else name
        folder = FOLDERS[kind].format(name=name, seq=seq)
    may_replace = isinstance(body, SaveWeights) and body.overwrite
    before = steps.sessions.saved_by(facts.id, seq)
    if before is not None:
        if (before.kind, before.name, before.overwrite) == (kind, name, may_replace):
            return before
        if steps.runs.is_repeat(facts, seq):
            raise Wrong(f"operation {body.seq_id} was sent before, and saves {before.name}.")
        # its server was killed before it was an operation, and the client has sent another one
    if not is_name(name):
        text = f"path: got {quote(name)}, want a name of letters, digits, points, - and _, at most "
        raise Wrong(f"{text}100, which begins with a letter or a digit.")
    ttl_s = body.ttl_seconds
    if ttl_s is not None and not 3600 <= ttl_s <= MOST_TTL_S:
        raise Wrong(f"ttl_seconds: got {ttl_s}, want 3600 (an hour) to {MOST_TTL_S} (ten years).")
    for run, other in expired(steps, [facts]):  # which the next sweep would remove
        if (other.kind, other.name) == (kind, name):
            remove(steps, run, other)
    for other in steps.sessions.all_saved(facts.id, lambda one: steps.may_be_saved(one, facts)):
        if (other.kind, other.name) == (kind, name) and not may_replace:
            text = f"{kind}/{name} was saved before. Give another name"
            raise Wrong(f"{text}, or overwrite=True." if kind == "weights" else f"{text}.")
    metadata = None if isinstance(body, SaveExternal) else metadata_of(body.user_metadata)
    return SavedFacts(
        run=str(facts.id),
        seq=seq,
        sampler=sampler,
        kind=kind,
        name=name,
        folder=folder,
        created_at=now(),
        overwrite=may_replace,
        expires_at=later(ttl_s),
        user_metadata=metadata,
    )


def _add_sampler(
    request: Request, facts: RunFacts, saved: SavedFacts, body: SaveForSampler
) -> None:
    number = body.sampling_session_seq_id
    if number is None or number >= MOST_CLIENTS:
        raise Refusal(400, f"sampling_session_seq_id: want at most {MOST_CLIENTS}.")
    sampler = SamplerFacts(
        session=facts.session,
        number=number,
        created_at=now(),
        owner=facts.owner,
        base_model=facts.base_model,
        exp_id=facts.exp_id,
        folder=saved.folder,
        of_run=str(facts.id),
        of_operation=saved.seq,
    )
    steps_of(request).sessions.add_sampler(sampler)


async def load_into_run(request: Request, body: LoadWeights) -> Response:
    """Load saved weights into a run that exists."""
    assert body.model_id is not None, "the body was checked"
    assert body.seq_id is not None, "the body was checked"
    facts = visible_run(request, body.model_id, writes=True)
    digest = functools.partial(digest_of, body)
    again = await _refused_before(request, facts, body.seq_id, "load_state", digest)
    if again is not None:
        return again
    try:
        if body.optimizer_config is not None:
            raise Wrong("optimizer_config: the run has its optimizer already. Leave it out.")
        fields = await run_in_threadpool(_load, request, facts, body)
    except (Wrong, Refusal) as error:
        return await refuse(request, facts, body.seq_id, "load_state", str(error), digest)
    return await acknowledge(request, facts, body.seq_id, "load_state", fields)


def _load(request: Request, facts: RunFacts, body: LoadWeights) -> dict[str, Any]:
    """The fields of an operation that loads saved weights into a run, which are noted. As they
    were, where the request is repeated: the state may be gone by now, or be another one of this
    name. Wrong, Refusal.
    """
    assert body.seq_id is not None, "the body was checked"
    steps, seq = steps_of(request), body.seq_id + facts.shift
    if steps.runs.is_repeat(facts, seq):
        before = steps.sessions.loaded_by(facts.id, seq)
        if before is None or (before.path, before.with_optimizer) != (body.path, body.optimizer):
            return load_fields(request, facts, body)
        return before.fields
    fields = load_fields(request, facts, body)
    load = LoadFacts(
        run=str(facts.id),
        seq=seq,
        path=body.path,
        with_optimizer=body.optimizer,
        fields=fields,
    )
    steps.sessions.add_load(facts.id, load)
    return fields


def load_fields(request: Request, facts: RunFacts, body: LoadWeights) -> dict[str, Any]:
    """The fields of an operation that loads saved weights into a run of these facts. Refusal (404)
    for what is not there; Wrong for weights of another base or rank.
    """
    path = weights_path(body.path)
    other = client_of_token(request, body.weights_access_token)
    source, saved = visible_weights(request, path, as_client=other)
    if saved.kind != "weights":
        raise Wrong(
            f"path: {path} was saved for samplers, want tinker://RUN/weights/NAME, which "
            "save_state makes."
        )
    for what, was, is_now in (
        ("base model", source.base_model, facts.base_model),
        ("LoRA rank", source.rank, facts.rank),
        ("train_attn", source.train_attn, facts.train_attn),
        ("train_mlp", source.train_mlp, facts.train_mlp),
        ("train_unembed", source.train_unembed, facts.train_unembed),
    ):
        if was != is_now:
            raise Wrong(
                f"path: {path} has the {what} {was!r}, and this run has {is_now!r}. Begin a run "
                "from it: create_training_client_from_state."
            )
    return {"with_optimizer": body.optimizer, **_place(request, source, saved)}


def _place(request: Request, source: RunFacts, saved: SavedFacts) -> dict[str, Any]:
    """Where a saved state lies, and its digest."""
    steps = steps_of(request)
    result = None if source.exp_id is None else steps.runs.of(source).result(saved.seq)
    if result is not None:
        place = steps.runs.folder(source) / str(result.fields["folder"])
        return {"folder": str(place), "sha256": result.fields.get("sha256")}
    inner = list(steps.folder_of(source, saved).glob("step-*"))
    if not inner:
        text = f"path: the state {saved.name} of {saved.run} is not there any more."
        raise Wrong(f"{text} Load another.")
    return {"folder": str(max(inner, key=lambda one: int(one.name.removeprefix("step-"))))}


async def get_info(request: Request) -> Response:
    """What a run trains."""
    body = await read_body(request, ModelWish, keeper_of(request).config)
    facts = visible_run(request, body.model_id)
    offer = steps_of(request).offer(facts.base_model)
    data = {
        "arch": str(offer.offer.experiment["task"]),
        "model_name": offer.name,
        "tokenizer_id": offer.tokenizer,
    }
    info = {
        "type": "get_info",
        "model_data": data,
        "model_id": str(facts.id),
        "model_name": offer.name,
        "is_lora": True,
        "lora_rank": facts.rank,
        "optimizer_config": {"type": "adamw"},
    }
    return PlainJSON(info)


async def unload_model(request: Request) -> Response:
    """End a run: it saves its state and gives its device back."""
    body = await read_body(request, ModelWish, keeper_of(request).config)
    facts = visible_run(request, body.model_id, writes=True)
    seq = await end_run(request, facts)
    return PlainJSON(_future(facts, seq - facts.shift))


async def end_run(request: Request, facts: RunFacts) -> int:
    """Write the last operation of a run, if it has none yet; its number."""
    steps = steps_of(request)
    offer = steps.offers.get(facts.base_model)  # None: it is offered no more, and the run may end
    most = Driven().log_bytes if offer is None else offer.driven.log_bytes
    return await steps.runs.end(facts, most_bytes=2 * most)


async def acknowledge(
    request: Request,
    facts: RunFacts,
    seq: int,
    kind: Kind,
    fields: Mapping[str, Any],
    payload: bytes = b"",
    *,
    room: QuotaRoom | None = None,
) -> Response:
    """Write an operation durably, and answer with its future. seq: the client's number; room: what
    it uses, which one that was sent before does not.
    """
    steps = steps_of(request)
    refuse_finished(steps.sessions, facts.session)
    # a client that was started again beats in a session of its own
    await run_in_threadpool(steps.sessions.beat, facts.session)
    if payload:
        await run_in_threadpool(refuse_on_full_disk, keeper_of(request), len(payload))
    driven = steps.offer(facts.base_model).driven
    number = seq + facts.shift
    most = driven.log_bytes
    _, is_first = await steps.runs.append(facts, number, kind, fields, payload, most_bytes=most)
    if room is not None:
        room.is_needed = is_first
    return PlainJSON(_future(facts, seq))


async def refuse(
    request: Request, facts: RunFacts, seq: int, kind: Kind, text: str, digest: Callable[[], str]
) -> Response:
    """Write down durably that an operation was refused, so that its number is used; its future says
    why. digest: of the request.
    """
    sent = await run_in_threadpool(digest)
    fields = {"of": kind, "error": text, "category": "user", "request": sent}
    return await acknowledge(request, facts, seq, "refused", fields)


async def _refused_before(
    request: Request, facts: RunFacts, seq: int, kind: Kind, digest: Callable[[], str]
) -> Response | None:
    """The future of an operation that was refused when it was sent first: what it was refused for
    may be over by now, and it is the same operation. None for any other.
    """
    runs = steps_of(request).runs
    text = await run_in_threadpool(runs.refusal_of, facts, seq + facts.shift)
    return None if text is None else await refuse(request, facts, seq, kind, text, digest)


def _future(facts: RunFacts, seq: int) -> dict[str, Any]:
    return {"request_id": f"{facts.id}:{seq}", "model_id": str(facts.id)}


ROUTES = [
    Route(f"{API}/forward_backward", forward_backward, methods=["POST"]),
    Route(f"{API}/optim_step", optim_step, methods=["POST"]),
    Route(f"{API}/save_weights", save_weights, methods=["POST"]),
    Route(f"{API}/save_weights_for_sampler", save_for_sampler, methods=["POST"]),
    Route(f"{API}/save_weights_external", save_external, methods=["POST"]),
    Route(f"{API}/get_info", get_info, methods=["POST"]),
    Route(f"{API}/unload_model", unload_model, methods=["POST"]),
]
