"""HotpotQA: ten passages to a question. Its dev set is the test split; valid is a part of train."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.recipes.cross_attention.files import PublishedRecord, RecordsOf, read_as
from trainer.recipes.cross_attention.rows import row_of

if TYPE_CHECKING:
    from trainer.protocol.task import Row

_SEED = 12345  # of the orders of passages, and of the valid split


def rows(records: RecordsOf, split: str, shuffles: int) -> Iterator[Row]:
    """Ten passages each; those with a supporting sentence are useful.

    shuffles: copies of a row in other orders; 0: as given.
    """
    if split == "test":
        of_split = records("dev")
    else:
        # a hash chooses the questions of train that are the valid split, as many as dev has
        count = sum(1 for _ in records("dev"))
        ids = [_id(record) for record in records("train")]
        order = sorted(ids, key=lambda name: _draw(f"valid:{name}"))
        valid_ids = set(order[: min(count, len(ids) // 2)])
        of_split = (
            record
            for record in records("train")
            if (_id(record) in valid_ids) == (split == "valid")
        )
    for record in of_split:
        row = read_as(_row, record)
        if row is None:
            continue
        if not shuffles:
            yield row
        for copy in range(shuffles):
            # the same row with its passages in an order that the name decides
            name = f"{copy}:{_id(record)}"
            order = sorted(range(len(row["contexts"])), key=lambda place: _draw(f"{name}:{place}"))
            lists = {
                field: [row[field][place] for place in order]
                for field in ("contexts", "titles", "useful_contexts")
                if field in row
            }
            yield {**row, **lists}


def _row(record: PublishedRecord) -> Row | None:
    raw = record.values
    context, facts = raw["context"], raw["supporting_facts"]
    if isinstance(context, dict):  # the Hub's: a list for each field
        context = zip(context["title"], context["sentences"], strict=True)
        facts = zip(facts["title"], facts["sent_id"], strict=True)
    supporting = {title for title, _ in facts}
    passages = [
        (title, "".join(sentences).strip(), title in supporting) for title, sentences in context
    ]
    return row_of(record, raw["question"], [raw["answer"]], passages)


def _id(record: PublishedRecord) -> str:
    return record.text("_id" if "_id" in record.values else "id")


def _draw(name: str) -> bytes:
    # no generator: numpy's and Python's orders may change
    return hashlib.sha256(f"{_SEED}:{name}".encode()).digest()
