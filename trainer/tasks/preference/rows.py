"""Rows of preferences out of a person's files: each has two answers with what they follow.

{"answers": [one, other], "margin": number, "label": bool}. An answer is a conversation,
{"messages", "tools"?}, whose last turns are the answer, or a text, {"text", "answer_spans"}. Of a
pair the first answer is the chosen one. With a single answer goes the answer of the next row behind
this row's prompt: KTO measures by it how far the model is from its start.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from trainer.data.chat.rows import learnable
from trainer.data.formats.json_text import preview
from trainer.data.left_out import note
from trainer.data.readers import fields
from trainer.errors import DataError
from trainer.protocol.task import Row

EQUAL = "pairs whose two answers are equal (left out)"
_LABELS = {"true": True, "false": False, "1": True, "0": False, 1: True, 0: False}

Placed = Iterable[tuple[str, Row]]
# (what an answer follows, the answer, the raw row, its place) -> the answer as the task encodes it
Write = Callable[[Any, Any, Row, str], Row]


def pairs(placed: Placed, write: Write, *, needs_margin: bool) -> Iterator[Row]:
    """A row for each pair of answers that differ. DataError names the place of a wrong row."""
    for place, raw in placed:
        prompt, chosen, rejected = _parts(raw, place)
        margin = _margin(raw, place, is_needed=needs_margin)
        answers = [write(prompt, answer, raw, place) for answer in (chosen, rejected)]
        if answers[0] == answers[1]:
            note(place, EQUAL, field="rejected")
            continue
        yield {"answers": answers, "margin": margin, "label": True}


def singles(placed: Placed, write: Write) -> Iterator[Row]:
    """A row for each answer with a label; a pair is two of them."""
    first: list[_Single] = []
    before: list[_Single] = []
    for place, raw in placed:
        answers = _singles(raw, place, write)
        yield from _with_others(before, answers)
        first, before = first or answers, answers
    yield from _with_others(before, first)


class _Single:
    """An answer with its label, which may be written behind another prompt."""

    def __init__(self, prompt: Any, answer: Any, label: bool, behind: Callable[[Any], Row]) -> None:
        self.prompt, self.answer, self.label, self.behind = prompt, answer, label, behind


def _singles(raw: Row, place: str, write: Write) -> list[_Single]:
    if "completion" in raw and "label" in raw:
        found = [(raw.get("prompt"), raw["completion"], _label(raw["label"], place))]
    else:
        prompt, chosen, rejected = _parts(raw, place)
        found = [(prompt, chosen, True), (prompt, rejected, False)]
    singles = []
    for prompt, answer, label in found:

        def behind(other: Any, prompt: Any = prompt) -> Row:
            return write(prompt, other, raw, place)

        singles.append(_Single(prompt, answer, label, behind))
    return singles


def _with_others(rows: list[_Single], others: list[_Single]) -> Iterator[Row]:
    """The rows, each with the answer of one of the others behind its prompt."""
    for number, one in enumerate(rows):
        other = others[number % len(others)]
        answers = [one.behind(one.answer), one.behind(other.answer)]
        yield {"answers": answers, "margin": 0.0, "label": one.label}


# Prompts and answers
# --------------------------------------------------------------------------------------------------


def conversation(prompt: Any, answer: Any, raw: Row, place: str) -> Row:
    """The conversation of a prompt and an answer, of which the answer alone is learnt."""
    if isinstance(answer, str):
        fields.text(answer, place, "answer")
    elif not isinstance(answer, list) or not answer:
        raise DataError(
            f"{place}: an answer is {preview(answer)}, want text, or a list of turns that is not "
            "empty.",
            place=place,
        )
    whole = {"prompt": prompt, "completion": answer}
    return learnable({**whole, "tools": raw.get("tools"), "system": raw.get("system")}, place)


def text(prompt: Any, answer: Any, raw: Row, place: str) -> Row:
    """A prompt and an answer as one text, with the place of the answer in characters."""
    for name, value in (("prompt", prompt), ("answer", answer)):
        if not isinstance(value, str):
            raise DataError(
                f"{place}: the {name} is {preview(value)}, want text. Lists of turns are "
                'conversations: data.source="chat".',
                place=place,
            )
    fields.text(answer, place, "answer")
    whole = prompt + answer
    return {"text": whole, "answer_spans": [(len(prompt), len(whole))]}


def _parts(raw: Row, place: str) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected). Without a prompt it is what both answers begin with; so too where
    the prompt is a text that both lists of turns repeat (UltraFeedback).
    """
    for name in ("chosen", "rejected"):
        if raw.get(name) is None:
            raise DataError(
                f"{place}: {name!r} is missing (keys: {fields.keys(raw)}). A row has a prompt, "
                "chosen and rejected; data.columns says what yours are called.",
                place=place,
                field=name,
            )
    prompt, chosen, rejected = raw.get("prompt"), raw["chosen"], raw["rejected"]
    if isinstance(prompt, list):
        return prompt, chosen, rejected
    if isinstance(chosen, list) and isinstance(rejected, list):
        both = cast("zip[tuple[Any, Any]]", zip(chosen, rejected, strict=False))
        shared = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both)]
        is_whole = len(shared) == min(len(chosen), len(rejected))
        if is_whole and shared:  # equal answers, or one that is the beginning of the other
            shared = shared[:-1]
        if shared:
            return shared, chosen[len(shared) :], rejected[len(shared) :]
    elif prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        length = _common(chosen, rejected)
        return chosen[:length], chosen[length:], rejected[length:]
    if prompt is None:
        raise DataError(
            f"{place}: 'prompt' is missing, and 'chosen' and 'rejected' begin with no turn that "
            "they share. Give what both answer.",
            place=place,
            field="prompt",
        )
    return prompt, chosen, rejected


def _common(one: str, other: str) -> int:
    """The length of the prompt that two texts share: a blank before their first difference belongs
    to the answers, as tokenizers have it.
    """
    pairs = enumerate(zip(one, other, strict=False))
    length = next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
    return length - 1 if length and one[length - 1] == " " else length


def _margin(raw: Row, place: str, *, is_needed: bool) -> float:
    if raw.get("margin") is not None:
        return fields.finite(raw["margin"], place, "margin")
    scores = [raw.get(name) for name in ("score_chosen", "score_rejected")]
    if None not in scores:
        names = ("score_chosen", "score_rejected")
        chosen, rejected = (
            fields.finite(score, place, name) for score, name in zip(scores, names, strict=True)
        )
        return chosen - rejected
    if is_needed:
        raise DataError(
            f"{place}: no 'margin', and no 'score_chosen' with 'score_rejected' (keys: "
            f"{fields.keys(raw)}), which preference.margin asks for. Add it, or leave margin out.",
            place=place,
            field="margin",
        )
    return 0.0


def _label(value: Any, place: str) -> bool:
    key = value.strip().lower() if isinstance(value, str) else value
    if not isinstance(key, str | int) or key not in _LABELS:
        raise DataError(
            f"{place}: 'label' is {preview(value)}, want true or false.", place=place, field="label"
        )
    return _LABELS[key]
