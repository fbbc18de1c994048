"""OpenAI's rows of preferences: a conversation with two answers, of which one is preferred."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from jobs.serve.rows.turns import Row, quote
from trainer.data.formats import conversation

ANSWERS = ("preferred_output", "non_preferred_output")
_TURNS = 'a list of turns, such as [{"role": "assistant", "content": "..."}]'


def preference_problems(row: Row) -> Iterator[tuple[str, str]]:
    """The mistakes of a row, as (got, want). Two answers that are equal teach nothing."""
    prompt = row["input"]
    turns = cast("Row", prompt).get("messages") if isinstance(prompt, dict) else None
    if not _is_list(turns):
        yield f"input={quote(prompt)}", 'an object with "messages", a list of turns'
        return
    wrong = [name for name in ANSWERS if not _is_list(row[name])]
    for name in wrong:
        yield f"{name}={quote(row[name])}", _TURNS
    if wrong:
        return
    problems: dict[tuple[str, str], None] = {}  # the prompt is read with both answers
    conversations: list[Row] = []
    for name in ANSWERS:
        own: list[conversation.RowProblem] = []
        conversations.append(conversation.read(_whole(row, name), own.append))
        for where, value, want in own:
            place = where.replace("prompt[", "input.messages[").replace("completion", name)
            got = f"{place}={quote(value)}" if where else f"{name}: {value}"
            problems[got, want] = None
    yield from problems
    if not problems and conversations[0] == conversations[1]:
        got = f"two equal answers, {quote(row[ANSWERS[0]])}"
        yield got, "answers that differ, or the row taken out"


def preference_row(row: Row, number: int) -> Row:
    """The row as the task `preference` reads it."""
    tools = row["input"].get("tools")
    values = {
        "prompt": row["input"]["messages"],
        "chosen": row["preferred_output"],
        "rejected": row["non_preferred_output"],
    }
    return {**values, "tools": tools} if tools else values


def _whole(row: Row, name: str) -> Row:
    """The conversation that ends with one of the answers."""
    prompt: dict[str, Any] = row["input"]
    whole = {"prompt": prompt["messages"], "completion": row[name]}
    return {**whole, "tools": prompt.get("tools")}


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)  # pyright: ignore[reportUnknownArgumentType]
