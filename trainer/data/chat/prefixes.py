"""Where the assistant speaks, for a template of which marks do not tell it.

A turn of the assistant is located by two renderings: one of all turns before it, opened for an
answer, and one that also holds the turn. This is right if each rendering begins with the one before
it, which is checked for every turn of every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from trainer.data.chat.templates.built_in import legal
from trainer.data.chat.templates.marks import Span
from trainer.data.chat.writer import CLOCK, GENERATION, Message, Writer, naming, rendered
from trainer.data.formats.conversation import ASSISTANT
from trainer.errors import DataError


def spans_of_prefixes(
    writer: Writer, messages: Sequence[Message], tools: Any, counted: Sequence[int], whole: str
) -> list[Span]:
    """The spans of the turns `counted` in the text `whole` of a conversation.

    DataError when they cannot be told.
    """
    try:
        return [_span(writer, messages, tools, number, whole) for number in counted]
    except _NoPrefix as error:
        spans = _spans_of_generation(writer, messages, tools, counted, whole)
        if spans is None:
            raise DataError(
                f"{naming(messages)}: the chat template {writer.name} does not tell what "
                f'the assistant says: {error}. Give that turn "weight": 0, part the '
                "conversation into rows of one answer, or name a template in "
                f"data.chat_template: {legal()}."
            ) from None
        return spans


def _span(writer: Writer, messages: Sequence[Message], tools: Any, number: int, whole: str) -> Span:
    """The span of the assistant's turn `number`, with the token that ends it."""
    if number == 0:
        raise _NoPrefix("it begins with the assistant")
    before = messages[:number]
    opening = writer.text(before, tools, is_opened=True)
    closed = writer.text(messages[: number + 1], tools)
    turn = f"turn {number + 1} of {len(messages)}"
    if not closed.startswith(opening):
        raise _NoPrefix(f"{turn} does not begin as the template opens it")
    if not whole.startswith(closed):
        raise _NoPrefix(f"{turn} is written otherwise once more turns follow")
    written, content = closed[len(opening) :].lstrip(), str(messages[number]["content"]).strip()
    is_header = not written.startswith(content)
    if is_header and opening == writer.text(before, tools):
        raise _NoPrefix(f"the template has no add_generation_prompt, which opens {turn}")
    ended = closed.rstrip()
    has_end = len(ended) > len(opening) and ended.endswith(writer.ends)
    return len(opening), len(ended if has_end else closed)


def _spans_of_generation(
    writer: Writer, messages: Sequence[Message], tools: Any, counted: Sequence[int], whole: str
) -> list[Span] | None:
    """The spans that {% generation %} marks; None if the template does not mark every turn of the
    assistant, or writes one without the header that opens an answer.
    """
    template = writer.template(tools)
    if not GENERATION.search(template):
        return None
    variables: dict[str, Any] = {**writer.tokenizer.special_tokens_map, **CLOCK, "tools": tools}

    def spans_of(conversation: list[dict[str, Any]]) -> list[list[Span]]:
        both: Any = render_jinja_template(
            conversations=[conversation],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **variables,
        )
        return both[1]

    spans = rendered(spans_of, messages)
    spoken = [number for number, one in enumerate(messages) if one["role"] == ASSISTANT]
    if len(spans[0]) != len(spoken):
        return None
    of_turn = dict(zip(spoken, spans[0], strict=True))
    headers = {number: writer.header(messages[:number], tools) for number in counted if number}
    for number, header in headers.items():
        start = of_turn[number][0]
        if header not in whole[max(0, start - 2 * len(header)) : start + len(header)]:
            return None
    return [of_turn[number] for number in counted]


class _NoPrefix(Exception):
    """A rendering does not begin with the one before it."""
