"""One pass over the raw rows of a split: what repeats, what is empty, and what limits cut off."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.protocol.abilities import Answers, ShowsCuts, question_of

if TYPE_CHECKING:
    from trainer.protocol.task import Row, Task
    from trainer.statistics.ledger import Ledger

WHOLE = "row"  # the name under which a whole raw row is compared
_SHOWN = 5  # pairs of equal rows, by id


@dataclass
class Counts:
    """What the rows so far came to."""

    ledger: Ledger
    ids: list[str] = field(default_factory=list)
    empty: dict[str, int] = field(default_factory=dict)  # by key of the raw rows
    # rows that have a key in common with an earlier one
    repeated: dict[str, int] = field(default_factory=dict)
    # (row, the earlier one that is the same)
    pairs: list[tuple[str, str]] = field(default_factory=list)
    # by key, digest -> the first row that had it
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
        """By key, how many different contents of this split are in the other as well."""
        keys = self.digests.keys() & other.digests.keys()
        return {
            key: len(self.digests[key].keys() & other.digests[key].keys())
            for key in self.digests
            if key in keys
        }


def count_rows(task: Task, rows: Iterable[Row], ledger: Ledger) -> Counts:
    """All of `rows`, counted once."""
    counts = Counts(ledger)
    for number, row in enumerate(rows):
        identity = str(row.get("id", number))
        counts.add(row, identity)
        if isinstance(task, ShowsCuts):
            answers = question_of(task, row).get("answers", ()) if isinstance(task, Answers) else ()
            ledger.add(identity, task.uncut_fields(row), answers=answers)
    return counts


def is_empty(value: Any) -> bool:
    """Nothing, blank text, or a list of such; a number is something."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, list):
        return all(is_empty(item) for item in value)
    return value is None or value == {}


def _parts(row: Row) -> dict[str, Any]:
    """The row without its id, whole and by every key that holds text."""
    whole = {key: value for key, value in row.items() if key != "id"}
    texts = {
        key: value
        for key, value in whole.items()
        if value is None or isinstance(value, str | list | dict)
    }
    return {WHOLE: whole, **texts}


def _digest(content: Any) -> bytes:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).digest()
