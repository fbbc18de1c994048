"""Rows of conversations: {"messages", "tools"?}, out of a user's own files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.own_rows import CHATS, OwnRows
from trainer.data.formats.json_text import json_value
from trainer.data.readers.jsonl import preview
from trainer.data.readers.own_rows import own_rows
from trainer.errors import DataError
from trainer.tasks.causal_lm.chat import ASSISTANT, counts

if TYPE_CHECKING:
    from trainer.protocol.task import Row

# ShareGPT's names of the roles, and ours.
_ROLES = {"human": "user", "gpt": ASSISTANT}


def chats(
    folder: Path | None, split: str, own: OwnRows, *, cache_dir: Path | None = None
) -> Iterator[Row]:
    """Rows of "messages", a list of {"role", "content"}, and of "tools" if the file has some.

    A turn of the assistant may have a "weight", 0 or 1: a turn with 0 is read but not learnt. It
    may have "tool_calls" instead of a content. ShareGPT's names ("from", "value", "human", "gpt")
    are understood, and so are "prompt" and "completion". DataError names the place of a wrong row.
    """
    placed = own_rows(own, split, folder, layout=CHATS, first=".jsonl", cache_dir=cache_dir)
    for place, raw in placed:
        values = _values(raw, place)
        if not isinstance(values, list) or not values:
            raise DataError(
                f"{place}: 'messages' is {preview(values)}, want a list of objects with role and "
                "content that is not empty."
            )
        messages = [
            _message(value, f"{place}: messages[{number}]") for number, value in enumerate(values)
        ]
        if not any(counts(message) for message in messages):
            raise DataError(
                f"{place}: no turn of the assistant counts, so there is nothing to learn. Give it "
                "one, or take the row out."
            )
        yield {"messages": messages, **_tools(raw, place)}


def opened(raw: Row, place: str) -> Row:
    """The conversation of an object in our names, without turns of the assistant at its end, so
    that the assistant speaks next. DataError names the place of a wrong object.
    """
    if raw.get("messages") is None and raw.get("prompt") is not None:
        raw = {**raw, "completion": ""}
    values = _values(raw, place)
    if not isinstance(values, list):
        raise DataError(f"{place}: 'messages' is {preview(values)}, want a list of objects.")
    messages = [_message(one, f"{place}: messages[{n}]") for n, one in enumerate(values)]
    while messages and messages[-1]["role"] == ASSISTANT:
        del messages[-1]
    if not messages:
        raise DataError(f"{place}: nobody but the assistant speaks. Give a turn of the user.")
    return {"messages": messages, **_tools(raw, place)}


def _values(raw: Row, place: str) -> Any:
    """The messages of a row; those of a row with prompt and completion are a question and its
    answer.
    """
    if raw.get("messages") is not None:
        return raw["messages"]
    if raw.get("prompt") is not None and raw.get("completion") is not None:
        return [
            {"role": "user", "content": raw["prompt"]},
            {"role": ASSISTANT, "content": raw["completion"]},
        ]
    raise DataError(
        f"{place}: 'messages' is missing, and so are 'prompt' and 'completion' (keys: "
        f"{', '.join(raw) or 'none'}). Say in data.columns what yours are called: "
        '{"messages": "conversations"}.'
    )


def _message(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{place} is {preview(value)}, want an object with role and content.")
    message = {name: one for name, one in value.items() if one is not None}
    if "from" in message and "role" not in message:
        message = {"role": message.pop("from"), "content": message.pop("value", None), **message}
    role = message.get("role")
    if not isinstance(role, str) or not role.strip():
        raise DataError(f"{place}.role is {preview(role)}, want system, user, assistant or tool.")
    message["role"] = _ROLES.get(role, role)
    if message.get("tool_calls"):
        message["tool_calls"] = [_call(call, place) for call in message["tool_calls"]]
        message.setdefault("content", "")
    if not isinstance(message.get("content"), str):
        raise DataError(f"{place}.content is {preview(message.get('content'))}, want text.")
    if "weight" in message:
        weight = message["weight"]
        if message["role"] != ASSISTANT or weight not in (0, 1):
            raise DataError(
                f"{place}.weight is {preview(weight)} of role {message['role']!r}: want 0 or 1, on "
                "turns of the assistant alone."
            )
        message["weight"] = int(weight)
    return message


def _call(call: Any, place: str) -> Any:
    """A tool's call with its arguments as an object, which templates need; OpenAI writes them as
    text.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise DataError(
            f'{place}.tool_calls holds {preview(call)}, want {{"type": "function", "function": '
            '{"name": ..., "arguments": ...}}.'
        )
    fields = {name: one for name, one in function.items() if one is not None}
    if isinstance(fields.get("arguments"), str):
        try:
            fields["arguments"] = json_value(fields["arguments"])
        except ValueError as error:
            raise DataError(f"{place}.tool_calls: arguments are no JSON ({error}).") from None
    return {**{name: one for name, one in call.items() if one is not None}, "function": fields}


def _tools(raw: Row, place: str) -> dict[str, Any]:
    tools = raw.get("tools")
    if isinstance(tools, str):
        try:
            tools = json_value(tools) if tools.strip() else None
        except ValueError as error:
            raise DataError(f"{place}: 'tools' are no JSON ({error}).") from None
    if not tools:
        return {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{place}: 'tools' is {preview(tools)}, want a list of JSON schemas.")
    return {"tools": tools}
