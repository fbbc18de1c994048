"""Reads the fields of a JSON object of a data file, under the names of the different formats.

`place` is the position of the object, for messages: "train.jsonl, line 7".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.data.formats.lists import as_list, structure
from trainer.data.formats.normal_form import is_blank
from trainer.data.left_out import count_unread, doubt
from trainer.data.readers.jsonl import preview
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

PASSAGE_IDS = ("docid", "_id", "id", "passage_id", "psg_id")  # Tevatron; BEIR; FiD; DPR, twice
QUESTION_IDS = ("query_id", "_id", "qid", "id")  # Tevatron; BEIR; NaturalQuestions here; FiD
QUESTIONS = ("query", "query_text", "question", "text")  # Tevatron 1 and 2; FiD and DPR; BEIR
_ANSWERS = ("answers", "answer")
# Keys of a passage that are read, and what FiD's and DPR's files say of each besides.
_PASSAGE_KEYS = {*PASSAGE_IDS, "title", "text", "score", "hasanswer", "has_answer", "title_score"}
_MARKS = {"0": 0, "1": 1}  # of a context, in the cell of a table


def first_given(raw: Row, names: Sequence[str], default: str | None = None) -> tuple[str, Any]:
    """The first of `names` that the object has and that is not null, with its value.

    If there is none, (name, None) with the name for messages: `default`, or the first one.
    """
    for name in names:
        if raw.get(name) is not None:
            return name, raw[name]
    return default or names[0], None


def keys(raw: Row) -> str:
    """The keys of an object, for messages."""
    return ", ".join(raw) or "none"


def text(value: Any, place: str, name: str) -> str:
    """The value, which must be text that is not blank."""
    if not isinstance(value, str) or is_blank(value):
        raise DataError(
            f"{place}: {name!r} is {preview(value)}, want text that is not blank.",
            place=place,
            field=name,
        )
    return value


def required_text(raw: Row, name: str, place: str) -> str:
    """The text under a key that must be there."""
    if name not in raw:
        raise DataError(
            f"{place}: {name!r} is missing (keys: {keys(raw)}).", place=place, field=name
        )
    return text(raw[name], place, name)


def texts(value: Any, place: str, name: str) -> list[str]:
    """The value, which must be a list of texts that are not blank, or one text; see lists.py."""
    items = as_list(value, place, name)
    if not isinstance(items, list) or not items:
        raise DataError(
            f"{place}: {name!r} is {preview(value)}, want a list of texts that is not empty.",
            place=place,
            field=name,
        )
    if items == [value]:
        doubt(value, place, name, is_list=True)
        return [text(value, place, name)]
    return [text(one, place, f"{name}[{index}]") for index, one in enumerate(items)]


def titles(value: Any, place: str, count: int) -> list[str]:
    """The titles of `count` contexts, one each."""
    values = texts(value, place, "titles")
    if len(values) != count:
        raise DataError(
            f"{place}: {len(values)} titles for {count} contexts; give one each.",
            place=place,
            field="titles",
        )
    return values


def passages(value: Any, place: str, name: str) -> list[Row]:
    """The passages of a list of objects and ids, or of one, each as `passage` reads it."""
    of_text = structure(value, place, name) if isinstance(value, str) else None
    values = [of_text] if isinstance(of_text, dict) else as_list(value, place, name)
    if not isinstance(values, list):
        raise DataError(
            f"{place}: {name!r} is {preview(value)}, want a list of passages or of their ids.",
            place=place,
            field=name,
        )
    count_unread(name, [one for one in values[:1] if isinstance(one, dict)], _PASSAGE_KEYS)
    return [passage(one, place, f"{name}[{index}]") for index, one in enumerate(values)]


def contexts(raw: Row, place: str) -> list[Row] | None:
    """{"text", "title"?} of "contexts" with "titles", or of "context" with "title"; None when the
    object has neither.
    """
    name, value = first_given(raw, ("contexts", "context"))
    if value is None:
        return None
    bodies = [text(value, place, name)] if name == "context" else texts(value, place, name)
    title = raw.get("title") if name == "context" else raw.get("titles")
    if title is None:
        return [{"text": one} for one in bodies]
    headings = titles([title] if name == "context" else title, place, len(bodies))
    return [{"title": one, "text": body} for one, body in zip(headings, bodies, strict=True)]


def answers(raw: Row, place: str) -> list[str]:
    """The answers of a question, a list or one text; none when the file does not know them."""
    name, value = first_given(raw, _ANSWERS)
    value = as_list(value, place, name)
    return [] if value is None or value == [] else texts(value, place, name)


def useful_contexts(raw: Row, place: str, count: int) -> list[int]:
    """Whether each of `count` contexts answers the question, 0 or 1."""
    values = as_list(raw["useful_contexts"], place, "useful_contexts")
    marks: list[Any] = [
        _MARKS.get(one, one) if isinstance(one, str) else one for one in values or ()
    ]
    if len(marks) != count or not all(mark in (0, 1) for mark in marks):
        raise DataError(
            f"{place}: 'useful_contexts' is {preview(values)}, want a 0 or 1 for each context.",
            place=place,
            field="useful_contexts",
        )
    return marks


def identity(value: Any, place: str, name: str) -> str:
    """An id as text without white space around it: an integer, or text that is not blank."""
    is_text = isinstance(value, str) and bool(value.strip())
    if not is_text and (not isinstance(value, int) or isinstance(value, bool)):
        raise DataError(
            f"{place}: {name!r} is {preview(value)}, want an id: a number without decimals, or "
            "text.",
            place=place,
            field=name,
        )
    return str(value).strip()


def column_identity(value: Any, place: str, name: str) -> str:
    """An id that a run file can hold between its blanks."""
    if isinstance(value, str) and len(value.split()) != 1:
        raise DataError(
            f"{place}: {name!r} is {preview(value)}, want an id: an integer, or text without "
            "blanks.",
            place=place,
            field=name,
        )
    return identity(value, place, name)


def finite(value: Any, place: str, name: str) -> float:
    """The number, which DPR writes as text. NaN is refused: it has no place in an order."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"{place}: {name} is {preview(value)}, want a finite number.", place=place, field=name
        )
    return number


def passage(raw: Any, place: str, name: str) -> Row:
    """{"id"?, "title"?, "text"?, "score"?} of a passage, which is an object, or an id alone.

    What is missing or null in the file is missing in the row; without text there is an id.
    """
    if not isinstance(raw, dict):
        return {"id": identity(raw, place, name)}
    row = passage_fields(raw, place, f"{name}.")
    if "id" not in row and "text" not in row:
        raise DataError(
            f"{place}: {name!r} has neither text nor id (keys: {keys(raw)}); give one.", place=place
        )
    return row


def passage_fields(raw: Row, place: str, prefix: str = "") -> Row:
    """The same of an object. prefix: what messages put before its keys."""
    row: Row = {}
    id_name, number = first_given(raw, PASSAGE_IDS)
    if number is not None:
        row["id"] = identity(number, place, f"{prefix}{id_name}")
    for key in ("title", "text"):
        value = raw.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            raise DataError(
                f"{place}: '{prefix}{key}' is {preview(value)}, want text.",
                place=place,
                field=f"{prefix}{key}",
            )
        row[key] = value
    if raw.get("score") is not None:
        row["score"] = finite(raw["score"], place, f"'{prefix}score'")
    return row
