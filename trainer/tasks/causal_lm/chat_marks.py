"""Where each turn stands in the text of a conversation, out of one rendering.

Chat templates are programs in Jinja that loop over the messages. Each loop gets a mark before and
behind its body, which is written if the loop stands at a message. Without the marks the text must
be the one that the template writes by itself, or nothing is known: it is that where the template
cannot read what its loops have written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import nodes
from transformers.utils import chat_template_utils

from trainer.tasks.causal_lm.template_tree import captured_loops, constant_tail, is_forward

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
    is_surely_exact: bool  # the template has read no mark


def pinned(template: str) -> Any:
    """The compiled template, whose clock stands still from now on, for whoever renders it in this
    process through transformers.
    """
    compiled: Any = chat_template_utils._compile_jinja_template(template)  # type: ignore[attr-defined]
    compiled.environment.globals["strftime_now"] = _strftime_now
    return compiled


def _strftime_now(form: str) -> str:
    return DATE.strftime(form)


class MarkedTemplate:
    """A template with marks in its loops.

    is_forward: whether no turn's text depends on a later turn (template_tree.py).
    """

    def __init__(self, template: str) -> None:
        environment: Any = pinned(template).environment
        tree = environment.parse(template)
        self.is_forward = is_forward(tree)
        tail = constant_tail(tree)
        self._tail = (
            None if tail is None else environment.from_string(nodes.Template(tail, lineno=1))
        )
        captured = captured_loops(tree)
        for loop in [*tree.find_all(nodes.For)]:
            if isinstance(loop.target, nodes.Name):
                how = (loop.target.name, id(loop) in captured, loop.lineno)
                loop.body = [_output("s", *how), *loop.body, _output("e", *how)]
        tree.set_environment(environment)
        self._compiled = environment.from_string(tree)

    def tail(self, variables: Mapping[str, Any]) -> str | None:
        """What it writes behind the last turn of every conversation; None if that may depend on the
        conversation.
        """
        return None if self._tail is None else self._tail.render(messages=[], **variables)

    def text(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> MarkedText | None:
        """The rendering of a conversation; None if a text holds the sign of marks."""
        chat: Any = chat_template_utils._alias_reasoning_fields(  # type: ignore[attr-defined]
            [dict(message) for message in messages]
        )
        numbers = {id(message): number for number, message in enumerate(chat)}
        captured: list[int] = []

        def mark(value: Any, side: str, is_captured: bool) -> str:
            number = numbers.get(id(value))
            if number is None:
                return ""
            if is_captured:
                captured.append(number)
            return f"{_SIGN}{side}{number}{_SIGN}"

        marked = self._compiled.render(messages=chat, **{_FUNCTION: mark}, **variables)
        return _without_marks(marked, len(messages), is_surely_exact=not captured)


def _output(side: str, turn: str, is_captured: bool, line: int) -> nodes.Output:
    values = [nodes.Name(turn, "load"), nodes.Const(side), nodes.Const(is_captured)]
    call = nodes.Call(nodes.Name(_FUNCTION, "load"), values, [], None, None)
    output = nodes.Output([call])
    output.set_lineno(line, override=True)
    return output


def _without_marks(marked: str, num_turns: int, *, is_surely_exact: bool) -> MarkedText | None:
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
    each = [spans.get(number, []) for number in range(num_turns)]
    one_each = [of_turn[0] if len(of_turn) == 1 else None for of_turn in each]
    return MarkedText(text, one_each, is_surely_exact)
