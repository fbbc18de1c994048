"""Conversations as token ids, with the tokens that the assistant says.

A chat template is a program that writes a conversation as one text; it does not tell who says what.
So marks are put into its loops, and one rendering tells where each turn stands
(templates/marks.py). For a template of which that is not known, renderings of the turns before tell
it (prefixes.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.config.userfile import placed
from trainer.data import vocabulary
from trainer.data.chat.prefixes import spans_of_prefixes
from trainer.data.chat.templates.built_in import BUILT_IN, legal
from trainer.data.chat.templates.marks import DATE, MarkedText, Span
from trainer.data.chat.unwritten import Unwritten
from trainer.data.chat.writer import Message, Writer
from trainer.data.formats.conversation import ASSISTANT, counts
from trainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Encoding

    from trainer.protocol.task import Row

log = logging.getLogger(__name__)

_MOST_LOOKED_UP = 64  # spans: each is looked up from the first token on
_CHARACTERS_AT_ONCE = 1 << 18  # about 10 MB of tokens with their places
_MANY_TURNS = 16  # learnt ones: from there on what each costs is told
_SLOW = "so that renderings of the turns before it tell it: slow for conversations of many turns"
_OPENED = "{{- bos_token }}"


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
        self._writer = Writer(tokenizer, name)
        self._unwritten = Unwritten(self._writer)
        self._is_slow_way_told = False

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
                f"conversations: tokenizer {tokenizer.name_or_path!r} has no chat template. "
                f"Set data.chat_template: {legal()}."
            )
        chat = cls(tokenizer, template or f"of tokenizer {tokenizer.name_or_path}")
        chat._write_opening()
        return chat

    def _write_opening(self) -> None:
        """Let the template begin with the tokenizer's beginning-of-text token, if texts of that
        tokenizer do and those of the template do not. Exports get the template as it is then.
        """
        if not vocabulary.opening_of(self.tokenizer) or self._opens_with(self.tokenizer.bos_token):
            return
        log.info(
            "the chat template %s begins no conversation with %s, with which this tokenizer begins "
            "every text: it is written before each conversation",
            self.name,
            self.tokenizer.bos_token,
        )
        source: Any = self.tokenizer.chat_template
        self.tokenizer.chat_template = (
            {name: _OPENED + one for name, one in source.items()}
            if isinstance(source, dict)
            else _OPENED + source
        )

    def _opens_with(self, token: str) -> bool:
        """Whether the template begins a conversation with a token, which may also end an answer."""
        turns = [{"role": role, "content": "a"} for role in ("system", "user", ASSISTANT)]
        for messages in (turns[1:], turns[1:2], turns):
            try:
                return self._writer.text(messages, None).lstrip().startswith(token)
            except DataError:
                continue
        return token in self.text or "bos_token" in self.text

    @property
    def text(self) -> str:
        """The source of the template, or of all templates where a tokenizer has several."""
        return str(self.tokenizer.chat_template)

    @property
    def words(self) -> set[str]:
        """The words of the template, among them the keys of turns that it reads."""
        return set(re.findall(r"\w+", self.text))

    def identity(self) -> dict[str, str]:
        """What the ids of a conversation depend on besides it and the tokenizer."""
        if "strftime_now" not in self.text:
            return {"chat_template": self.text}
        # until 2026-11-26 such a template wrote the day of its encoding
        return {"chat_template": self.text, "date": DATE.date().isoformat()}

    def tokens(self, rows: Sequence[Row], end: int) -> list[dict[str, list[int]]]:
        """Each whole conversation: "ids", and "scored", which is 1 for each id that is learnt. The
        tokenizer is called once for many.

        end: the id that is appended when no token ends the last answer.
        """
        tokens: list[dict[str, list[int]]] = []
        for group in _groups([self.spoken(row) for row in rows]):
            tokens += self._tokens(group, end)
        return tokens

    def _tokens(self, spoken: Sequence[Spoken], end: int) -> list[dict[str, list[int]]]:
        encoding = self.tokenizer(
            [one.text for one in spoken],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        of_rows: list[dict[str, list[int]]] = []
        for one, ids, places in zip(spoken, encoding["input_ids"], encoding.encodings, strict=True):
            scored = _flags_of(places, one.spans, len(one.text))
            if one.needs_end:
                ids.append(end)
                scored.append(1)
            of_rows.append({"ids": ids, "scored": scored})
        return of_rows

    def spoken(self, row: Row) -> Spoken:
        """The text of a conversation, and the spans of the assistant's turns that are learnt.

        DataError when the template refuses the conversation, or does not tell where a turn stands.
        """
        messages, tools = row["messages"], row.get("tools")
        counted = [number for number, one in enumerate(messages) if counts(one)]
        marked = self._writer.marked_text(messages, tools)
        if marked is not None and marked.is_surely_exact:
            whole = marked.text
        else:
            whole = self._writer.text(messages, tools)
            marked = marked if marked is not None and marked.text == whole else None
        if len(counted) > _MANY_TURNS and not self._writer.opens_fast(tools):
            self._tell_slow_way("may open each answer by what was said before it")
        spans = self._spans_of_marks(messages, tools, counted, marked)
        if marked is None or spans is None:
            if len(counted) > 1:
                self._tell_slow_way("does not tell by its loops where each turn stands")
            spans = spans_of_prefixes(self._writer, messages, tools, counted, whole)
        elif not self._writer.keeps_turns(tools):
            by_turn = dict(zip(counted, spans, strict=True))
            whole, spans = self._as_said(messages, tools, by_turn, marked)
        self._unwritten.check(messages, counted, [whole[start:stop] for start, stop in spans])
        self._unwritten.tell_of_others(messages, whole)
        last = spans[-1][1]
        is_last = not whole[last:].strip() and not whole[:last].endswith(self._writer.ends)
        return Spoken(whole, spans, needs_end=is_last)

    def _tell_slow_way(self, why: str) -> None:
        """Say once that the time for a conversation grows with the square of its turns."""
        if not self._is_slow_way_told:
            log.warning("the chat template %s %s, %s", self.name, why, _SLOW)
            self._is_slow_way_told = True

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
        spans: list[Span] = []
        for number in counted:
            span = self._marked_span(messages, tools, number, marked)
            if span is None:
                return None
            spans.append(span)
        return spans

    def _marked_span(
        self, messages: Sequence[Message], tools: Any, number: int, marked: MarkedText
    ) -> Span | None:
        """The span of the assistant's turn `number`, with the token that ends it: without the
        beginning that the template writes to open an answer.
        """
        turn = marked.spans[number]
        opening = self._writer.opening(marked, number, tools) if number else None
        if turn is None or opening is None:
            return None
        start, stop = turn
        written = marked.text[start:stop]
        if not opening and not written.lstrip().startswith(_content(messages[number])):
            return None
        length = len(opening)
        if not written.startswith(opening):  # it opens thoughts, say, which this turn has not
            length = self._writer.last_boundary(_common(written, opening))
            if not length:
                return None
        if number == len(messages) - 1:
            written = marked.text[start:]  # the template may end the whole text behind the turn
        ended = written.rstrip()
        has_end = len(ended) > length and ended.endswith(self._writer.ends)
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
        texts = {number: _Said(whole[start:stop], 0) for number, (start, stop) in spans.items()}
        for first, stop in pairwise(users):
            counted = [number for number in range(first, stop) if number in spans]
            window = [*head, *messages[first:stop]]
            marked = self._writer.marked_text(window, tools) if counted else None
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
                if text.endswith(texts[number].text):
                    texts[number] = _Said(text, max(0, span[0] - start))
        parts: list[str] = []
        new_spans: list[Span] = []
        place = length = 0
        for number, (start, stop) in sorted(spans.items()):
            one = texts[number]
            parts += [whole[place:start], one.text]
            length += start - place
            new_spans.append((length + one.opened, length + len(one.text)))
            length, place = length + len(one.text), stop
        return "".join([*parts, whole[place:]]), new_spans

    def turn_end(self, end: int) -> int:
        """The token that ends a turn of the assistant; `end` if the template writes none, or if the
        turn cannot be located.
        """
        messages = [{"role": role, "content": "a"} for role in ("user", ASSISTANT)]
        try:
            (encoding,) = self.tokens([{"messages": messages}], end)
        except DataError:
            return end
        scored = [
            n for n, is_scored in zip(encoding["ids"], encoding["scored"], strict=True) if is_scored
        ]
        return scored[-1]

    @property
    def closing(self) -> str:
        """What the template writes behind the last answer of a conversation if no token of it ends
        the answer, so that the end token is appended: chatml's "<|im_end|>" and a line's end with a
        tokenizer that spells it. "" where a token ends it, or the turn cannot be located.
        """
        content = "Closing."
        messages = [{"role": role, "content": content} for role in ("user", ASSISTANT)]
        try:
            spoken = self.spoken({"messages": messages})
        except DataError:
            return ""
        return spoken.text.rpartition(content)[2] if spoken.needs_end else ""

    def lost_turns(self, messages: Sequence[Message], whole: str) -> list[int]:
        """The numbers of the messages of which nothing stands in a text that the template wrote."""
        return self._unwritten.lost_turns(messages, whole)

    def opened(self, row: Row) -> str:
        """A conversation as text, up to where the assistant begins to speak."""
        text = self._writer.text(row["messages"], row.get("tools"), is_opened=True)
        self._unwritten.tell_of_others(row["messages"], text)
        return text


def _groups(spoken: Sequence[Spoken]) -> Iterator[list[Spoken]]:
    """Conversations of at most _CHARACTERS_AT_ONCE together, in order; longer ones alone."""
    group: list[Spoken] = []
    length = 0
    for one in spoken:
        if group and length + len(one.text) > _CHARACTERS_AT_ONCE:
            yield group
            group, length = [], 0
        group.append(one)
        length += len(one.text)
    if group:
        yield group


def flags(tokens: Sequence[Span], spans: Iterable[Span]) -> list[int]:
    """For each token 1 if it shares a character with one of the spans, which do not overlap."""
    bounds = np.array([(0, 0), *sorted(spans)])  # the first one holds no character
    places = np.fromiter(chain.from_iterable(tokens), np.int64, 2 * len(tokens)).reshape(-1, 2)
    # the last span that begins before the token ends
    last = np.searchsorted(bounds[1:, 0], places[:, 1])
    return (places[:, 0] < bounds[last, 1]).astype(int).tolist()


def _flags_of(encoding: Encoding, spans: Sequence[Span], num_characters: int) -> list[int]:
    """`flags` of the tokenizer's own encoding of a text, without a list of the places of all tokens
    where spans are few and end where tokens do.
    """
    flagged = [0] * len(encoding)
    for start, stop in spans:
        first, behind = encoding.char_to_token(start), encoding.char_to_token(stop)
        if stop == num_characters:
            behind = len(encoding)
        if first is None or behind is None or len(spans) > _MOST_LOOKED_UP:
            return flags(encoding.offsets, spans)
        if stop < num_characters and (encoding.token_to_chars(behind) or (0,))[0] != stop:
            return flags(encoding.offsets, spans)
        flagged[first:behind] = [1] * (behind - first)
    return flagged


def _content(message: Message) -> str:
    return str(message["content"]).strip()


def _common(text: str, other: str) -> str:
    """What two texts begin with alike."""
    pairs = enumerate(zip(text, other, strict=False))
    return text[: next((n for n, (a, b) in pairs if a != b), min(len(text), len(other)))]


def _read(template: str, data_path: Path | None) -> str:
    if template in BUILT_IN:
        return BUILT_IN[template]
    places = [Path(placed(template)), *([data_path / template] if data_path is not None else [])]
    for place in places:
        if place.is_file():
            try:
                return place.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"data.chat_template={template!r}: cannot be read ({error}). Save it as UTF-8."
                ) from None
    raise ConfigError(
        f"data.chat_template={template!r} is no file here or below --data_path. Give {legal()}."
    )
