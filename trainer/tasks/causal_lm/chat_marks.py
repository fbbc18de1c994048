"""Where each turn stands in the text of a conversation, out of one rendering.

Chat templates are programs in Jinja that loop over the messages. Each loop gets a mark before and
behind its body, which is written if the loop stands at a message. Without the marks the text must
be the one that the template writes by itself, or nothing is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import nodes
from transformers.utils import chat_template_utils

Span = tuple[int, int]  # (start, end) in characters, end exclusive

# Some templates write a date, by default today's, so that rows would change from day to day. This
# is the one that Llama 3's falls back on. Training and whoever generates use it.
DATE = datetime(2024, 7, 26)
_SIGN = "\ue0fe"  # a character for private use
_MARK = re.compile(f"{_SIGN}([se])([0-9]+){_SIGN}")
_FUNCTION = "mark_of_turn"


@dataclass(frozen=True)
class MarkedText:
    """A text without its marks, with the span of each turn; None: the turn has no span, or more."""

    text: str
    spans: list[Span | None]


def pinned(template: str) -> Any:
    """The compiled template, whose clock stands still from now on, for whoever renders it in this
    process through transformers.
    """
    compiled: Any = chat_template_utils._compile_jinja_template(template)  # type: ignore[attr-defined]
    compiled.environment.globals["strftime_now"] = _strftime_now
    return compiled


def _strftime_now(form: str) -> str:
    return DATE.strftime(form)


def with_marks(template: str) -> Any:
    """The compiled template with marks in its loops."""
    environment: Any = pinned(template).environment
    tree = environment.parse(template)
    for loop in [*tree.find_all(nodes.For)]:
        if isinstance(loop.target, nodes.Name):
            turn = nodes.Name(loop.target.name, "load")
            start, end = (_output(side, turn, loop.lineno) for side in "se")
            loop.body = [start, *loop.body, end]
    tree.set_environment(environment)
    return environment.from_string(tree)


def _output(side: str, turn: nodes.Name, line: int) -> nodes.Output:
    function = nodes.Name(_FUNCTION, "load")
    call = nodes.Call(function, [turn, nodes.Const(side)], [], None, None)
    output = nodes.Output([call])
    output.set_lineno(line, override=True)
    return output


def marked_text(
    compiled: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> MarkedText | None:
    """The rendering of a template that has marks; None if a text holds the sign of marks."""
    chat: Any = chat_template_utils._alias_reasoning_fields(  # type: ignore[attr-defined]
        [dict(message) for message in messages]
    )
    numbers = {id(message): number for number, message in enumerate(chat)}

    def mark(value: Any, side: str) -> str:
        number = numbers.get(id(value))
        return "" if number is None else f"{_SIGN}{side}{number}{_SIGN}"

    marked = compiled.render(messages=chat, **{_FUNCTION: mark}, **variables)
    parts: list[str] = []
    starts: dict[int, int] = {}
    spans: dict[int, list[Span]] = {}
    place = length = 0
    for found in _MARK.finditer(marked):
        parts.append(marked[place : found.start()])
        length += found.start() - place
        place = found.end()
        number = int(found[2])
        if found[1] == "s":
            starts[number] = length
        elif starts.get(number, length) < length:
            spans.setdefault(number, []).append((starts[number], length))
    text = "".join([*parts, marked[place:]])
    if _SIGN in text:
        return None
    each = [spans.get(number, []) for number in range(len(messages))]
    return MarkedText(text, [of_turn[0] if len(of_turn) == 1 else None for of_turn in each])
