"""Votes on the answers of a judged run: two answers side by side, without whose they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.record.times import now
from jobs.serve.lathe_routes import find_run
from jobs.serve.live.runs import mark
from jobs.serve.requests import (
    Body,
    PlainJSON,
    Refusal,
    client_of,
    keeper_of,
    one_of,
    quote,
    read_body,
    writer_of,
)
from trainer.files.atomic import read_small
from trainer.judging.votes import (
    ANSWERS,
    VOTES,
    AnswerPair,
    Vote,
    add_vote,
    choices_of,
    read_pairs,
    read_votes,
)
from trainer.metrics.win_rate import Preferred, win_rate

LONGEST_TEXT = 20_000  # letters of one text that is shown


class CastVote(Body):
    """A vote: which of the two answers of a pair is better."""

    pair: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    better: Literal["left", "right", "equal"]


def show_votes(request: Request) -> Response:
    """How many pairs of answers a run has, how many the client has voted on, and the `next` one
    that waits for its vote, without whose answers they are. Parameters: `after`, the pair that is
    passed over; part=result, the win rate of the trained model; format=preferences, the votes as
    rows of preferences.
    """
    folder = find_run(request).path
    form = one_of(request, "format", ("json", "preferences"), "json")
    part = one_of(request, "part", ("next", "result"), "next")
    if form == "preferences":
        writer_of(request)  # who only reads sees no content of files
        return Response(_content(folder / VOTES), media_type="application/jsonl")
    pairs = pairs_of(folder)
    votes = read_votes(folder, pairs)
    if part == "result":
        return PlainJSON(_result(votes))
    client = client_of(request)
    own = {vote.pair for vote in votes if vote.voter == client.name}
    view = None
    if client.role != "read":
        pair = _next_pair(pairs, own, request.query_params.get("after"))
        view = None if pair is None else _view(pair, client.name)
    counts = {"pairs": len(pairs), "own": len(own), "votes": len(votes)}
    return PlainJSON({**counts, "next": view})


async def cast_vote(request: Request) -> Response:
    """Vote on a pair of answers; a second vote of the client on the pair replaces the first."""
    body = await read_body(request, CastVote, keeper_of(request).config)
    return await run_in_threadpool(_cast, request, body)


def _cast(request: Request, body: CastVote) -> Response:
    client, folder = writer_of(request), find_run(request).path
    pair = next((one for one in pairs_of(folder) if one.digest == body.pair), None)
    if pair is None:
        text = f"pair: {quote(body.pair)} is none of this run now: it was judged anew. Ask again."
        raise Refusal(409, text, param="pair", code="pair_not_found")
    left = pair.left_of(client.name)
    sides: dict[str, Preferred] = {"left": left, "equal": "equal"}
    sides["right"] = "before" if left == "after" else "after"
    vote = Vote(pair.row, pair.digest, client.name, sides[body.better], left, now())
    add_vote(folder, pair, vote)
    return PlainJSON({"pair": pair.digest, "better": body.better}, 201)


def pairs_of(folder: Path) -> Sequence[AnswerPair]:
    """The pairs of a run that are shown."""
    path = folder / ANSWERS
    return _pairs(path, mark(path))


@lru_cache(maxsize=2)
def _pairs(path: Path, facts: str) -> Sequence[AnswerPair]:
    """facts: a text that changes with the file."""
    return read_pairs(path)


def _content(path: Path) -> bytes:
    with suppress(FileNotFoundError):
        return read_small(path)
    return b""


def _next_pair(pairs: Sequence[AnswerPair], own: set[str], after: str | None) -> AnswerPair | None:
    """The first pair without a vote of the client behind the pair `after`, else from the start."""
    place = next((n + 1 for n, one in enumerate(pairs) if one.digest == after), 0)
    ordered = [*pairs[place:], *pairs[:place]]
    return next((one for one in ordered if one.digest not in own), None)


def _view(pair: AnswerPair, voter: str) -> dict[str, Any]:
    """A pair as a voter sees it."""
    left = pair.left_of(voter)
    answers = [pair.answer(left), pair.answer("before" if left == "after" else "after")]
    return {
        "pair": pair.digest,
        "row": pair.row,
        "prompt": _turns(pair.prompt),
        "references": [_text(one) for one in pair.references],
        "left": _text(answers[0]),
        "right": _text(answers[1]),
    }


def _turns(prompt: Any) -> list[dict[str, str]]:
    """[{"role", "text"}] of a prompt; the role of a text is ""."""
    if not isinstance(prompt, list):
        return [{"role": "", "text": _text(prompt)}]
    turns: list[dict[str, str]] = []
    for turn in cast("list[Mapping[str, Any]]", prompt):
        parts = [turn[name] for name in ("content", "tool_calls") if turn.get(name)]
        text = "\n".join(map(_text, parts))
        turns.append({"role": str(turn.get("role", "")), "text": text})
    return turns


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


def _result(votes: Sequence[Vote]) -> dict[str, Any]:
    """What the votes say of the trained model."""
    rate = win_rate(choices_of(votes))
    voters = {vote.voter for vote in votes}
    counts = {"votes": len(votes), "voters": len(voters)}
    if rate is None:
        return {**counts, "win_rate": None, "words": ""}
    return {**counts, "win_rate": asdict(rate), "words": rate.words}


_PATH = "/lathe/v1/runs/{exp_id}/votes"
ROUTES = [
    Route(_PATH, show_votes),
    Route(_PATH, cast_vote, methods=["POST"]),
]
