"""Conversations as token ids, with the tokens that the assistant says.

A chat template is a program that writes a conversation as one text; it does not tell who says what.
So a turn of the assistant is located by two renderings: one of all turns before it, opened for an
answer, and one that also holds the turn. This is right if each rendering begins with the one before
it, which is checked for every turn of every row.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.data import vocabulary
from trainer.data.formats.conversation import ASSISTANT, counts
from trainer.data.readers.jsonl import preview
from trainer.errors import ConfigError, DataError
from trainer.tasks.causal_lm.chat_templates import BUILT_IN

if TYPE_CHECKING:
    from trainer.protocol.task import Row

log = logging.getLogger(__name__)

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Some templates write a date, by default today's, so that rows would change from day to day. This
# is the one that Llama 3's falls back on. Training and whoever generates use it.
_DATE = datetime(2024, 7, 26)


def _strftime_now(form: str) -> str:
    return _DATE.strftime(form)


_CLOCK = {"date_string": _strftime_now("%d %b %Y"), "strftime_now": _strftime_now}
_OPENED = "{{- bos_token }}"

Message = Mapping[str, Any]
Span = tuple[int, int]  # (start, end) in characters, end exclusive


@dataclass(frozen=True)
class Spoken:
    """A conversation as text, with the spans of the turns that are learnt."""

    text: str
    spans: list[Span]
    needs_end: bool  # whether the last span lacks a token that ends a turn


class ChatTemplate:
    """How one tokenizer writes conversations."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer, self.name = tokenizer, name
        added = tokenizer.added_tokens_decoder.values()
        self._ends = tuple(token.content for token in added if not token.content.isspace())

    @classmethod
    def of(cls, tokenizer: Any, template: str | None, data_path: Path | None) -> ChatTemplate:
        """The template that data.chat_template names, which replaces the tokenizer's; without a
        name, the tokenizer's own.

        ConfigError when there is none.
        """
        if template is not None:
            tokenizer.chat_template = _read(template, data_path)
        elif tokenizer.chat_template is None:
            raise ConfigError(
                f'data.source="chat": tokenizer {tokenizer.name_or_path!r} has no chat template. '
                f"Set data.chat_template: {_legal()}."
            )
        chat = cls(tokenizer, template or f"of tokenizer {tokenizer.name_or_path}")
        chat._write_opening()
        return chat

    def _write_opening(self) -> None:
        """Let the template begin with the tokenizer's beginning-of-text token, if texts of that
        tokenizer do and the template does not write one. Exports get the template as it is then.
        """
        if not vocabulary.opening_of(self.tokenizer) or self._writes(self.tokenizer.bos_token):
            return
        log.info(
            "the chat template %s writes no %s, with which this tokenizer begins every text: it is "
            "written before each conversation",
            self.name,
            self.tokenizer.bos_token,
        )
        given: Any = self.tokenizer.chat_template
        self.tokenizer.chat_template = (
            {name: _OPENED + one for name, one in given.items()}
            if isinstance(given, dict)
            else _OPENED + given
        )

    def _writes(self, token: str) -> bool:
        """Whether the template writes a token into a conversation that does not hold it."""
        turns = [{"role": role, "content": "a"} for role in ("system", "user", ASSISTANT)]
        for messages in (turns[1:], turns[1:2], turns):
            try:
                return token in self._written(messages, None)
            except DataError:
                continue
        return token in self.text or "bos_token" in self.text

    @property
    def text(self) -> str:
        """The source of the template, or of all templates where a tokenizer has several."""
        return str(self.tokenizer.chat_template)

    def identity(self) -> dict[str, str]:
        """What the ids of a conversation depend on besides it and the tokenizer."""
        if "strftime_now" not in self.text:
            return {"chat_template": self.text}
        # until 2026-11-26 such a template wrote the day of its encoding
        return {"chat_template": self.text, "date": _DATE.date().isoformat()}

    def tokens(self, row: Row, end: int) -> dict[str, list[int]]:
        """A whole conversation: "ids", and "scored", which is 1 for each id that is learnt.

        end: the id that is appended when no token ends the last answer.
        """
        spoken = self.spoken(row)
        encoding = self.tokenizer(
            spoken.text, add_special_tokens=False, return_offsets_mapping=True
        )
        scored = flags(encoding["offset_mapping"], spoken.spans)
        behind = [end] if spoken.needs_end else []
        return {"ids": [*encoding["input_ids"], *behind], "scored": [*scored, *(1 for _ in behind)]}

    def spoken(self, row: Row) -> Spoken:
        """The text of a conversation, and the spans of the assistant's turns that are learnt.

        DataError when the template refuses the conversation, or does not tell where a turn stands.
        """
        messages, tools = row["messages"], row.get("tools")
        whole = self._written(messages, tools)
        counted = [number for number, one in enumerate(messages) if counts(one)]
        try:
            spans = [self._span(messages, tools, number, whole) for number in counted]
        except _NoPrefix as error:
            spans = self._mark_turns(messages, tools, counted)
            if spans is None:
                raise DataError(
                    f"{_name_roles(messages)}: the chat template {self.name} does not tell what "
                    f'the assistant says: {error}. Give that turn "weight": 0, part the '
                    "conversation into rows of one answer, or name a template in "
                    f"data.chat_template: {_legal()}."
                ) from None
        last = spans[-1][1]
        is_last = not whole[last:].strip() and not whole[:last].endswith(self._ends)
        return Spoken(whole, spans, needs_end=is_last)

    def turn_end(self, end: int) -> int:
        """The token that ends a turn of the assistant; `end` if the template writes none, or if the
        turn cannot be located.
        """
        messages = [{"role": role, "content": "a"} for role in ("user", ASSISTANT)]
        try:
            encoding = self.tokens({"messages": messages}, end)
        except DataError:
            return end
        scored = [
            n for n, is_scored in zip(encoding["ids"], encoding["scored"], strict=True) if is_scored
        ]
        return scored[-1]

    def opened(self, row: Row) -> str:
        """A conversation as text, up to where the assistant begins to speak."""
        return self._written(row["messages"], row.get("tools"), is_opened=True)

    def _span(self, messages: Sequence[Message], tools: Any, number: int, whole: str) -> Span:
        """The span of the assistant's turn `number`, with the token that ends it."""
        if number == 0:
            raise _NoPrefix("it begins with the assistant")
        before = messages[:number]
        opening = self._written(before, tools, is_opened=True)
        closed = self._written(messages[: number + 1], tools)
        turn = f"turn {number + 1} of {len(messages)}"
        if not closed.startswith(opening):
            raise _NoPrefix(f"{turn} does not begin as the template opens it")
        if not whole.startswith(closed):
            raise _NoPrefix(f"{turn} is written otherwise once more turns follow")
        written, content = closed[len(opening) :].lstrip(), str(messages[number]["content"]).strip()
        is_unopened = opening == self._written(before, tools)
        if is_unopened and not written.startswith(content):
            raise _NoPrefix(f"the template has no add_generation_prompt, which opens {turn}")
        ended = closed.rstrip()
        has_end = len(ended) > len(opening) and ended.endswith(self._ends)
        return len(opening), len(ended if has_end else closed)

    def _mark_turns(
        self, messages: Sequence[Message], tools: Any, counted: Sequence[int]
    ) -> list[Span] | None:
        """The spans that {% generation %} marks; None if the template does not mark every turn of
        the assistant.
        """
        template = self.tokenizer.get_chat_template(None, tools)
        if not _GENERATION.search(template):
            return None
        variables: dict[str, Any] = {**self.tokenizer.special_tokens_map, **_CLOCK, "tools": tools}
        rendered: Any = render_jinja_template(
            conversations=[[_plain(one) for one in messages]],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **variables,
        )
        spans: list[list[Span]] = rendered[1]
        spoken = [number for number, one in enumerate(messages) if one["role"] == ASSISTANT]
        if len(spans[0]) != len(spoken):
            return None
        of_turn = dict(zip(spoken, spans[0], strict=True))
        return [of_turn[number] for number in counted]

    def _written(self, messages: Sequence[Message], tools: Any, *, is_opened: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                [_plain(one) for one in messages],
                tools=tools,
                tokenize=False,
                add_generation_prompt=is_opened,
                **_CLOCK,
            )
        except RecursionError:
            raise ConfigError(
                f"data.chat_template: the chat template {self.name} calls itself without an end. "
                f"Mend it, or name another: {_legal()}."
            ) from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise DataError(
                f"{_name_roles(messages)}: the chat template {self.name} refuses it: {error}. Mend "
                "the row, or name another template in data.chat_template."
            ) from None


class _NoPrefix(Exception):
    """A rendering does not begin with the one before it."""


def flags(tokens: Iterable[Span], spans: Iterable[Span]) -> list[int]:
    """For each token 1 if it shares a character with one of the spans, which do not overlap."""
    ordered = sorted(spans)
    starts, stops = [start for start, _ in ordered], [stop for _, stop in ordered]
    found: list[int] = []
    for first, end in tokens:
        before = bisect_left(starts, end)  # spans that begin before the token ends
        found.append(int(before > 0 and first < stops[before - 1]))
    return found


def _plain(message: Message) -> dict[str, Any]:
    """A message without our own key, which templates do not know."""
    return {name: value for name, value in message.items() if name != "weight"}


def _name_roles(messages: Sequence[Message]) -> str:
    return f"the conversation that begins {preview(messages[0].get('content'))}"


def _read(template: str, data_path: Path | None) -> str:
    if template in BUILT_IN:
        return BUILT_IN[template]
    places = [Path(template), *([data_path / template] if data_path is not None else [])]
    for place in places:
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise ConfigError(
        f"data.chat_template={template!r} is no file here or below --data_path. Give {_legal()}."
    )


def _legal() -> str:
    return f"a file of Jinja, or the name of a built-in one ({', '.join(BUILT_IN)})"
