"""Alpaca's instructions, and prompts with completions, as what a language model or a summariser
reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.data.formats.conversation import with_input
from trainer.data.formats.json_text import preview
from trainer.data.formats.normal_form import is_blank
from trainer.data.left_out import note
from trainer.data.readers import fields
from trainer.data.usual.placed import Around, Placed, named
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

UNANSWERED = "instructions whose output is blank (left out)"
# The two prompts of the format's authors: README of tatsu-lab/stanford_alpaca, "Data Release".
_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


def alpaca_conversations(placed: Placed, around: Around) -> Placed:
    """{"messages"}: the system and the earlier turns that the row has; then instruction and input
    are one turn of the user, and the output is the assistant's.
    """
    for place, raw in _with_answers(placed, around):
        turns: list[Row] = []
        if raw.get("system"):
            turns.append({"role": "system", "content": fields.text(raw["system"], place, "system")})
        for question, answered in _history(raw, place):
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": answered})
        question = with_input({"prompt": raw["instruction"], "input": raw.get("input")})
        turns.append({"role": "user", "content": question})
        if around.is_labelled:
            turns.append({"role": "assistant", "content": raw["output"]})
        yield place, {"messages": turns}


def alpaca_completions(placed: Placed, around: Around) -> Placed:
    """{"prompt", "completion"}: the prompt is the one that Alpaca's authors wrote around an
    instruction. A row with a system or with earlier turns is refused: that prompt has no place for
    them.
    """
    for place, raw in _with_answers(placed, around):
        extra = next((name for name in ("system", "history") if raw.get(name)), None)
        if extra is not None:
            raise DataError(
                f"{place}: {extra!r} is {preview(raw[extra])}, which Alpaca's prompt has no place "
                'for. Read the rows as conversations: data.source="chat".',
                place=place,
                field=extra,
            )
        has_input = bool((raw.get("input") or "").strip())
        prompt = _PROMPT_WITH_INPUT if has_input else _PROMPT
        row = {"prompt": prompt.format(instruction=raw["instruction"], input=raw.get("input"))}
        yield place, row | ({"completion": raw["output"]} if around.is_labelled else {})


def alpaca_summaries(placed: Placed, around: Around) -> Placed:
    """{"document", "summary"}: instruction and input, and the output."""
    for place, raw in _with_answers(placed, around):
        document = with_input({"prompt": raw["instruction"], "input": raw.get("input")})
        yield place, named(raw, {"document": document, "summary": raw.get("output")})


def prompt_summaries(placed: Placed, around: Around) -> Placed:
    """{"document", "summary"}: a prompt and its completion."""
    for place, raw in placed:
        fields.required_text(raw, "prompt", place)
        document = with_input({"prompt": raw["prompt"], "input": raw.get("input")})
        yield place, named(raw, {"document": document, "summary": raw.get("completion")})


def sharegpt(placed: Placed, around: Around) -> Placed:
    """Conversations, which the reader of conversations knows; those to predict as "messages"."""
    for place, raw in placed:
        if around.is_labelled or raw.get("conversations") is None:
            yield place, raw
        else:
            yield place, {**raw, "messages": raw["conversations"]}


def _with_answers(placed: Placed, around: Around) -> Placed:
    """The rows whose instruction, input and output are texts; blank outputs are left out."""
    for place, raw in placed:
        fields.required_text(raw, "instruction", place)
        if not isinstance(raw.get("input"), str | None):
            raise DataError(
                f"{place}: 'input' is {preview(raw['input'])}, want text.",
                place=place,
                field="input",
            )
        output = raw.get("output")
        if around.is_labelled and (output is None or is_blank(str(output))):
            note(place, UNANSWERED, field="output")
            continue
        if around.is_labelled:
            fields.text(output, place, "output")
        yield place, raw


def _history(raw: Row, place: str) -> list[tuple[str, str]]:
    """The earlier turns of a row as LLaMA-Factory writes them, [[instruction, output], ...]."""
    pairs: list[Any] = raw.get("history") or []
    for number, pair in enumerate(pairs):
        is_pair = isinstance(pair, list) and len(pair) == 2  # pyright: ignore[reportUnknownArgumentType]
        if not is_pair or not all(isinstance(one, str) for one in pair):  # pyright: ignore[reportUnknownVariableType]
            raise DataError(
                f"{place}: history[{number}] is {preview(pair)}, want an instruction and its "
                "output, both texts.",
                place=place,
                field=f"history[{number}]",
            )
    return [(question, answered) for question, answered in pairs]
