"""Answers of a model in the format of the OpenAI API, whole and streamed. Source: openai 3.54."""

from __future__ import annotations

import json
import secrets
import string
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

_ID_LETTERS = string.ascii_lowercase + string.digits
_TORN = "\ufffd"  # stands for a part of a character
_ID_LENGTH = 9  # of a call: Mistral's templates take no other


@dataclass
class TextReply:
    """One text of an answer, put together from its pieces."""

    text: str = ""
    end: dict[str, Any] = field(default_factory=dict[str, Any])  # the last piece

    def add(self, piece: dict[str, Any]) -> None:
        """Go on by a piece."""
        self.text += piece.get("text", "")
        if "finish" in piece:
            self.end = piece
            self.text = piece.get("content", self.text)

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens."""
        values = [one["logprob"] for one in self.end.get("logprobs", [])]
        values = [value for value in values if value is not None]
        return sum(values) / max(len(values), 1)


@dataclass
class ModelAnswer:
    """What is answered to one request: the texts of all its prompts.

    num_answers: to each prompt. num_texts: that are generated for each; the answers are the best.
    has_logprobs: whether they are told.
    """

    model: str
    is_chat: bool
    num_answers: int
    num_texts: int
    has_logprobs: bool
    is_stream: bool = False
    texts: dict[int, TextReply] = field(default_factory=dict[int, TextReply])
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def add(self, piece: dict[str, Any]) -> None:
        """Go on by a piece of one of the texts."""
        self.texts.setdefault(piece.get("choice", 0), TextReply()).add(piece)

    @property
    def head(self) -> dict[str, Any]:
        """What every chunk begins with."""
        kind, start = "text_completion", "cmpl"
        if self.is_chat:
            kind, start = "chat.completion", "chatcmpl"
            kind += ".chunk" if self.is_stream else ""
        name = f"{start}-{self.name}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    def usage(self) -> dict[str, int]:
        """The tokens of all prompts, each counted once, and of all texts that were generated."""
        ends = {number: one.end for number, one in self.texts.items()}
        firsts = [end for number, end in ends.items() if number % self.num_texts == 0]
        prompt = sum(end["prompt_tokens"] for end in firsts)
        made = sum(end["tokens"] for end in ends.values())
        counts = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        cut = sum(end.get("cut_tokens", 0) for end in firsts)
        return counts | ({"cut_tokens": cut} if cut else {})

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        best: list[TextReply] = []
        for start in range(0, len(self.texts), self.num_texts):
            group = [self.texts[start + number] for number in range(self.num_texts)]
            if self.num_texts > self.num_answers:
                group.sort(key=lambda one: -one.mean_logprob)  # equal ones keep their order
            best += group[: self.num_answers]
        choices = [self._choice(number, one) for number, one in enumerate(best)]
        return {**self.head, "choices": choices, "usage": self.usage()}

    def _choice(self, number: int, one: TextReply) -> dict[str, Any]:
        content: dict[str, Any] = {"text": one.text}
        if self.is_chat:
            calls = calls_of(one.end)
            message = {"role": "assistant", "content": one.text, "refusal": None}
            if calls:
                message |= {"content": one.text or None, "tool_calls": calls}
            content = {"message": message}
        end = {"finish_reason": one.end["finish"], "logprobs": self.logprobs(one.end)}
        return {"index": number, **content, **end}

    def logprobs(self, end: dict[str, Any]) -> dict[str, Any] | None:
        """The log-probabilities of a text, if they were asked for."""
        if not self.has_logprobs or "logprobs" not in end:
            return None
        return (_of_chat if self.is_chat else _of_text)(end["logprobs"])


def calls_of(end: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of tools at the end of a text, each with an id of its own."""
    return [
        {
            "id": "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH)),
            "type": "function",
            "function": call,
        }
        for call in end.get("calls", [])
    ]


def _of_chat(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Log-probabilities as a chat has them. Half of a character has no bytes that we know: null."""

    def token(entry: dict[str, Any]) -> dict[str, Any]:
        text = entry["token"]
        spelt = None if _TORN in text else [*text.encode()]
        return {"token": text, "logprob": entry["logprob"], "bytes": spelt}

    content = [
        {**token(entry), "top_logprobs": [token(one) for one in entry["likeliest"]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _of_text(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Log-probabilities as a completion has them. The first token of a prompt has none: 0, since
    the client's types want a number.
    """
    tokens = [entry["token"] for entry in entries]
    offsets = [0, *accumulate(map(len, tokens))][: len(tokens)]
    likeliest: list[dict[str, float]] = []
    for entry in entries:
        # several tokens may have one text: the likeliest comes first and stays
        texts = {one["token"]: one["logprob"] for one in reversed(entry["likeliest"])}
        if entry["logprob"] is not None:
            texts[entry["token"]] = entry["logprob"]
        likeliest.append(texts)
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] or 0.0 for entry in entries],
        "top_logprobs": likeliest,
        "text_offset": offsets,
    }


async def events(
    reply: ModelAnswer,
    pieces: AsyncIterator[dict[str, Any]],
    *,
    has_usage: bool,
    is_held: bool,
) -> AsyncGenerator[str]:
    """Server-sent events: a chunk for each piece of a text, then "[DONE]".

    has_usage: whether a last chunk tells the tokens of the whole answer. is_held: whether texts
    come at their end, since they may turn out to be calls of tools.
    """
    begun: set[int] = set()
    usage = {"usage": None} if has_usage else {}
    async for piece in pieces:
        reply.add(piece)
        number = piece.get("choice", 0)
        is_end = "finish" in piece
        if is_held and not is_end:
            continue
        text = reply.texts[number].text if is_held else piece.get("text", "")
        delta: dict[str, Any] = {"text": text}
        if reply.is_chat:
            delta = _delta(text, piece, is_first=number not in begun)
        begun.add(number)
        choice = {"index": number, **delta, "finish_reason": piece.get("finish")}
        choice["logprobs"] = reply.logprobs(piece)
        chunk = {**reply.head, "choices": [choice], **usage}
        if "cut_tokens" in piece and not has_usage:
            chunk["usage"] = reply.usage()
        yield event(chunk)
    if has_usage:
        yield event({**reply.head, "choices": [], "usage": reply.usage()})
    yield "data: [DONE]\n\n"


def _delta(text: str, piece: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
    delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
    if text:
        delta["content"] = text
    calls = calls_of(piece)
    if calls:
        delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
    return {"delta": delta}


def event(chunk: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(chunk)}\n\n"
