"""/v1/embeddings, /v1/completions and /v1/chat/completions, for trying a tuned model.

For production, serve the export with vLLM or text-embeddings-inference. Formats: openai 3.54.
"""

from __future__ import annotations

import base64
import json
import secrets
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jobs.errors import without_places
from jobs.record.paths import is_exp_id
from jobs.serve.answers.workers import CannotAnswer, Overloaded, Workers
from jobs.serve.dialect.names import run_of
from jobs.serve.lathe_routes import find_run
from jobs.serve.requests import (
    Body,
    Refusal,
    client_of,
    keeper_of,
    read_body,
    shares_of,
)

MAX_TEXTS, MAX_TOKENS = 256, 4096
READERS = ("cross_attention", "fid", "summariser")  # they answer in one piece
Text = Annotated[str, Field(min_length=1, max_length=200_000)]
ModelId = Annotated[str, Field(max_length=256)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Weights = Literal["final", "base"]  # trained, or as they were before
Stop = Text | Annotated[list[Text], Field(max_length=4)]


class AskEmbeddings(Body):
    """A request for the vectors of texts. side: which of the two encoders of a retriever to use."""

    model: ModelId
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
    encoding_format: Literal["float", "base64"] = "float"
    side: Literal["query", "passage"] = "query"
    weights: Weights = "final"
    user: str | None = None


class AskText(Body):
    """A request to continue a text or answer a question. contexts: passages for a reader."""

    model: ModelId
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Temperature | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: Stop | None = None
    stream: bool = False
    n: Literal[1] = 1
    user: str | None = None
    contexts: Annotated[list[Text], Field(max_length=MAX_TEXTS)] | None = None
    weights: Weights = "final"


class AskCompletion(AskText):
    """A request to continue a text."""

    prompt: Text


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(max_length=200_000)]


class AskChat(AskText):
    """A request for the next message of a chat."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1000)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None


class AskScores(Body):
    """A request for the plausibility of statements."""

    model: ModelId
    statements: Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
    weights: Weights = "final"


Ask = AskEmbeddings | AskText | AskScores


async def embeddings(request: Request) -> Response:
    """Embed texts with a tuned retriever."""
    body = await read_body(request, AskEmbeddings, keeper_of(request).config)
    texts = [body.input] if isinstance(body.input, str) else body.input
    answer = await _ask_once(request, body, {"texts": texts, "side": body.side})
    data: list[dict[str, Any]] = []
    for index, values in enumerate(answer["vectors"]):
        vector = values
        if body.encoding_format != "float":
            vector = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
        data.append({"object": "embedding", "index": index, "embedding": vector})
    usage = {"prompt_tokens": answer["tokens"], "total_tokens": answer["tokens"], **_cut(answer)}
    return JSONResponse({"object": "list", "data": data, "model": body.model, "usage": usage})


async def score(request: Request) -> Response:
    """Score the plausibility of statements, 0 to 1, with a tuned verifier."""
    body = await read_body(request, AskScores, keeper_of(request).config)
    answer = await _ask_once(request, body, {"statements": body.statements})
    return JSONResponse({"model": body.model, "scores": answer["scores"], **_cut(answer)})


async def completions(request: Request) -> Response:
    """Continue a text with a tuned language model."""
    body = await read_body(request, AskCompletion, keeper_of(request).config)
    return await _answer(request, body, {"prompt": body.prompt}, body.max_tokens, default=16)


async def chat_completions(request: Request) -> Response:
    """Write the next message of a chat with a tuned language model."""
    body = await read_body(request, AskChat, keeper_of(request).config)
    messages = [message.model_dump() for message in body.messages]
    limit = body.max_completion_tokens or body.max_tokens
    return await _answer(request, body, {"messages": messages}, limit, default=256)


async def _answer(
    request: Request, body: AskText, prompt: dict[str, Any], limit: int | None, *, default: int
) -> Response:
    """The answer to a completion or a chat. prompt: {"prompt": text} or {"messages": list}. limit:
    the most tokens; None: `default`, for a reader its experiment's own.
    """
    is_chat = "messages" in prompt
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    seed = secrets.randbelow(2**31) if body.seed is None else body.seed
    run, _ = _run_of(request, body.model)
    is_reader = keeper_of(request).index.experiment(run.name).get("task") in READERS
    most = limit or (MAX_TOKENS if is_reader else default)
    question = {**prompt, "max_tokens": most, "temperature": body.temperature}
    question |= {"seed": seed, "stop": stop}
    if is_reader:
        pieces = _read(request, body, question)
    elif body.contexts is None:
        pieces = _ask_worker(request, body, question)
    else:
        raise Refusal(400, f"{body.model} reads no contexts. Remove them.", param="contexts")
    head = _head(body.model, is_chat=is_chat, is_stream=body.stream)
    if body.stream:
        first = await anext(pieces)  # a Refusal must be raised before the stream begins
        stream = _stream(first, pieces, head, is_chat=is_chat)
        return StreamingResponse(stream, media_type="text/event-stream")
    parts = [piece async for piece in pieces]
    text = "".join(piece.get("text", "") for piece in parts)
    end = parts[-1]
    content: dict[str, Any] = {"text": text}
    if is_chat:
        content = {"message": {"role": "assistant", "content": text, "refusal": None}}
    choice = {"index": 0, **content, "finish_reason": end["finish"], "logprobs": None}
    usage = {"prompt_tokens": end["prompt_tokens"], "completion_tokens": end["tokens"]}
    usage["total_tokens"] = end["prompt_tokens"] + end["tokens"]
    usage |= _cut(end)
    return JSONResponse({**head, "choices": [choice], "usage": usage})


def _cut(answer: dict[str, Any]) -> dict[str, int]:
    """How many tokens of what was asked the model did not read, if there are such."""
    return {"cut_tokens": answer["cut_tokens"]} if "cut_tokens" in answer else {}


def _head(model: str, *, is_chat: bool, is_stream: bool) -> dict[str, Any]:
    kind = "text_completion"
    if is_chat:
        kind = "chat.completion.chunk" if is_stream else "chat.completion"
    name = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


async def _stream(
    first: dict[str, Any],
    rest: AsyncIterator[dict[str, Any]],
    head: dict[str, Any],
    *,
    is_chat: bool,
) -> AsyncGenerator[str]:
    """Server-sent events: a chunk for each piece of the text, then "[DONE]"."""

    def chunk(piece: dict[str, Any], *, is_first: bool) -> str:
        text = piece.get("text", "")
        delta: dict[str, Any] = {"content": text} if text else {}
        if is_first:
            delta = {"role": "assistant", **delta}
        content: dict[str, Any] = {"delta": delta} if is_chat else {"text": text}
        choice = {"index": 0, **content, "finish_reason": piece.get("finish"), "logprobs": None}
        usage = {"usage": _cut(piece)} if "cut_tokens" in piece else {}
        return f"data: {json.dumps({**head, 'choices': [choice], **usage})}\n\n"

    async def pieces() -> AsyncGenerator[dict[str, Any]]:
        yield first
        async for piece in rest:
            yield piece

    is_first = True
    async for piece in pieces():
        yield chunk(piece, is_first=is_first)
        is_first = False
    yield "data: [DONE]\n\n"


async def _read(
    request: Request, body: AskText, query: dict[str, Any]
) -> AsyncGenerator[dict[str, Any]]:
    """A reader's answer to the prompt, or to the user's last message, in one piece."""
    messages = cast("list[dict[str, str]]", query.pop("messages", []))
    user_texts = [message["content"] for message in messages if message["role"] == "user"]
    question = query.pop("prompt", None) or (user_texts[-1] if user_texts else "")
    query |= {"question": question, "contexts": body.contexts or []}
    answer = await _ask_once(request, body, query)
    yield {"text": answer.pop("text")}
    yield answer


async def _ask_worker(
    request: Request, body: Ask, question: dict[str, Any]
) -> AsyncGenerator[dict[str, Any]]:
    """The answer of the model's worker, piece by piece. Refusal."""
    run, weights = _run_of(request, body.model)
    weights = weights if body.weights == "final" else body.weights
    try:
        with shares_of(request).hold("answers", client_of(request).name):
            worker = await cast("Workers", request.app.state.workers).of(run, weights)
            async with aclosing(worker.ask(question)) as pieces:
                async for piece in pieces:
                    yield piece
    except Overloaded:
        text = "The service is busy with the most models or requests that it allows. Ask again."
        raise Refusal(429, text, code="rate_limit_exceeded", retry_after_s=5) from None
    except CannotAnswer as error:
        raise Refusal(400, f"{body.model}: {without_places(str(error))}.", param="model") from None


async def _ask_once(request: Request, body: Ask, question: dict[str, Any]) -> dict[str, Any]:
    """The answer of the model's worker, if it comes in one piece. Refusal."""
    (answer,) = [piece async for piece in _ask_worker(request, body, question)]
    return answer


def _run_of(request: Request, model: str) -> tuple[Path, str]:
    """The run folder of a tuned model, of a checkpoint, or of a run's id, if this client sees it,
    and which of the run's models it is; else Refusal.
    """
    if is_exp_id(model):
        return find_run(request, model).path, "final"
    return run_of(request, model)


ROUTES = [
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/lathe/v1/score", score, methods=["POST"]),
]
