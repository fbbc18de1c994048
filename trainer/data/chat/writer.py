"""Conversations as texts, by the chat template of one tokenizer."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jinja2

from trainer.data.chat.templates.built_in import legal
from trainer.data.chat.templates.marks import DATE, MarkedTemplate, MarkedText, pinned
from trainer.data.readers.jsonl import preview
from trainer.errors import ConfigError, DataError

Message = Mapping[str, Any]
T = TypeVar("T")

CLOCK = {"date_string": DATE.strftime("%d %b %Y")}
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError)


class Writer:
    """Writes conversations as the template of a tokenizer says.

    name: of the template, for messages.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer, self.name = tokenizer, name
        added = tokenizer.added_tokens_decoder.values()
        # what may end a turn
        self.ends = tuple(token.content for token in added if not token.content.isspace())
        self._marked: dict[str, MarkedTemplate] = {}  # by the source of a template
        self._tails: dict[str, str | None] = {}  # likewise; what opens every answer

    def template(self, tools: Any) -> str:
        """The source of the template for a conversation with these tools."""
        return self.tokenizer.get_chat_template(None, tools)

    def marked_template(self, tools: Any) -> MarkedTemplate:
        """The same template with marks in its loops."""
        source = self.template(tools)
        if source not in self._marked:
            self._marked[source] = MarkedTemplate(source)
        return self._marked[source]

    def keeps_turns(self, tools: Any) -> bool:
        """Whether the template surely writes a turn alike once more turns follow, or its author
        says what is learnt.
        """
        return (
            bool(GENERATION.search(self.template(tools))) or self.marked_template(tools).is_forward
        )

    def text(self, messages: Sequence[Message], tools: Any, *, is_opened: bool = False) -> str:
        """A conversation as text; is_opened: up to where the assistant begins to speak.

        DataError when the template refuses it.
        """
        try:
            pinned(self.template(tools))
            render = partial(
                self.tokenizer.apply_chat_template,
                tools=tools,
                tokenize=False,
                add_generation_prompt=is_opened,
                **CLOCK,
            )
            return rendered(render, messages)
        except RecursionError:
            raise ConfigError(
                f"data.chat_template: the chat template {self.name} calls itself without an end. "
                f"Mend it, or name another: {legal()}."
            ) from None
        except _REFUSALS as error:
            raise DataError(
                f"{naming(messages)}: the chat template {self.name} refuses it: {error}. Mend "
                "the row, or name another template in data.chat_template."
            ) from None

    def marked_text(self, messages: Sequence[Message], tools: Any) -> MarkedText | None:
        """The same text with the span of each turn; None when the template with marks refuses it.
        What it says is `text` where `is_surely_exact`, else it is to be compared.
        """
        variables = self._variables(tools, is_opened=False)
        try:
            render = partial(self.marked_template(tools).text, variables=variables)
            return rendered(render, messages)
        except (*_REFUSALS, RecursionError):
            return None  # the marks themselves may be what it cannot read

    def _variables(self, tools: Any, *, is_opened: bool) -> dict[str, Any]:
        return {
            **self.tokenizer.special_tokens_map,
            **CLOCK,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": is_opened,
        }

    def opens_fast(self, tools: Any) -> bool:
        """Whether `opening` need not write all turns before an answer."""
        return self._tail(tools) is not None or self.marked_template(tools).is_resumable

    def _tail(self, tools: Any) -> str | None:
        """What opens every answer; None if a conversation may change it."""
        source = self.template(tools)
        if source not in self._tails:
            try:
                variables = self._variables(tools, is_opened=True)
                self._tails[source] = self.marked_template(tools).tail(variables)
            except (*_REFUSALS, RecursionError):
                self._tails[source] = None
        return self._tails[source]

    def opening(self, marked: MarkedText, number: int, tools: Any) -> str | None:
        """What the template writes behind the first `number` turns of a conversation to open an
        answer; None if that is not known.
        """
        tail = self._tail(tools)
        if tail is not None:
            return tail
        variables = self._variables(tools, is_opened=True)
        try:
            return self.marked_template(tools).opening(marked.chat[:number], variables)
        except (*_REFUSALS, RecursionError):
            return None

    def header(self, messages: Sequence[Message], tools: Any) -> str:
        """The first special token that opens an answer behind messages, with the words up to the
        next one or the end of the line; an empty text without such a token.
        """
        opened, closed = self.text(messages, tools, is_opened=True), self.text(messages, tools)
        added = opened.removeprefix(closed)
        starts = [added.find(token) for token in self.ends if token in added]
        if not starts or added == opened:
            return ""
        token = max((one for one in self.ends if added.startswith(one, min(starts))), key=len)
        first = min(starts) + len(token)
        places = [added.find(one, first) for one in (*self.ends, "\n")]
        return added[: min([place for place in places if place >= 0], default=len(added))]

    def last_boundary(self, text: str) -> int:
        """How many characters of a text stand up to its last line's end or special token."""
        ends = [text.rfind("\n") + 1]
        ends += [text.rfind(token) + len(token) for token in self.ends if token in text]
        return max(ends)

    def without_ends(self, text: str) -> str:
        """A text without blanks around it and without tokens that end a turn."""
        text = text.strip()
        while text and text.endswith(self.ends):
            token = max((one for one in self.ends if text.endswith(one)), key=len)
            text = text.removesuffix(token).strip()
        return text


def rendered(render: Callable[[list[dict[str, Any]]], T], messages: Sequence[Message]) -> T:
    """What a template writes of messages. One that cannot read the arguments of calls as objects,
    as DeepSeek's, gets them as texts of JSON.
    """
    try:
        return render(plain(messages))
    except TypeError:
        if not any(message.get("tool_calls") for message in messages):
            raise
        return render([_with_texts(message) for message in plain(messages)])


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as texts."""
    calls = copy.deepcopy(message.get("tool_calls"))
    for call in calls or ():
        function = call.get("function", call)
        if not isinstance(function.get("arguments", ""), str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**message, "tool_calls": calls} if calls else message


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages without our own key, which templates do not know, and without keys of no value,
    which transformers leaves out as well.
    """
    return [
        {name: value for name, value in message.items() if name != "weight" and value is not None}
        for message in messages
    ]


def naming(messages: Sequence[Message]) -> str:
    """The words that name a conversation in a message."""
    return f"the conversation that begins {preview(messages[0].get('content'))}"
