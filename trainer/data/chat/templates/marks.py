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
from functools import cached_property
from typing import Any

from jinja2 import nodes
from transformers.utils import chat_template_utils

from trainer.data.chat.templates.resumption import Resumption, Unknown, resumable
from trainer.data.chat.templates.tree import (
    captured_loops,
    constant_tail,
    is_forward,
    writes,
)

Span = tuple[int, int]  # (start, end) in characters, end exclusive

# Some templates write a date, by default today's, so that rows would change from day to day. This
# is the one that Llama 3's falls back on. Training and whoever generates use it.
DATE = datetime(2024, 7, 26)
_SIGN = "\ue0fe"  # a character for private use
_MARK = re.compile(f"{_SIGN}([se])([0-9]+){_SIGN}")
_FUNCTION = "mark_of_turn"
_MORE_TURNS = 4  # times as many, where the end of a conversation is not known yet


@dataclass(frozen=True)
class MarkedText:
    """A text without its marks, with the span of each turn; None: the turn has no span, or more."""

    text: str
    spans: list[Span | None]
    is_surely_exact: bool  # the template has read no mark
    chat: Sequence[Any]  # the turns, as the template was given them


def pinned(template: str) -> Any:
    """The compiled template, whose clock stands still from now on, for whoever renders it in this
    process through transformers.
    """
    compiled: Any = chat_template_utils._compile_jinja_template(template)  # type: ignore[attr-defined]
    compiled.environment.globals["strftime_now"] = DATE.strftime
    return compiled


class MarkedTemplate:
    """A template with marks in its loops.

    is_forward: whether no turn's text depends on a later turn (tree.py). is_resumable: whether
    `opening` need not write all turns.
    """

    def __init__(self, template: str) -> None:
        self._environment: Any = pinned(template).environment
        tree, self._again = (self._environment.parse(template) for _ in range(2))
        self.is_forward = is_forward(tree)
        tail = constant_tail(tree)
        self._tail = (
            None if tail is None else self._environment.from_string(nodes.Template(tail, lineno=1))
        )
        self._compiled = self._with_marks(tree)
        self._names = resumable(self._again)
        self.is_resumable = self._names is not None

    def _with_marks(self, tree: nodes.Template) -> Any:
        """The template with marks in those of its loops that may write a turn."""
        captured = captured_loops(tree)
        for loop in [*tree.find_all(nodes.For)]:
            if isinstance(loop.target, nodes.Name) and writes(loop):
                how = (loop.target.name, id(loop) in captured, loop.lineno)
                loop.body = [_output("s", *how), *loop.body, _output("e", *how)]
        tree.set_environment(self._environment)
        return self._environment.from_string(tree)

    @cached_property
    def _resumption(self) -> Any:
        """The template that begins its loop over the turns where Resumption says."""
        return self._with_marks(self._again)

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
        marks = _Marks(chat)
        marked = self._compiled.render(messages=chat, **{_FUNCTION: marks.mark}, **variables)
        return _without_marks(marked, chat, is_surely_exact=not marks.is_read)

    def opening(self, chat: Sequence[Any], variables: Mapping[str, Any]) -> str | None:
        """What it writes behind these turns; None if the last one has no span.

        chat: the first turns of MarkedText.chat.
        """
        marked = _without_marks(self._end(chat, variables), chat[-1:], is_surely_exact=False)
        last = None if marked is None else marked.spans[0]
        return None if marked is None or last is None else marked.text[last[1] :]

    def _end(self, chat: Sequence[Any], variables: Mapping[str, Any]) -> str:
        """The end of the rendering of a conversation, with marks of its last turn."""
        size = 1
        while self._names is not None and size < len(chat):
            marks = _Marks(chat[-1:])
            functions = Resumption(self._names, size, marks.is_written).functions()
            values = {"messages": chat, _FUNCTION: marks.mark, **functions, **variables}
            try:
                return self._resumption.render(**values)
            except Unknown:
                size *= _MORE_TURNS
        values = {"messages": chat, _FUNCTION: _Marks(chat[-1:]).mark, **variables}
        return self._compiled.render(**values)


class _Marks:
    """What writes the marks of some turns, and whether the template has read one."""

    def __init__(self, turns: Sequence[Any]) -> None:
        self._numbers = {id(turn): number for number, turn in enumerate(turns)}
        self._is_written = self.is_read = False

    def mark(self, value: Any, side: str, is_captured: bool) -> str:
        """A mark; nothing for what is none of the turns."""
        number = self._numbers.get(id(value))
        if number is None:
            return ""
        self._is_written = True
        self.is_read = self.is_read or is_captured
        return f"{_SIGN}{side}{number}{_SIGN}"

    def is_written(self) -> bool:
        """Whether there is a mark."""
        return self._is_written


def _output(side: str, turn: str, is_captured: bool, line: int) -> nodes.Output:
    values = [nodes.Name(turn, "load"), nodes.Const(side), nodes.Const(is_captured)]
    call = nodes.Call(nodes.Name(_FUNCTION, "load"), values, [], None, None)
    output = nodes.Output([call])
    output.set_lineno(line, override=True)
    return output


def _without_marks(marked: str, chat: Sequence[Any], *, is_surely_exact: bool) -> MarkedText | None:
    parts: list[str] = []
    starts: dict[int, int] = {}
    spans: dict[int, list[Span]] = {}
    place = length = 0
    for match in _MARK.finditer(marked):
        parts.append(marked[place : match.start()])
        length += match.start() - place
        place = match.end()
        number = int(match[2])
        if match[1] == "s":
            starts[number] = length
        elif starts.get(number, length) < length:
            spans.setdefault(number, []).append((starts[number], length))
    text = "".join([*parts, marked[place:]])
    if _SIGN in text:
        return None
    each = [spans.get(number, []) for number in range(len(chat))]
    one_each = [of_turn[0] if len(of_turn) == 1 else None for of_turn in each]
    return MarkedText(text, one_each, is_surely_exact, chat)
