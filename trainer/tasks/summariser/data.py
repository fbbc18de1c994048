"""Documents with their summaries: a user's own rows, the embedded corpus, or the made-up one.

Every row is {"id": text, "document": text, "summaries": [texts]}; the order of rows never changes.
A blank document is kept (`python -m trainer stats` counts it). Blank summaries are left out, and a
row without summaries has no label.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.config.formats.layouts import SUMMARIES
from trainer.data import lookup, stdlib_docs
from trainer.data.formats import picked
from trainer.data.formats.lists import as_list, structure
from trainer.data.formats.normal_form import is_blank
from trainer.data.left_out import note
from trainer.data.readers.folders import split_names
from trainer.data.readers.jsonl import preview
from trainer.data.readers.own_rows import own_rows
from trainer.errors import DataError, nearest
from trainer.metrics.similarity import can_read

if TYPE_CHECKING:
    from trainer.protocol.task import Places, Row
    from trainer.tasks.summariser.config import Data

UNSUMMARISED = "documents without a summary (neither learnt nor scored)"
OTHER_SCRIPT = (
    "summaries in another script than a to z, all that ROUGE reads (their score says little)"
)


def rows(data: Data, places: Places, split: str) -> Iterator[Row]:
    """The rows of "train", "valid" or "test".

    DataError names the file and line where a value is missing or has another type.
    """
    if data.source == "lookup":
        yield from lookup.summaries(split, facts=data.facts)
        return
    split_names(split)
    if data.source == "stdlib_docs":
        # the first line of a docstring is the summary of what follows a blank line (PEP 257)
        for row in stdlib_docs.texts(split):
            name, _, docstring = row["text"].partition("\n")
            summary, _, body = docstring.partition("\n\n")
            if body.strip() and "\n" not in summary:
                document = " ".join(body.split())
                yield {"id": name, "document": document, "summaries": [summary.strip()]}
        return
    # the first name that a row has decides its side of data.valid_share
    own = [(name,) for name in data.summaries]
    groups = ((data.document,), *SUMMARIES.groups, *own)
    layout = replace(SUMMARIES, groups=groups, lists=frozenset(data.summaries))
    how: dict[str, Any] = {"layout": layout, "cache_dir": places.cache_dir}
    for index, (place, raw) in picked.enumerated(own_rows(data, split, places.data_path, **how)):
        number = index + 1
        line = place.rpartition(" ")[2]
        row = _row(raw, data, place=place, number=line if line.isdecimal() else str(number))
        if not row["summaries"]:
            note(place, UNSUMMARISED, field=data.summaries[0])
        yield row


def document_row(raw: Row, data: Data, place: str) -> Row:
    """The row of an object, without its summaries."""
    return _row({**raw, **dict.fromkeys(data.summaries)}, data, place=place, number="0")


def _row(raw: Row, data: Data, *, place: str, number: str) -> Row:
    columns = [data.document, *data.summaries]
    missing = [column for column in columns if column not in raw and column not in data.columns]
    if missing:
        close = "; ".join(
            f"{column!r}: {nearest(column, [str(key) for key in raw])}" for column in missing
        )
        raise DataError(
            f"{place}: no such column. {close} Say in data.columns what yours are called: "
            '{"document": "article", "summary": "highlights"}.',
            place=place,
        )
    texts = _document(raw.get(data.document), data.document, place)
    summaries: list[str] = []
    for column in data.summaries:
        texts_of_column = _texts(raw.get(column), column, place)
        for text in texts_of_column:
            if is_blank(text):
                note(place, "blank summaries (left out)", field=column)
                continue
            summaries.append(text)
            if not can_read(text):
                note(place, OTHER_SCRIPT, field=column)
    row_id = raw.get(data.id)
    return {
        "id": str(number if row_id is None else row_id).strip(),
        "document": " ".join(text.strip() for text in texts),
        "summaries": summaries,
    }


def _document(value: Any, column: str, place: str) -> list[str]:
    """The texts of a document: of a list, or of a text that is one in square brackets, as tables
    hold lists. Any other text is the document as it stands: JSON objects are summarised, too.
    """
    if not isinstance(value, str) or value == "":
        return _texts(value, column, place)
    try:
        items = structure(value, place, column) if value.lstrip().startswith("[") else None
    except DataError:
        items = None
    is_of_texts = isinstance(items, list) and all(isinstance(one, str) for one in items)
    return [str(one) for one in items] if items and is_of_texts else [value]


def _texts(value: Any, column: str, place: str) -> list[str]:
    """A list of texts, from a text, a list of texts or None."""
    values = as_list(value, place, column)
    values = values if isinstance(values, list) else [] if values is None else [values]
    wrong = [item for item in values if not isinstance(item, str)]
    if wrong:
        raise DataError(
            f"{place}: {column!r} is {preview(wrong[0])}, want a text or a list of texts.",
            place=place,
            field=column,
        )
    return values
