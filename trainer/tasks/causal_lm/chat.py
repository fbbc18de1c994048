"""Conversations as token ids, with the tokens that the assistant says.

A chat template is a program that writes a conversation as one text; it does not tell who says what.
So marks are put into its loops, and one rendering tells where each turn stands (chat_marks.py). For
a template of which that is not known, a turn of the assistant is located by two renderings: one of
all turns before it, opened for an answer, and one that also holds the turn. This is right if each
rendering begins with the one before it, which is checked for every turn of every row.
"""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.config.userfile import placed
from trainer.data import vocabulary
from trainer.data.formats.conversation import ASSISTANT, counts
from trainer.data.readers.jsonl import preview
from trainer.errors import ConfigError, DataError
from trainer.tasks.causal_lm.chat_marks import (
    DATE,
    MarkedText,
    Span,
    marked_text,
    pinned,
    with_marks,
)
from trainer.tasks.causal_lm.chat_templates import BUILT_IN

if TYPE_CHECKING:
    from trainer.protocol.task import Row

log = logging.getLogger(__name__)

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CLOCK = {"date_string": DATE.strftime("%d %b %Y")}
_OPENED = "{{- bos_token }}"

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Spoken:
    """A conversation as text, with the spans of the turns that are learnt."""

    text: str
    spans: list[Span]
    needs_end: bool  # whether the last span lacks a token that ends a turn


@dataclass(frozen=True)
class _Said:
    """What an assistant says in a turn, behind its header."""

    text: str
    opened: int  # how many characters of it the template writes to open the turn


class ChatTemplate:
    """How one tokenizer writes conversations."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer, self.name = tokenizer, name
        added = tokenizer.added_tokens_decoder.values()
        self._marked: dict[str, Any] = {}  # by the source of a template: the same with marks
        self._openings: dict[tuple[Any, ...], str | None] = {}
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
        return {"chat_template": self.text, "date": DATE.date().isoformat()}

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
        marked = self._marked_text(messages, tools)
        if marked is not None and marked.text != whole:
            marked = None
        spans = self._spans_of_marks(messages, tools, counted, marked)
        if marked is None or spans is None:
            spans = self._spans_of_prefixes(messages, tools, counted, whole)
        elif not _GENERATION.search(self.tokenizer.get_chat_template(None, tools)):
            by_turn = dict(zip(counted, spans, strict=True))
            whole, spans = self._as_said(messages, tools, by_turn, marked)
        self._check_written(messages, counted, [whole[start:stop] for start, stop in spans])
        last = spans[-1][1]
        is_last = not whole[last:].strip() and not whole[:last].endswith(self._ends)
        return Spoken(whole, spans, needs_end=is_last)

    def _spans_of_marks(
        self,
        messages: Sequence[Message],
        tools: Any,
        counted: Sequence[int],
        marked: MarkedText | None,
    ) -> list[Span] | None:
        """The spans of the counted turns, by one rendering; None where it does not tell them."""
        if marked is None:
            return None
        spans = [self._marked_span(messages, tools, number, marked) for number in counted]
        return None if None in spans else [span for span in spans if span is not None]

    def _marked_text(
        self, messages: Sequence[Message], tools: Any, *, is_opened: bool = False
    ) -> MarkedText | None:
        source = self.tokenizer.get_chat_template(None, tools)
        if source not in self._marked:
            self._marked[source] = with_marks(source)
        variables = {
            **self.tokenizer.special_tokens_map,
            **_CLOCK,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": is_opened,
        }
        try:
            return marked_text(self._marked[source], [_plain(one) for one in messages], variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError):
            return None  # the marks themselves may be what it cannot read

    def _marked_span(
        self, messages: Sequence[Message], tools: Any, number: int, marked: MarkedText
    ) -> Span | None:
        """The span of the assistant's turn `number`, with the token that ends it: without the
        beginning that the template writes to open an answer.
        """
        turn = marked.spans[number]
        opening = self._opening(messages, tools, number)
        if turn is None or opening is None:
            return None
        start, stop = turn
        written = marked.text[start:stop]
        if not opening and not written.lstrip().startswith(_content(messages[number])):
            return None
        length = _common_length(written, opening)
        if length < len(opening):  # it opens thoughts, say, which this turn has not
            length = self._last_boundary(opening[:length])
            if not length:
                return None
        if number == len(messages) - 1:
            written = marked.text[start:]  # the template may end the whole text behind the turn
        ended = written.rstrip()
        has_end = len(ended) > length and ended.endswith(self._ends)
        return start + length, start + len(ended if has_end else written)

    def _as_said(
        self,
        messages: Sequence[Message],
        tools: Any,
        spans: Mapping[int, Span],
        of_whole: MarkedText,
    ) -> tuple[str, list[Span]]:
        """The text and its spans, with each learnt turn as it was written when it was the last one,
        for a template that drops the beginning of earlier turns, as Qwen 3 does with thoughts.
        """
        users = [number for number, one in enumerate(messages) if one["role"] == "user"]
        head = list(messages[:1]) if messages[0]["role"] == "system" else []
        whole = of_whole.text
        starts = {number: (of_whole.spans[number] or span)[0] for number, span in spans.items()}
        said = {number: _Said(whole[start:stop], 0) for number, (start, stop) in spans.items()}
        for first, stop in pairwise(users):
            counted = [number for number in range(first, stop) if number in spans]
            window = [*head, *messages[first:stop]]
            marked = self._marked_text(window, tools) if counted else None
            if marked is None:
                continue
            for number in counted:
                place = number - first + len(head)
                span, turn = self._marked_span(window, tools, place, marked), marked.spans[place]
                if span is None or turn is None:
                    continue
                # behind the same header, which may be all of what opens an answer or less
                start = turn[0] + spans[number][0] - starts[number]
                text = marked.text[start : span[1]]
                if text.endswith(said[number].text):
                    said[number] = _Said(text, max(0, span[0] - start))
        parts: list[str] = []
        moved: list[Span] = []
        place = length = 0
        for number, (start, stop) in sorted(spans.items()):
            one = said[number]
            parts += [whole[place:start], one.text]
            length += start - place
            moved.append((length + one.opened, length + len(one.text)))
            length, place = length + len(one.text), stop
        return "".join([*parts, whole[place:]]), moved

    def _check_written(
        self, messages: Sequence[Message], counted: Sequence[int], learnt: Sequence[str]
    ) -> None:
        """DataError for a turn of which the template writes nothing, or not the calls."""
        for number, text in zip(counted, learnt, strict=True):
            calls = messages[number].get("tool_calls") or ()
            functions = [call.get("function", call) for call in calls]
            lost = next(
                (f"the call of {one.get('name')!r}" for one in functions if _lacks(text, one)), None
            )
            if _content(messages[number]) and not self._without_ends(text):
                lost = "the content"
            if lost is not None:
                raise DataError(
                    f"{_name_roles(messages)}: the chat template {self.name} does not write {lost} "
                    f'of turn {number + 1} of {len(messages)}. Give that turn "weight": 0, or '
                    f"name a template in data.chat_template: {_legal()}."
                )

    def _without_ends(self, text: str) -> str:
        text = text.strip()
        while text and text.endswith(self._ends):
            token = max((one for one in self._ends if text.endswith(one)), key=len)
            text = text.removesuffix(token).strip()
        return text

    def _opening(self, messages: Sequence[Message], tools: Any, number: int) -> str | None:
        """What the template writes behind the turns before `number` to open an answer; None if that
        is not known. It depends on the turn before and on whether there are tools.
        """
        if number == 0:
            return None
        before = messages[number - 1]
        key = (before["role"], bool(before.get("tool_calls")), number == 1, bool(tools))
        if key not in self._openings:
            marked = self._marked_text(messages[:number], tools, is_opened=True)
            last = marked.spans[-1] if marked is not None else None
            self._openings[key] = None if marked is None or last is None else marked.text[last[1] :]
        return self._openings[key]

    def _last_boundary(self, text: str) -> int:
        """How many characters of a text stand up to its last line's end or special token."""
        ends = [text.rfind("\n") + 1]
        ends += [text.rfind(token) + len(token) for token in self._ends if token in text]
        return max(ends)

    def _spans_of_prefixes(
        self, messages: Sequence[Message], tools: Any, counted: Sequence[int], whole: str
    ) -> list[Span]:
        """The spans of the counted turns, by two renderings of what stands before each."""
        try:
            return [self._span(messages, tools, number, whole) for number in counted]
        except _NoPrefix as error:
            spans = self._mark_turns(messages, tools, counted)
            if spans is None:
                raise DataError(
                    f"{_name_roles(messages)}: the chat template {self.name} does not tell what "
                    f'the assistant says: {error}. Give that turn "weight": 0, part the '
                    "conversation into rows of one answer, or name a template in "
                    f"data.chat_template: {_legal()}."
                ) from None
            return spans

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
            pinned(self.tokenizer.get_chat_template(None, tools))
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


def _content(message: Message) -> str:
    return str(message["content"]).strip()


def _lacks(text: str, function: Mapping[str, Any]) -> bool:
    """Whether neither the name nor the arguments of a call stand in a text."""
    told = (str(function.get("name")), json.dumps(function.get("arguments"), ensure_ascii=False))
    return all(one not in text for one in told)


def _common_length(text: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(text), len(other)))


def _plain(message: Message) -> dict[str, Any]:
    """A message without our own key, which templates do not know."""
    return {name: value for name, value in message.items() if name != "weight"}


def _name_roles(messages: Sequence[Message]) -> str:
    return f"the conversation that begins {preview(messages[0].get('content'))}"


def _read(template: str, data_path: Path | None) -> str:
    if template in BUILT_IN:
        return BUILT_IN[template]
    places = [Path(placed(template)), *([data_path / template] if data_path is not None else [])]
    for place in places:
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise ConfigError(
        f"data.chat_template={template!r} is no file here or below --data_path. Give {_legal()}."
    )


def _legal() -> str:
    return f"a file of Jinja, or the name of a built-in one ({', '.join(BUILT_IN)})"
