"""Turns of conversations in uploaded rows: their mistakes, and how a value is shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.data.formats import conversation

Row = dict[str, Any]


def quote(value: Any) -> str:
    """A value for a mistake: its beginning, as Python writes it."""
    return cut(repr(value[:60] if isinstance(value, str) else value))


def cut(text: str) -> str:
    """A text of at most 60 letters."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def chat_problems(row: Row) -> Iterator[tuple[str, str]]:
    """The mistakes of a conversation, as (got, want)."""
    problems: list[conversation.RowProblem] = []
    conversation.read(row, problems.append)
    for name, value, want in problems:
        yield f"{name}={quote(value)}" if name else str(value), want
