"""/v1/embeddings, /v1/completions and /v1/chat/completions of tuned models, to look at them.

For production serve the export itself: vLLM, or text-embeddings-inference. Shapes: openai 3.54.
"""

from __future__ import annotations

import base64
import json
import secrets
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jobs.serve.answers.workers import CannotAnswer, Overloaded, Workers
from jobs.serve.requests import Body, Refusal, keeper_of, read_body, tuned_job

MAX_TEXTS, MAX_TOKENS = 256, 4096
READERS = ("cross_attention", "fid", "summariser")  # each answers a question at once
Text = Annotated[str, Field(min_length=1, max_length=200_000)]
ModelId = Annotated[str, Field(max_length=256)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Stop = Text | Annotated[list[Text], Field(max_length=4)]


class AskEmbeddings(Body):
    """Texts whose vectors are wanted. side: "query" or "passage", for retrievers with two."""

    model: ModelId
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
    encoding_format: Literal["float", "base64"] = "float"
    side: Literal["query", "passage"] = "query"
    user: str | None = None


class AskText(Body):
    """How a text is to go on, or a question is answered. contexts: what a reader reads with it."""

    model: ModelId
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Temperature | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: Stop | None = None
    stream: bool = False
    n: Literal[1] = 1
    user: str | None = None
    contexts: Annotated[list[Text], Field(max_length=MAX_TEXTS)] | None = None


class AskCompletion(AskText):
    """A text to go on with."""

    prompt: Text


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(max_length=200_000)]


class AskChat(AskText):
    """A chat to go on with."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1000)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None


class AskScores(Body):
    """Statements whose plausibility is wanted."""

    model: ModelId
    statements: Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]


async def embeddings(request: Request) -> Response:
    """Vectors of texts, by a tuned retriever."""
    body = await read_body(request, AskEmbeddings, keeper_of(request).config)
    texts = [body.input] if isinstance(body.input, str) else body.input
    answer = await _asked_once(request, body.model, {"texts": texts, "side": body.side})
    data = [
        {"object": "embedding", "index": index, "embedding": _vector(values, body.encoding_format)}
        for index, values in enumerate(answer["vectors"])
    ]
    usage = {"prompt_tokens": answer["tokens"], "total_tokens": answer["tokens"]}
    return JSONResponse({"object": "list", "data": data, "model": body.model, "usage": usage})


def _vector(values: list[float], form: str) -> list[float] | str:
    if form == "float":
        return values
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


async def score(request: Request) -> Response:
    """How plausible statements are, 0 to 1, by a tuned verifier."""
    body = await read_body(request, AskScores, keeper_of(request).config)
    answer = await _asked_once(request, body.model, {"statements": body.statements})
    return JSONResponse({"model": body.model, "scores": answer["scores"]})


async def completions(request: Request) -> Response:
    """A text that goes on, by a tuned language model."""
    body = await read_body(request, AskCompletion, keeper_of(request).config)
    return await _answer(request, body, {"prompt": body.prompt}, body.max_tokens or 16)


async def chat_completions(request: Request) -> Response:
    """The next message of a chat, by a tuned language model."""
    body = await read_body(request, AskChat, keeper_of(request).config)
    messages = [message.model_dump() for message in body.messages]
    most = body.max_completion_tokens or body.max_tokens or 256
    return await _answer(request, body, {"messages": messages}, most)


async def _answer(request: Request, body: AskText, begun: dict[str, Any], most: int) -> Response:
    """A text that goes on from a prompt, or a chat from its messages."""
    is_chat = "messages" in begun
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    seed = secrets.randbelow(2**31) if body.seed is None else body.seed
    asked = {**begun, "max_tokens": most, "temperature": body.temperature}
    asked |= {"seed": seed, "stop": stop}
    if _task_of(request, body.model) in READERS:
        pieces = _read(request, body, asked)
    elif body.contexts is None:
        pieces = _asked(request, body.model, asked)
    else:
        raise Refusal(400, f"{body.model} reads no contexts. Leave them out.", param="contexts")
    head = _head(body.model, is_chat=is_chat, is_stream=body.stream)
    if body.stream:
        first = await anext(pieces)  # a refusal is an answer of its own, before the stream begins
        stream = _streamed(first, pieces, head, is_chat=is_chat)
        return StreamingResponse(stream, media_type="text/event-stream")
    found = [piece async for piece in pieces]
    text = "".join(piece.get("text", "") for piece in found)
    end = found[-1]
    # what a chat was trained on has a blank before the answer
    text = text.removeprefix(" ") if is_chat else text
    content: dict[str, Any] = {"text": text}
    if is_chat:
        content = {"message": {"role": "assistant", "content": text, "refusal": None}}
    choice = {"index": 0, **content, "finish_reason": end["finish"], "logprobs": None}
    usage = {"prompt_tokens": end["prompt_tokens"], "completion_tokens": end["tokens"]}
    usage["total_tokens"] = end["prompt_tokens"] + end["tokens"]
    return JSONResponse({**head, "choices": [choice], "usage": usage})


def _head(model: str, *, is_chat: bool, is_stream: bool) -> dict[str, Any]:
    kind = "text_completion"
    if is_chat:
        kind = "chat.completion.chunk" if is_stream else "chat.completion"
    name = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


async def _streamed(
    first: dict[str, Any],
    rest: AsyncIterator[dict[str, Any]],
    head: dict[str, Any],
    *,
    is_chat: bool,
) -> AsyncGenerator[str]:
    """Server-sent events: a chunk for each piece of the text, then its end."""

    def chunk(text: str, finish: str | None, *, is_first: bool) -> str:
        delta: dict[str, Any] = {"content": text} if text else {}
        if is_first:
            delta = {"role": "assistant", **delta}
        content: dict[str, Any] = {"delta": delta} if is_chat else {"text": text}
        choice = {"index": 0, **content, "finish_reason": finish, "logprobs": None}
        return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

    async def pieces() -> AsyncGenerator[dict[str, Any]]:
        yield first
        async for piece in rest:
            yield piece

    is_first = True
    async for piece in pieces():
        text = piece.get("text", "")
        text = text.removeprefix(" ") if is_chat and is_first else text
        yield chunk(text, piece.get("finish"), is_first=is_first)
        is_first = False
    yield "data: [DONE]\n\n"


async def _read(
    request: Request, body: AskText, asked: dict[str, Any]
) -> AsyncGenerator[dict[str, Any]]:
    """A reader's answer to a prompt, or to the last message of the user, in one piece."""
    messages = cast("list[dict[str, str]]", asked.pop("messages", []))
    said = [message["content"] for message in messages if message["role"] == "user"]
    question = asked.pop("prompt", None) or (said[-1] if said else "")
    asked |= {"question": question, "contexts": body.contexts or []}
    answer = await _asked_once(request, body.model, asked)
    yield {"text": answer["text"]}
    yield {"finish": "stop", "prompt_tokens": answer["prompt_tokens"], "tokens": answer["tokens"]}


async def _asked(
    request: Request, model: str, question: dict[str, Any]
) -> AsyncGenerator[dict[str, Any]]:
    """What the model's worker answers, piece by piece. Refusal."""
    run = _run_of(request, model)
    with _refusals(model):
        worker = await cast("Workers", request.app.state.workers).of(run)
        async with aclosing(worker.ask(question)) as pieces:
            async for piece in pieces:
                yield piece


async def _asked_once(request: Request, model: str, question: dict[str, Any]) -> dict[str, Any]:
    """The model's answer to a question that has one. Refusal."""
    (answer,) = [piece async for piece in _asked(request, model, question)]
    return answer


def _task_of(request: Request, model: str) -> str:
    return keeper_of(request).index.experiment(_run_of(request, model).name).get("task", "")


def _run_of(request: Request, model: str) -> Path:
    """The run folder of a tuned model that this client sees. Refusal."""
    keeper = keeper_of(request)
    return keeper.folder.base.run(tuned_job(request, model)["lathe"]["exp_id"]).path


@contextmanager
def _refusals(model: str) -> Generator[None]:
    """What goes wrong at a worker, as a Refusal."""
    try:
        yield
    except Overloaded:
        text = "As many models or requests as there may be are at work. Ask again."
        raise Refusal(429, text, code="rate_limit_exceeded", retry_after_s=5) from None
    except CannotAnswer as error:
        raise Refusal(400, f"{model}: {error}.", param="model") from None


ROUTES = [
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/lathe/v1/score", score, methods=["POST"]),
]
