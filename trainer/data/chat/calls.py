"""Calls of tools in what an assistant says, in the syntax of its chat template.

The syntax is read off the template: it writes a call that we know, and the JSON that holds its name
and its arguments tells the rest. So it is known for every template that writes calls as JSON, as
those of Hermes, Qwen 2.5 and 3, Llama 3.1 to 3.3 and Mistral do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.chat.chat_template import ChatTemplate
from trainer.data.formats.conversation import ASSISTANT
from trainer.errors import DataError

_NAME, _KEY, _VALUE = "lathe_probe", "lathe_key", "lathe_value"
_ID = "lathe0000"  # Mistral's templates take ids of nine letters and digits alone
_THOUGHTS = "</think>"  # Qwen 3 closes its thoughts before it calls
_PYTHON = "<|python_tag|>"  # which Llama may say before a call, and does not have to
_JSON = json.JSONDecoder()
_REF = "$ref"
# Keys of a schema whose value is no schema, and those whose value holds schemas by name.
_VALUES = ("const", "enum", "default", "examples")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


@dataclass(frozen=True)
class Call:
    """A call of a tool. arguments: a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Said:
    """What an assistant said: a text, and the calls behind it."""

    text: str
    calls: Sequence[Call]


@dataclass(frozen=True)
class CallSyntax:
    """How a template writes a call."""

    opening: str  # what stands before the JSON: "<tool_call>\n"
    closing: str  # and behind it
    key: str  # of the arguments: "arguments" or "parameters"
    is_list: bool  # whether the JSON is a list of all calls

    def schema(self, tools: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON schema of one call of one of these tools. tools: the schema of the arguments, an
        object, by the tool's name.
        """
        calls: list[dict[str, Any]] = []
        for number, (name, arguments) in enumerate(tools.items()):
            place = "#/items" if self.is_list else "#"
            place += f"/anyOf/{number}" if len(tools) > 1 else ""
            inner = _moved(arguments, f"{place}/properties/{self.key}")
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": name}, self.key: {"type": "object", **inner}},
                    "required": ["name", self.key],
                    "additionalProperties": False,
                }
            )
        one = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return (
            {"type": "array", "items": one, "minItems": 1, "maxItems": 1} if self.is_list else one
        )

    def said(self, text: str) -> Said | None:
        """The calls in a text of the assistant, and what stands before them; None if it holds no
        call, or one that is not whole.
        """
        marker = self.opening.rpartition(_THOUGHTS)[2].strip()
        start = text.find(marker)
        if start < 0:
            return None
        calls: list[Call] = []
        for value in _values(text[start:], marker, self.closing.strip()):
            call = _call(value, self.key)
            if call is None:
                return None
            calls.append(call)
        return Said(text[:start].strip(), calls) if calls else None


def syntax_of(chat: ChatTemplate) -> CallSyntax | None:
    """How a template writes calls; None if it writes none, or not as JSON."""
    function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
    call = {"id": _ID, "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "a"},
        {"role": ASSISTANT, "content": "", "tool_calls": [call]},
    ]
    schema = {"name": _NAME, "description": "", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": schema}]
    try:
        spoken = chat.spoken({"messages": messages, "tools": tools})
    except DataError:
        return None
    start, stop = spoken.spans[-1]
    turn = spoken.text[start:stop]
    if not spoken.needs_end:
        last = chat.tokenizer(turn, add_special_tokens=False)["input_ids"][-1:]
        turn = turn.removesuffix(chat.tokenizer.decode(last))
    for at, letter in enumerate(turn):
        if letter not in "[{":
            continue
        value, end = _json_at(turn, at)
        one = value[0] if isinstance(value, list) and len(value) == 1 else value
        if not isinstance(one, dict) or one.get("name") != _NAME:
            continue
        key = next((key for key, held in one.items() if held == {_KEY: _VALUE}), None)
        if key is None:
            return None
        return CallSyntax(turn[:at], turn[end:], key, is_list=isinstance(value, list))
    return None


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands at a place of another one, with references to its own parts
    ("#/$defs/...") that say so. place: a JSON pointer with "#" before it.
    """
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            moved[key] = {name: _moved(one, place) for name, one in value.items()}
        else:
            moved[key] = value if key in _VALUES else _moved(value, place)
    reference = schema.get(_REF)
    if isinstance(reference, str) and reference.startswith("#"):
        moved[_REF] = place + reference.removeprefix("#")
    return moved


def _values(text: str, marker: str, closing: str) -> Iterator[Any]:
    """The JSON values behind each marker; None, and no more, where there is none."""
    place = 0
    while place >= 0:
        place += len(marker)
        behind = text[place:].lstrip()
        behind = behind if marker else behind.removeprefix(_PYTHON).lstrip()
        place = len(text) - len(behind)
        value, end = _json_at(text, place)
        yield from value if isinstance(value, list) else [value]
        if value is None:
            return
        rest = text[end:].lstrip(" \n;").removeprefix(closing).lstrip(" \n;")
        place = len(text) - len(rest)
        if not rest:
            return
        if not rest.startswith(marker):
            yield None
            return


def _json_at(text: str, place: int) -> tuple[Any, int]:
    """(a JSON value that begins at a place of a text, where it ends); None without one."""
    try:
        return _JSON.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None, place


def _call(value: Any, key: str) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get(key)
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))
