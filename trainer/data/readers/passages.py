"""Passages of a corpus, one at a time and in the file's order: JSON lines as Tevatron and BEIR have
them, or a TSV as DPR and FiD have it; packed (.gz) or not.
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.readers.fields import (
    PASSAGE_IDS,
    column_identity,
    identity,
    keys,
    passage_fields,
)
from trainer.data.readers.folders import CORPUS, corpus_file, nq_folder
from trainer.data.readers.jsonl import bad_line, lines, numbered_jsonl, preview, tabbed
from trainer.data.readers.quotes import is_quoted
from trainer.data.readers.row_files import is_header
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

_FIELDS = ["id", "text", "title"]


def passages(path: Path) -> Iterator[Row]:
    """{"id", "text", "title"} of every passage of a corpus; the title may be "", and so may the
    text of one that has a title.

    .jsonl: Tevatron's {"docid", "title", "text"} or BEIR's {"_id", "title", "text"}. Anything else:
    see `tsv_passages`, which reads DPR's and MS MARCO's. DataError for an id with white space,
    which run files cannot hold.
    """
    for place, row in _placed_passages(path):
        column_identity(row["id"], place, "id")
        yield {"id": row["id"], "text": row["text"], "title": row.get("title", "")}


def distinct_passages(path: Path) -> Iterator[Row]:
    """`passages`, and at their end a DataError when two of them have one id. It holds 8 bytes of
    each.
    """
    hashes = array("q")
    for row in passages(path):
        hashes.append(hash(row["id"]))
        yield row
    values, counts = np.unique(np.asarray(hashes), return_counts=True)
    candidates, seen = {*values[counts > 1].tolist()}, set[str]()
    for row in passages(path) if candidates else ():
        if hash(row["id"]) in candidates and row["id"] in seen:
            raise _id_twice(row, path)
        seen.update([row["id"]] if hash(row["id"]) in candidates else [])


def corpus_passages(folder: Path | None, name: str) -> Iterator[Row]:
    """{"id", "text", "title"} of every passage of a file of --data_path or its subfolder nq.

    The title may be "".
    """
    for row in written_passages(corpus_file(folder, name)):
        yield {"id": row["id"], "text": row["text"], "title": row.get("title", "")}


def written_passages(path: Path) -> Iterator[Row]:
    """{"id", "text", "title"?} of every passage of a corpus: no title where the file has none."""
    return (row for _, row in _placed_passages(path))


def passages_with_ids(path: Path, ids: Iterable[str]) -> dict[str, Row]:
    """The passages of a corpus with these ids, by id; only they are held in memory. DataError when
    one is not there.
    """
    needed = set(ids)
    texts = by_id((row for row in passages(path) if row["id"] in needed), path)
    missing = needed - texts.keys()
    if missing:
        raise DataError(
            f"{path} has no passage {min(missing)!r} ({len(missing)} of {len(needed)} are "
            "missing). Give the corpus that these ids are of."
        )
    return texts


def by_id(rows: Iterable[Row], path: Path) -> dict[str, Row]:
    """The passages of a corpus by their ids. DataError when two that differ have one id."""
    texts: dict[str, Row] = {}
    for row in rows:
        if texts.setdefault(row["id"], row) != row:
            raise _id_twice(row, path)
    return texts


def _id_twice(row: Row, path: Path) -> DataError:
    return DataError(
        f"{path}: two passages have the id {row['id']!r}, one of them {preview(row['text'])}. Give "
        "every passage an id of its own."
    )


def numbers_by_id(folder: Path | None, name: str) -> dict[str, int]:
    """The place, from 0, of every passage of a corpus (corpus_passages), by its id. DataError when
    two that differ have one id.
    """
    numbers: dict[str, int] = {}
    twice: set[str] = set()
    for number, passage in enumerate(corpus_passages(folder, name)):
        if passage["id"] in numbers:
            twice.add(passage["id"])
        numbers[passage["id"]] = number
    if twice:  # these alone are held in memory to be compared
        rows = (row for row in corpus_passages(folder, name) if row["id"] in twice)
        by_id(rows, corpus_file(folder, name))
    return numbers


def nq_passages(folder: Path | None) -> Iterator[Row]:
    """{"id", "text", "title"} of every line of NaturalQuestions' corpus.tsv."""
    return tsv_passages(nq_folder(folder) / CORPUS)


def tsv_passages(path: Path) -> Iterator[Row]:
    """{"id", "text", "title"} of every line of tab-separated id, text, title behind a header that
    says so.

    Quotes are ordinary characters, unless the file is quoted as CSV, like DPR's psgs_w100.tsv; see
    quotes.py. MS MARCO's collection.tsv, a number and a text on every line, has no header.
    """
    first = next(lines(path), (1, ""))[1].split("\t")
    if len(first) == 2 and first[0].isdecimal():
        for _, (number, body) in tabbed(path, 2, "id and passage"):
            yield {"id": number, "text": body, "title": ""}
        return
    is_csv = is_quoted(path)
    is_empty = True
    for line, text in lines(path):
        fields = text.split("\t")
        try:
            if is_csv:
                fields = next(csv.reader([text], delimiter="\t", strict=True))
        except csv.Error as error:
            raise bad_line(
                path,
                line,
                f"{error}, in a file whose fields are quoted as CSV; close the quotes, and double "
                "those within",
            ) from None
        if len(fields) != 3:
            raise bad_line(
                path, line, f"{len(fields)} tab-separated field(s), want id, text and title"
            )
        if line == 1:
            if fields != _FIELDS:
                raise bad_line(
                    path,
                    line,
                    f"the header is {preview(fields)}, want id, text and title with tabs between",
                )
            continue
        if fields[0][-2:].lower() == "id" and is_header(fields, _FIELDS):
            problem = "the header once more, as where two files were put together; take it out"
            raise bad_line(path, line, problem)
        number, body, title = fields
        if not number.strip() or not body.strip():
            raise bad_line(path, line, "the id or the text is blank; give both")
        is_empty = False
        yield {"id": number.strip(), "text": body, "title": title}
    if is_empty:
        raise DataError(
            f"{path} holds no passage. Put a header line, then id, text and title with tabs "
            "between them."
        )


def _placed_passages(path: Path) -> Iterator[tuple[str, Row]]:
    if ".jsonl" not in path.suffixes:
        for row in tsv_passages(path):
            yield str(path), row
        return
    for line, raw in numbered_jsonl(path):
        place = f"{path}, line {line}"
        row = passage_fields(raw, place)
        if "id" not in row:
            identity(None, place, PASSAGE_IDS[0])
        if not (row.get("title", "") + row.get("text", "")).strip():
            raise DataError(
                f"{place}: text and title are missing or blank (keys: {keys(raw)}).", place=place
            )
        yield place, {"text": "", **row}
