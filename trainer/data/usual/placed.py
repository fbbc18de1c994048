"""Rows on their way from one form to another, and where what belongs to them is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.readers import fields
from trainer.data.readers.jsonl import preview
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

Placed = Iterator[tuple[str, "Row"]]  # (place, row)


@dataclass(frozen=True)
class Around:
    """What a format's reader may need besides the rows."""

    folder: Path | None  # --data_path
    is_labelled: bool = True  # False: rows to predict, which may lack what would be learnt


Reader = Callable[[Placed, Around], Placed]


def as_they_are(placed: Placed, around: Around) -> Placed:
    """The rows of a format whose names are ours."""
    return placed


def named(raw: Row, row: Row) -> Row:
    """`row` with the id and the "dataset" that the raw row has, where it has some."""
    name, number = fields.first_given(raw, fields.QUESTION_IDS)
    more: dict[str, Any] = {} if number is None else {name: number}
    if raw.get("dataset") is not None:
        more["dataset"] = raw["dataset"]
    return {**more, **row}


def texts_by_id(pairs: Iterable[tuple[str, str]], place: Path, *, what: str) -> dict[str, str]:
    """The texts of (id, text) by their ids. DataError when two that differ have one id.

    what: they are called in messages, many of them.
    """
    texts: dict[str, str] = {}
    for name, text in pairs:
        if texts.setdefault(name, text) != text:
            raise DataError(
                f"{place}: two {what} have the id {name!r}, one of them {preview(text)}. Give "
                "every one an id of its own."
            )
    return texts
