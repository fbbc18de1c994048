"""Files of made-up rows: those of the demo, and those that its base is trained on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data import lookup
from trainer.files.atomic import refusals

if TYPE_CHECKING:
    from trainer.protocol.task import Row

_NUM_VALID = 100


def questions(num_train: int, *, passages: int) -> dict[str, Iterable[Row]]:
    """The rows of the demo by split: questions, each with passages of which one answers."""
    return {
        split: islice(lookup.questions(split, passages=passages), count)
        for split, count in (("train", num_train), ("valid", _NUM_VALID))
    }


def fragments(*, passages: int) -> dict[str, Iterable[Row]]:
    """The rows that the base is trained on, by split: none holds a question."""
    return {split: lookup.fragments(split, passages=passages) for split in ("train", "valid")}


def write(folder: Path, rows_of: Mapping[str, Iterable[Row]]) -> None:
    """Write <split>.jsonl for each split. StorageError when the disk refuses."""
    with refusals(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for split, rows in rows_of.items():
            lines = [json.dumps(row) + "\n" for row in rows]
            (folder / f"{split}.jsonl").write_text("".join(lines))
