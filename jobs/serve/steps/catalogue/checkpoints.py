"""Saved weights: listed, described, deleted, copied, and given an end."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.record.times import now
from jobs.serve.job_view import seconds
from jobs.serve.requests import (
    PlainJSON,
    Refusal,
    client_of,
    keeper_of,
    quote,
    read_body,
    writer_of,
)
from jobs.serve.steps.bodies import CopyWeights, SetTtl, WeightsInfo
from jobs.serve.steps.context import (
    Steps,
    check_project,
    client_of_token,
    digest_of,
    steps_of,
    visible_run,
    visible_session,
    visible_weights,
)
from jobs.serve.steps.futures import API
from jobs.serve.steps.names import (
    KIND_OF_CHECKPOINT,
    MOST_CLIENTS,
    SESSION,
    ClientId,
    WeightsPath,
    checkpoint_path,
    weights_path,
)
from jobs.serve.steps.sessions import (
    RunFacts,
    SavedFacts,
    SessionFacts,
    later,
    refuse_finished,
    warn_once,
)
from jobs.serve.steps.upkeep.usage import Demand, room_for
from jobs.serve.tickets import id_of_key, new_id
from jobs.serve.uploads import refuse_on_full_disk
from trainer.errors import CheckpointError
from trainer.files.atomic import refusals

MOST_LISTED = 1000  # in one answer


def list_of_run(request: Request) -> Response:
    """The saved weights of a run."""
    run = visible_run(request, request.path_params["run"])
    return PlainJSON({"checkpoints": checkpoints_of(steps_of(request), run), "cursor": None})


def list_all(request: Request) -> Response:
    """The saved weights of all runs of a client, the newest first."""
    steps, (limit, offset) = steps_of(request), page_of(request, usual=100)
    runs = runs_of_client(request)
    every = [one for run in runs for one in readable_checkpoints_of(steps, run) or ()]
    every.sort(key=lambda one: one["time"], reverse=True)
    cursor = {"offset": offset, "limit": limit, "total_count": len(every)}
    return PlainJSON({"checkpoints": every[offset : offset + limit], "cursor": cursor})


def page_of(request: Request, *, usual: int) -> tuple[int, int]:
    """(limit, offset) of a list. Refusal (400) for what are none."""
    numbers: list[int] = []
    for name, value, most in (("limit", usual, MOST_LISTED), ("offset", 0, 10**9)):
        text = request.query_params.get(name, str(value))
        if not (text.isascii() and text.isdigit() and len(text) < 11 and int(text) <= most):
            raise Refusal(400, f"{name}: got {quote(text)}, want 0 to {most}.", param=name)
        numbers.append(int(text))
    return numbers[0], numbers[1]


def runs_of_client(request: Request) -> list[RunFacts]:
    """The training runs that a client sees."""
    steps, client = steps_of(request), client_of(request)
    sessions = steps.sessions
    every = (run for session in sessions.ids() for run in sessions.runs(session))
    return [run for run in every if client.sees(run.owner)]


def checkpoints_of(steps: Steps, run: RunFacts) -> list[dict[str, Any]]:
    """The saved weights of a run in the format of the SDK."""
    every = steps.sessions.all_saved(run.id, lambda one: steps.has_saved(one, run))
    return [checkpoint(steps, run, facts) for facts in every]


def readable_checkpoints_of(steps: Steps, run: RunFacts) -> list[dict[str, Any]] | None:
    """The same for a list of many runs; None for a run whose results were altered: it hides no
    other.
    """
    try:
        return checkpoints_of(steps, run)
    except CheckpointError as error:
        warn_once(steps.runs.folder(run), str(error))
        return None


def checkpoint(steps: Steps, run: RunFacts, facts: SavedFacts) -> dict[str, Any]:
    """Saved weights in the format of the SDK. Source: `Checkpoint` of tinker 0.38.0."""
    path = WeightsPath(run.id, facts.kind, facts.name)
    return {
        "checkpoint_id": path.checkpoint_id,
        "checkpoint_type": KIND_OF_CHECKPOINT[facts.kind],
        "time": facts.created_at,
        "tinker_path": str(path),
        "size_bytes": size_of(steps.folder_of(run, facts)),
        "public": False,
        "user_metadata": texts_of(facts.user_metadata),
        "expires_at": steps.sessions.expires_at(run.id, facts),
    }


def texts_of(values: dict[str, Any] | None) -> dict[str, str] | None:
    """What a client said of something, with texts as values, as the SDK reads them."""
    if values is None:
        return None
    return {key: one if isinstance(one, str) else repr(one) for key, one in values.items()}


def size_of(folder: Path) -> int:
    """The bytes of all files below a folder."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # it was saved again meanwhile, or deleted
                size += os.lstat(os.path.join(place, name)).st_size
    return size


def _named(request: Request, *, writes: bool) -> tuple[RunFacts, SavedFacts]:
    params = request.path_params
    path = checkpoint_path(params["run"], f"{params['kind']}/{params['name']}")
    return visible_weights(request, path, writes=writes)


def delete(request: Request) -> Response:
    """Delete saved weights: they are listed no more, and their bytes are freed."""
    run, facts = _named(request, writes=True)
    steps, path = steps_of(request), WeightsPath(run.id, facts.kind, facts.name)
    if steps.sessions.saved(path, lambda one: steps.may_be_saved(one, run)) != facts:
        text = f"{facts.kind}/{facts.name} is being saved again. Delete it when that is done."
        raise Refusal(409, text, code="being_saved", retry_after_s=5)
    remove(steps, run, facts)
    return Response(status_code=204)


def remove(steps: Steps, run: RunFacts, facts: SavedFacts) -> None:
    """Note durably that saved weights are deleted, and free their bytes."""
    steps.sessions.mark_deleted(run.id, facts)
    shutil.rmtree(steps.folder_of(run, facts), ignore_errors=True)


async def set_ttl(request: Request) -> Response:
    """Set when saved weights expire."""
    body = await read_body(request, SetTtl, keeper_of(request).config)
    run, facts = await run_in_threadpool(_named, request, writes=True)
    sessions = steps_of(request).sessions
    await run_in_threadpool(sessions.set_expiry, run.id, facts, later(body.ttl_seconds))
    return Response(status_code=204)


async def weights_info(request: Request) -> Response:
    """What saved weights are: enough to begin a run with them."""
    body = await read_body(request, WeightsInfo, keeper_of(request).config)
    path = weights_path(body.tinker_path, param="tinker_path")
    run, _ = await run_in_threadpool(visible_weights, request, path)
    info = {
        "base_model": run.base_model,
        "optimizer_config": {"type": "adamw"},
        "is_lora": True,
        "lora_rank": run.rank,
        "train_unembed": run.train_unembed,
        "train_mlp": run.train_mlp,
        "train_attn": run.train_attn,
    }
    return PlainJSON(info)


async def copy_weights(request: Request) -> Response:
    """Copy saved weights into a run of their own, which is not trained."""
    body = await read_body(request, CopyWeights, keeper_of(request).config)
    writer_of(request)
    check_project(body.destination_project_id, "destination_project_id")
    token = request.headers.get("x-tinker-weights-access-token") or body.weights_access_token
    other = client_of_token(request, token)
    async with room_for(request, Demand()):
        path = await run_in_threadpool(_copy, request, body, other)
    return PlainJSON({"tinker_path": str(path)})


def _copy(request: Request, body: CopyWeights, other: Any) -> WeightsPath:
    steps, client = steps_of(request), writer_of(request)
    number = body.model_seq_id if body.model_seq_id is not None else 0
    if number >= MOST_CLIENTS:
        text = f"model_seq_id: got {number}, want less than {MOST_CLIENTS}."
        raise Refusal(400, text, param="model_seq_id")
    key = request.headers.get("x-idempotency-key", "")
    if body.session_id is not None:
        session = visible_session(request, body.session_id, writes=True).id
        refuse_finished(steps.sessions, session)
    else:
        session = id_of_key(client.name, f"copy {key[:256]}", SESSION) if key else new_id(SESSION)
    path = _copied_before(steps, ClientId(session, "train", number), body)
    if path is not None:
        return path
    source, saved = visible_weights(request, weights_path(body.source_path), as_client=other)
    if body.session_id is None:
        steps.sessions.create(
            SessionFacts(id=session, created_at=now(), owner=client.name, sdk_version="")
        )
    update = {
        "session": session,
        "number": number,
        "created_at": now(),
        "owner": client.name,
        "job": None,
        "exp_id": None,
        "begins_with": body.source_path,
        "request_digest": digest_of(body),
        "shift": 0,
    }
    run = steps.sessions.add_run(source.model_copy(update=update))
    if run.request_digest != digest_of(body):
        raise Refusal(409, f"{run.id} was made of another request. Use the next model_seq_id.")
    folder = steps.sessions.folder(session) / "copies" / str(number)
    refuse_on_full_disk(keeper_of(request), 0)
    _link(steps.folder_of(source, saved), folder)
    facts = saved.model_copy(
        update={
            "run": str(run.id),
            "seq": 0,
            "folder": str(folder),
            "created_at": now(),
            "expires_at": later(body.ttl_seconds),
        }
    )
    steps.sessions.add_saved(run.id, facts)
    return WeightsPath(run.id, saved.kind, saved.name)


def _copied_before(steps: Steps, name: ClientId, body: CopyWeights) -> WeightsPath | None:
    """Where the same request has copied weights before, which may be gone by now; else None."""
    run = steps.sessions.run(name)
    saved = None if run is None else steps.sessions.saved_by(name, 0)
    if run is None or saved is None or run.request_digest != digest_of(body):
        return None
    return WeightsPath(name, saved.kind, saved.name)


def _link(source: Path, target: Path) -> None:
    """Copy a folder by links to its files, which nobody changes: no bytes are doubled."""
    if target.is_dir():
        return
    aside = target.with_name(f".{target.name}-{time.monotonic_ns()}")
    with refusals(target):
        aside.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copytree(source, aside, copy_function=os.link)
        except OSError:  # another disk, or one without links
            shutil.rmtree(aside, ignore_errors=True)
            shutil.copytree(source, aside)
        os.rename(aside, target)


def expired(steps: Steps, runs: Iterable[RunFacts]) -> Iterable[tuple[RunFacts, SavedFacts]]:
    """The saved weights of runs whose time is over."""
    for run in runs:
        try:
            every = _expired(steps, run)
        except CheckpointError as error:  # its results were altered: it keeps no other
            warn_once(steps.runs.folder(run), str(error))
            continue
        yield from ((run, facts) for facts in every)


def _expired(steps: Steps, run: RunFacts) -> list[SavedFacts]:
    # one that is still to be saved, with the same name and folder, keeps the one before it
    every = steps.sessions.all_saved(
        run.id, lambda one: steps.may_be_saved(one, run), has_expired=True
    )
    now_s = datetime.now(timezone.utc).timestamp()
    timed = [(facts, steps.sessions.expires_at(run.id, facts)) for facts in every]
    over = [facts for facts, at in timed if at is not None and seconds(at) <= now_s]
    return [facts for facts in over if steps.has_saved(facts, run)]


CHECKPOINTS = f"{API}/training_runs/{{run}}/checkpoints"
ONE = f"{CHECKPOINTS}/{{kind}}/{{name}}"
ROUTES = [
    Route(f"{API}/checkpoints", list_all),
    Route(CHECKPOINTS, list_of_run),
    Route(ONE, delete, methods=["DELETE"]),
    Route(f"{ONE}/ttl", set_ttl, methods=["PUT"]),
    Route(f"{API}/weights_info", weights_info, methods=["POST"]),
    Route(f"{API}/copy_weights", copy_weights, methods=["POST"]),
]
