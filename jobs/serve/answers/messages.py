"""The messages of a chat, as clients send them: also an answer's own message, with its nulls."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from jobs.serve.requests import Body, Refusal

_TEXT_PARTS = ("text", "input_text", "output_text")
_LONGEST = 200_000  # characters of a message


def _problem(want: str) -> PydanticCustomError:
    return PydanticCustomError("message", "{want}", {"want": want})


def _text(content: Any) -> Any:
    """The text of content parts together; a text as it is."""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in cast("list[Any]", content):
        fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        kind = fields.get("type")
        if kind == "refusal":
            raise _problem("A refusal is not read. Send what was said as a part of the type text")
        if kind not in _TEXT_PARTS:
            raise _problem(f"Parts of the type {kind!r} are not read: the models here read text")
        if not isinstance(fields.get("text"), str):
            raise _problem("Want a text in each part of the type text")
        texts.append(fields["text"])
    return "".join(texts)


def _empty(value: Any) -> None:
    """Refuses what would be lost, but for null and what is empty."""
    if value not in (None, "", [], {}):
        raise _problem("This is not read, and would be lost. Send text as content")


class CalledFunction(Body):
    """The function of a call. arguments: JSON as text."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class ToolCall(Body):
    """A call of a tool that the assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Any = None  # of a stream, as clients put its pieces together


Lost = Annotated[None, BeforeValidator(_empty)]


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[str, Field(max_length=_LONGEST)] | None, BeforeValidator(_text)
    ] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # thoughts, which some templates write
    refusal: Lost = None
    audio: Lost = None
    function_call: Lost = None
    annotations: Any = None  # where an answer took something from; no text of its own

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """A null says nothing, whatever its key: an answer's own message comes back with some."""
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, Any]", value)
        if fields.get("role") == "function":
            text = "messages: got the role 'function', want 'tool' with a tool_call_id."
            raise Refusal(400, text, param="messages")
        return {name: one for name, one in fields.items() if one is not None}

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls:
            text = f"messages: a message of the role {self.role!r} has no content. Give it one."
            raise Refusal(400, text, param="messages")
        if self.tool_calls and self.role != "assistant":
            text = f"messages: got tool_calls of the role {self.role!r}, want 'assistant'."
            raise Refusal(400, text, param="messages")
        return self

    def row(self) -> dict[str, Any]:
        """The message as templates know it."""
        names = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
        fields = self.model_dump(include=names, exclude_none=True)
        for call in fields.get("tool_calls", []):
            call.pop("index", None)
        return fields
