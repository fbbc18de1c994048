"""Counts in one pass over the raw rows of a split: repeated rows, empty fields, cut tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.protocol.abilities import Answers, ShowsCuts, question_of
from trainer.statistics.frequencies import Frequencies

if TYPE_CHECKING:
    from trainer.protocol.task import Row, Task
    from trainer.statistics.ledger import Ledger

WHOLE = "row"  # the name under which a whole raw row is compared
_SHOWN = 5  # pairs of equal rows, by id


@dataclass
class Counts:
    """The counts over the rows so far."""

    ledger: Ledger
    frequencies: Frequencies = field(default_factory=Frequencies)
    ids: list[str] = field(default_factory=list)
    empty: dict[str, int] = field(default_factory=dict)  # by key of the raw rows
    # by key: rows with the same value as an earlier row
    repeated: dict[str, int] = field(default_factory=dict)
    # (id of a row, id of the earlier row that is equal)
    pairs: list[tuple[str, str]] = field(default_factory=list)
    # by key: digest -> id of the first row with it
    digests: dict[str, dict[bytes, str]] = field(default_factory=dict)

    def add(self, row: Row, identity: str) -> None:
        self.ids.append(identity)
        for key, value in _parts(row).items():
            of_key = self.digests.setdefault(key, {})
            digest = _digest(value)
            is_repeated = digest in of_key
            self.repeated[key] = self.repeated.get(key, 0) + is_repeated
            if key == WHOLE and is_repeated and len(self.pairs) < _SHOWN:
                self.pairs.append((identity, of_key[digest]))
            of_key.setdefault(digest, identity)
            if key != WHOLE:
                self.empty[key] = self.empty.get(key, 0) + is_empty(value)

    def report(self) -> dict[str, Any]:
        """Empty fields and repeated rows, as plain JSON values."""
        return {
            "empty": self.empty,
            "duplicates": {**self.repeated, "pairs": [list(pair) for pair in self.pairs]},
        }

    def shared_with(self, other: Counts) -> dict[str, int]:
        """By key, the number of different values of this split that the other split also has."""
        keys = self.digests.keys() & other.digests.keys()
        return {
            key: len(self.digests[key].keys() & other.digests[key].keys())
            for key in self.digests
            if key in keys
        }


def count_rows(task: Task, rows: Iterable[Row], ledger: Ledger) -> Counts:
    """The counts of all `rows`."""
    counts = Counts(ledger)
    for number, row in enumerate(rows):
        identity = str(row.get("id", number))
        counts.add(row, identity)
        if isinstance(task, ShowsCuts):
            answers = question_of(task, row).get("answers", ()) if isinstance(task, Answers) else ()
            uncut = task.uncut_fields(row)
            ledger.add(identity, uncut, answers=answers)
            counts.frequencies.add(uncut)
    return counts


def is_empty(value: Any) -> bool:
    """Whether a value is null, blank text, or a list of such values; a number is not empty."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, list):
        return all(is_empty(item) for item in value)
    return value is None or value == {}


def _parts(row: Row) -> dict[str, Any]:
    """The values to compare: the whole row without its id, and each value that holds text."""
    whole = {key: value for key, value in row.items() if key != "id"}
    texts = {
        key: value
        for key, value in whole.items()
        if value is None or isinstance(value, str | list | dict)
    }
    return {WHOLE: whole, **texts}


def _digest(content: Any) -> bytes:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).digest()
