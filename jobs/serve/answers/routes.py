"""/v1/embeddings, /v1/completions and /v1/chat/completions, for trying a tuned model.

For production, serve the export with vLLM or text-embeddings-inference. Formats: openai 3.54.
"""

from __future__ import annotations

import base64
import secrets
import struct
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jobs.errors import without_places
from jobs.record.paths import is_exp_id
from jobs.serve.answers.asked import (
    MAX_TOKENS,
    Ask,
    AskChat,
    AskCompletion,
    AskEmbeddings,
    AskScores,
)
from jobs.serve.answers.replies import ModelAnswer, event, events
from jobs.serve.answers.workers import CannotAnswer, Overloaded, Workers
from jobs.serve.dialect.names import run_of
from jobs.serve.lathe_routes import find_run
from jobs.serve.requests import (
    Refusal,
    client_of,
    keeper_of,
    read_body,
    shares_of,
)

READERS = ("cross_attention", "fid", "summariser")  # they answer in one piece
_TEXT, _CHAT = 16, 1024  # tokens of an answer, if the request does not say


async def embeddings(request: Request) -> Response:
    """Embed texts with a tuned retriever."""
    body = await read_body(request, AskEmbeddings, keeper_of(request).config)
    answer = await _ask_once(request, body, {"texts": body.input, "side": body.side})
    vectors: list[str] = answer["vectors"]  # fp32 in base64
    width = len(base64.b64decode(vectors[0])) // 4
    if body.dimensions not in (None, width):
        text = f"dimensions: got {body.dimensions}, want {width}: {body.model} was not trained to "
        raise Refusal(400, f"{text}keep its meaning when a vector is cut.", param="dimensions")
    is_packed = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": at, "embedding": one if is_packed else _numbers(one)}
        for at, one in enumerate(vectors)
    ]
    usage = {"prompt_tokens": answer["tokens"], "total_tokens": answer["tokens"], **_cut(answer)}
    return JSONResponse({"object": "list", "data": data, "model": body.model, "usage": usage})


def _numbers(vector: str) -> list[float]:
    content = base64.b64decode(vector)
    return [*struct.unpack(f"<{len(content) // 4}f", content)]


async def score(request: Request) -> Response:
    """Score the plausibility of statements, 0 to 1, with a tuned verifier."""
    body = await read_body(request, AskScores, keeper_of(request).config)
    answer = await _ask_once(request, body, {"statements": body.statements})
    return JSONResponse({"model": body.model, "scores": answer["scores"], **_cut(answer)})


def _cut(answer: dict[str, Any]) -> dict[str, int]:
    """How many tokens of what was asked the model did not read, if there are such."""
    return {"cut_tokens": answer["cut_tokens"]} if "cut_tokens" in answer else {}


async def completions(request: Request) -> Response:
    """Continue texts with a tuned language model."""
    body = await read_body(request, AskCompletion, keeper_of(request).config)
    limit = _TEXT if body.max_tokens is None else body.max_tokens
    question = {"prompts": body.prompt, "max_tokens": min(limit, MAX_TOKENS)}
    reply = ModelAnswer(
        body.model,
        is_chat=False,
        num_answers=body.num_answers,
        num_texts=body.num_texts,
        has_logprobs=body.logprobs is not None,
    )
    return await _answer(request, body, question, reply)


async def chat_completions(request: Request) -> Response:
    """Write the next message of a chat with a tuned language model."""
    body = await read_body(request, AskChat, keeper_of(request).config)
    messages = [message.row() for message in body.messages]
    question = {"messages": messages, "max_tokens": min(body.limit or _CHAT, MAX_TOKENS)}
    reply = ModelAnswer(
        body.model,
        is_chat=True,
        num_answers=body.num_answers,
        num_texts=body.num_texts,
        has_logprobs=bool(body.logprobs),
    )
    return await _answer(request, body, question, reply)


async def _answer(
    request: Request, body: AskChat | AskCompletion, question: dict[str, Any], reply: ModelAnswer
) -> Response:
    """The answer to a completion or a chat, whole or streamed."""
    seed = secrets.randbelow(2**31) if body.seed is None else body.seed
    question |= {**body.how(), "seed": seed}
    run, _ = _run_of(request, body.model)
    if keeper_of(request).index.experiment(run.name).get("task") in READERS:
        pieces = _read(request, body, question)
    elif body.contexts is None:
        pieces = _ask_worker(request, body, question)
    else:
        raise Refusal(400, f"{body.model} reads no contexts. Remove them.", param="contexts")
    if not body.stream:
        async for piece in pieces:
            reply.add(piece)
        return JSONResponse(reply.whole())
    reply.is_stream = True
    first = await anext(pieces)  # a Refusal must be raised before the stream begins
    options = body.stream_options
    how = {
        "has_usage": options is not None and bool(options.include_usage),
        "is_held": isinstance(body, AskChat) and body.has_tools,
    }
    chunks = _to_the_end(events(reply, _after(first, pieces), **how))
    return StreamingResponse(chunks, media_type="text/event-stream")


async def _to_the_end(chunks: AsyncGenerator[str]) -> AsyncGenerator[str]:
    """The chunks of a stream. What goes wrong in its middle is its last chunk, as at OpenAI: the
    status was sent long before.
    """
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
        except Refusal as refusal:
            yield event(refusal.body)


async def _after(
    first: dict[str, Any], rest: AsyncGenerator[dict[str, Any]]
) -> AsyncGenerator[dict[str, Any]]:
    """The pieces again, of which the first one was taken already."""
    async with aclosing(rest):
        yield first
        async for piece in rest:
            yield piece


async def _read(
    request: Request, body: AskChat | AskCompletion, question: dict[str, Any]
) -> AsyncGenerator[dict[str, Any]]:
    """A reader's answer to the prompt, or to the user's message, in one piece."""
    wrong = body.beyond_readers()
    if wrong:
        text = f"{wrong[0]}: {body.model} answers one question at a time, in one text. Send one "
        raise Refusal(400, f"{text}message of the user, or one prompt, without it.", param=wrong[0])
    text = body.prompt[0] if isinstance(body, AskCompletion) else body.messages[0].content
    limit = body.limit if isinstance(body, AskChat) else body.max_tokens
    query = {name: question[name] for name in ("temperature", "seed", "stop")}
    query |= {"question": text, "contexts": body.contexts or []}
    answer = await _ask_once(request, body, {**query, "max_tokens": limit or MAX_TOKENS})
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
        text = f"{body.model}: {without_places(str(error)).rstrip('.')}."
        raise Refusal(400, text, param=error.param) from None


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
