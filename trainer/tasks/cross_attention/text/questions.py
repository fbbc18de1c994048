"""Reads the rows of the cross-attention task from every source."""

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

OWN = ("files", "jsonl")  # two names of one source, a user's own rows
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
    """Rows with a question, answers and contexts.

    subset: "all", or the "dataset" whose rows are read. facts: the most facts in a context of
    "lookup". own: where a user's rows are, for "files" and "jsonl". DataError when no row belongs
    to the subset; it names the subsets that exist.
    """
    if data_path is not None and (data_path / PREPARED).is_file():
        entry = prepared(data_path)
        if entry["source"] != source and not {entry["source"], source} <= set(OWN):
            raise DataError(
                f"{data_path}: was prepared from data.source={entry['source']!r}, the group reads "
                f"{source!r}."
            )
        if split not in entry["rows"]:
            legal = ", ".join(entry["rows"]) or "none yet: run the same prepare command again"
            raise DataError(f"{data_path}: has no {split} split, but {legal}.")
        rows = read_jsonl(data_path / f"{split}.jsonl")
    elif source in OWN and own.format != "nq":
        rows = qa_rows(data_path, split, own, cache_dir=cache_dir)
    elif source == "stdlib_docs":
        rows = stdlib_docs.qa_rows(split)
    elif source == "lookup":
        rows = lookup.contexts(split, facts=facts)
    else:
        rows = nq_rows(data_path, split)
    return rows if subset == "all" else _of_dataset(rows, subset, split)


def contexts_of(row: Row) -> list[str]:
    """The contexts of a row, one or several."""
    return row.get("contexts") or [row["context"]]


def with_another_context(rows: list[Row]) -> Iterator[Row]:
    """Each row with "other", the context of the next row whose context differs. The pairs do not
    depend on batches.
    """
    for index, row in enumerate(rows):
        own = contexts_of(row)
        others = (contexts_of(rows[(index + offset) % len(rows)]) for offset in range(1, len(rows)))
        yield {**row, "other": next((other for other in others if other != own), own)}


def prepared(folder: Path) -> dict[str, Any]:
    """The description of a folder of prepared rows: their source, and their number and digest by
    split.
    """
    path = folder / PREPARED
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({error}). Delete {folder} and prepare anew."
        ) from error


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
