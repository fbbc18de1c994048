"""Where the rows of the cross-attention task come from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.own_rows import OwnRows
from trainer.data import lookup, stdlib_docs
from trainer.data.readers.jsonl import read_jsonl
from trainer.data.readers.own_rows import FILES
from trainer.data.readers.questions import nq_rows, qa_rows
from trainer.errors import DataError, nearest

if TYPE_CHECKING:
    from trainer.protocol.task import Row

OWN = ("files", "jsonl")  # sources of a user's own rows: two names of one
PREPARED = "prepared.json"  # in a folder that `python -m trainer prepare` wrote; see preparation.py


def of_split(
    source: str,
    split: str,
    data_path: Path | None,
    *,
    subset: str = "all",
    facts: int = lookup.FACTS,
    own: OwnRows = FILES,
    cache_dir: Path | None = None,
) -> Iterable[Row]:
    """Rows with a question, answers and contexts; those of one "dataset" only, unless the subset is
    "all". facts: of a context of the made-up corpus, at most. own: where a user's rows are, for
    "files" and "jsonl".

    DataError when no row is of that data set, naming those that there are.
    """
    if data_path is not None and (data_path / PREPARED).is_file():
        rows = _prepared_rows(source, split, data_path)
    elif source in OWN:
        rows = qa_rows(data_path, split, own, cache_dir=cache_dir)
    else:
        rows = _of_source(source, split, data_path, facts)
    return rows if subset == "all" else _of_dataset(rows, subset, split)


def contexts_of(row: Row) -> list[str]:
    """The contexts of a row, one or several."""
    return row.get("contexts") or [row["context"]]


def with_another_context(rows: list[Row]) -> Iterator[Row]:
    """Each row with the context of the next row that has a different one.

    So the pairing depends on no batch.
    """
    for index, row in enumerate(rows):
        own = contexts_of(row)
        others = (contexts_of(rows[(index + offset) % len(rows)]) for offset in range(1, len(rows)))
        yield {**row, "other": next((other for other in others if other != own), own)}


def prepared(folder: Path) -> dict[str, Any]:
    """What stands in a folder of prepared rows: source, and by split their number and digest."""
    path = folder / PREPARED
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({error}). Delete {folder} and prepare anew."
        ) from error


def _of_source(source: str, split: str, data_path: Path | None, facts: int) -> Iterable[Row]:
    if source == "stdlib_docs":
        return stdlib_docs.qa_rows(split)
    if source == "lookup":
        return lookup.contexts(split, facts=facts)
    return nq_rows(data_path, split)


def _prepared_rows(source: str, split: str, folder: Path) -> Iterator[Row]:
    rows = prepared(folder)
    if rows["source"] != source and not {rows["source"], source} <= set(OWN):
        raise DataError(
            f"{folder}: was prepared from data.source={rows['source']!r}, the group reads "
            f"{source!r}."
        )
    if split not in rows["rows"]:
        legal = ", ".join(rows["rows"]) or "none yet: run the same prepare command again"
        raise DataError(f"{folder}: has no {split} split, but {legal}.")
    return read_jsonl(folder / f"{split}.jsonl")


def _of_dataset(rows: Iterable[Row], subset: str, split: str) -> Iterator[Row]:
    others: set[str] = set()
    is_empty = True
    for row in rows:
        if row.get("dataset") == subset:
            is_empty = False
            yield row
        else:
            others.add(row.get("dataset", "none"))
    if is_empty:
        raise DataError(
            f"no row of the {split} split is of the data set {subset!r}. "
            f"{nearest(subset, sorted(others))} "
            '(A row says so by its "dataset"; data.training_data_subset and '
            "data.validation_data_subset choose.)"
        )
