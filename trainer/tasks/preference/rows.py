"""Rows of preferences out of a person's files: what people prefer, with what it follows.

Of pairs {"answers": [chosen, rejected], "label", "beside": {"margin"}}, of single answers
{"answers": [answer], "label", "beside": {"margin", "other"}}. An answer is a conversation,
{"messages", "tools"?}, whose last turns are the answer, or a text, {"text", "answer_spans"}. The
other is what a row behind this one answers, behind this row's prompt: KTO measures by it how far
the model is from its start. What is "beside" says nothing of whether two rows are equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from trainer.data.chat.rows import learnable
from trainer.data.formats.conversation import LEARNS, turns_in
from trainer.data.formats.json_text import preview
from trainer.data.formats.normal_form import is_blank
from trainer.data.formats.roles import ASSISTANT, CALL, role_of
from trainer.data.left_out import note
from trainer.data.readers import fields
from trainer.errors import DataError
from trainer.protocol.task import Row

EQUAL = "pairs whose two answers are equal (left out)"
TIED = "pairs whose two answers have the same score"
LOWER = "pairs whose chosen answer has the lower score"
REPEATED = "prompts that both answers repeat (so that they stand there twice)"
UNHEARD = "prompts that are no turn of what both answers begin with (left out)"
ONE_LABEL = "splits whose answers all have one label (nothing is learnt of what tells them apart)"
_LABELS = {"true": True, "false": False, "1": True, "0": False, 1: True, 0: False}

Placed = Iterable[tuple[str, Row]]
# (what an answer follows, the answer, the raw row, its place) -> the answer as the task encodes it
Write = Callable[[Any, Any, Row, str], Row]


def is_single(raw: Row) -> bool:
    """Whether a raw row is one answer, and no pair."""
    return raw.get("completion") is not None and None in (raw.get("chosen"), raw.get("rejected"))


def pairs(placed: Placed, write: Write, *, needs_margin: bool) -> Iterator[Row]:
    """A row for each pair of answers that differ. DataError names the place of a wrong row."""
    for place, raw in placed:
        prompt, chosen, rejected = _parts(raw, place)
        answers = [write(prompt, answer, raw, place) for answer in (chosen, rejected)]
        if answers[0] == answers[1]:
            note(place, EQUAL, field="rejected")
            continue
        margin = _margin(raw, place, is_needed=needs_margin)
        yield {"answers": answers, "label": True, "beside": {"margin": margin}}


def singles(placed: Placed, write: Write) -> Iterator[Row]:
    """A row for each answer with a label; a pair is two of them. The other answer of a row is of
    the next row that has another prompt; of the last rows, of the first such row.
    """
    firsts: list[list[_Single]] = []  # of the first two prompts
    alike: list[_Single] = []  # rows behind one another that have one prompt
    labels: dict[bool, str] = {}  # where each was seen first
    for place, raw in placed:
        answers = _singles(raw, place, write)
        if not answers:
            continue
        labels.update({one.label: place for one in answers if one.label not in labels})
        if alike and answers[0].prompt != alike[0].prompt:
            yield from _with_others(alike, answers)
            alike = []
        if all(answers[0].prompt != one[0].prompt for one in firsts[:2]):
            firsts = [*firsts, answers][:2]
        alike += answers
    if alike:
        others = (one for one in firsts if one[0].prompt != alike[0].prompt)
        yield from _with_others(alike, next(others, alike))
    if len(labels) == 1:
        (first,) = labels.values()
        note(first, ONE_LABEL, field="label")


class _Single:
    """An answer with its label, which may be written behind another prompt."""

    def __init__(
        self, prompt: Any, answer: Any, *, label: bool, behind: Callable[[Any], Row]
    ) -> None:
        self.prompt, self.answer, self.label, self.behind = prompt, answer, label, behind
        self.whole = behind(answer)


def _singles(raw: Row, place: str, write: Write) -> list[_Single]:
    """One answer, or the two of a pair; none of a pair whose answers are equal."""
    if is_single(raw):
        prompt = raw.get("prompt")
        labelled = {_label(raw.get("label"), place): raw["completion"]}
    else:
        prompt, chosen, rejected = _parts(raw, place)
        labelled = {True: chosen, False: rejected}

    def behind(answer: Any) -> Row:
        return write(prompt, answer, raw, place)

    answers = [_Single(prompt, one, label=label, behind=behind) for label, one in labelled.items()]
    if len(answers) == 2 and answers[0].whole == answers[1].whole:
        note(place, EQUAL, field="rejected")
        return []
    return answers


def _with_others(rows: list[_Single], others: list[_Single]) -> Iterator[Row]:
    """The rows, each with the answer of one of the others behind its prompt."""
    for number, one in enumerate(rows):
        other = one.behind(others[number % len(others)].answer)
        beside = {"margin": 0.0, "other": other}
        yield {"answers": [one.whole], "label": one.label, "beside": beside}


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
    whole = {"prompt": _unlearnt(prompt), "completion": answer}
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


def _unlearnt(prompt: Any) -> Any:
    """A prompt of which no turn is learnt, whatever its turns say."""
    turns = turns_in(prompt)
    if turns is None:
        return prompt
    silent = [{key: one for key, one in turn.items() if key not in LEARNS} for turn in turns]
    return [{**turn, "weight": 0} if _role(turn) in (ASSISTANT, CALL) else turn for turn in silent]


def _parts(raw: Row, place: str) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected), each a text or a list of turns, also where the row holds the list
    as a text. Without a prompt it is what both answers begin with.
    """
    for name in ("chosen", "rejected"):
        if raw.get(name) is None:
            raise DataError(
                f"{place}: {name!r} is missing (keys: {fields.keys(raw)}). A row has a prompt, "
                "chosen and rejected; data.columns says what yours are called.",
                place=place,
                field=name,
            )
    prompt, chosen, rejected = (
        turns_in(raw.get(name)) or raw.get(name) for name in ("prompt", "chosen", "rejected")
    )
    if isinstance(chosen, list) and isinstance(rejected, list):
        whole = _parts_of_turns(prompt, chosen, rejected, place)
    elif isinstance(chosen, str) and isinstance(rejected, str):
        whole = _parts_of_texts(prompt, chosen, rejected, place)
    else:
        whole = prompt, chosen, rejected
    if whole[0] is None:
        raise DataError(
            f"{place}: 'prompt' is missing, and 'chosen' and 'rejected' begin with no turn that "
            "they share. Give what both answer.",
            place=place,
            field="prompt",
        )
    return whole


def _parts_of_turns(
    prompt: Any, chosen: list[Any], rejected: list[Any], place: str
) -> tuple[Any, Any, Any]:
    """A prompt that both lists of turns repeat is taken once: a list of turns, or a text that is
    one of the turns (UltraFeedback). Any other text is what the user says, behind a system turn.
    """
    if isinstance(prompt, list):
        turns = cast("list[Any]", prompt)
        ends = [answer[: len(turns)] == turns != answer for answer in (chosen, rejected)]
        length = len(turns) if all(ends) else 0
        return turns, chosen[length:], rejected[length:]
    both = cast("zip[tuple[Any, Any]]", zip(chosen, rejected, strict=False))
    shared = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both)]
    if len(shared) == min(len(chosen), len(rejected)):
        shared = shared[:-1]  # equal answers, or one that is the beginning of the other
    if prompt is None or any(_role(turn) == "user" for turn in shared):
        if prompt is not None and all(_content(turn) != str(prompt).strip() for turn in shared):
            note(place, UNHEARD, field="prompt")
        return shared or prompt, chosen[len(shared) :], rejected[len(shared) :]
    head = list(itertools.takewhile(lambda turn: _role(turn) == "system", shared))
    if head:
        prompt = [*head, {"role": "user", "content": prompt}]
    return prompt, chosen[len(head) :], rejected[len(head) :]


def _parts_of_texts(prompt: Any, chosen: str, rejected: str, place: str) -> tuple[Any, str, str]:
    if chosen == rejected:
        return prompt or "", chosen, rejected
    if prompt is None:
        length = _common(chosen, rejected)
        if is_blank(chosen[length:]) or is_blank(rejected[length:]):
            raise DataError(
                f"{place}: of 'chosen' and 'rejected' one is the beginning of the other, so that "
                "they do not tell where the answers begin. Give the 'prompt'.",
                place=place,
                field="prompt",
            )
        return chosen[:length], chosen[length:], rejected[length:]
    text = prompt.strip() if isinstance(prompt, str) else ""
    if text and all(answer.lstrip().startswith(text) for answer in (chosen, rejected)):
        note(place, REPEATED, field="prompt")
    return prompt, chosen, rejected


def _role(turn: Any) -> str | None:
    return role_of(turn.get("role") or turn.get("from")) if isinstance(turn, dict) else None


def _content(turn: Any) -> str:
    said = turn.get("content") or turn.get("value") if isinstance(turn, dict) else turn
    return str(said).strip()


def _common(one: str, other: str) -> int:
    """The length of the prompt that two texts share: a blank before their first difference belongs
    to the answers, as tokenizers have it.
    """
    pairs = enumerate(zip(one, other, strict=False))
    length = next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
    return length - 1 if length and one[length - 1] == " " else length


def _margin(raw: Row, place: str, *, is_needed: bool) -> float:
    """The margin of a row, or how much higher its chosen answer is scored; 0 without both."""
    if raw.get("margin") is not None:
        margin = fields.finite(raw["margin"], place, "margin")
        if margin < 0:
            note(place, LOWER, field="margin")
        return margin
    scores = [raw.get(name) for name in ("score_chosen", "score_rejected")]
    if None not in scores:
        names = ("score_chosen", "score_rejected")
        chosen, rejected = (
            fields.finite(score, place, name) for score, name in zip(scores, names, strict=True)
        )
        if chosen <= rejected:
            note(place, LOWER if chosen < rejected else TIED, field="score_chosen")
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
    if not isinstance(key, str | int | float) or key not in _LABELS:
        raise DataError(
            f"{place}: 'label' is {preview(value)}, want true or false.", place=place, field="label"
        )
    return _LABELS[key]
