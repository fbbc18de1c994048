"""A file of encoded rows that follow one another in the order of an epoch.

A header in JSON, then its arrays: for every field the int64 offsets of its rows and the int32 ids
of all rows; the length and the hash of every row. It is whole or not there.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data import left_out
from trainer.data.control_tokens import reason
from trainer.data.token_store import as_ids
from trainer.errors import DataError
from trainer.files.atomic import replace_file
from trainer.protocol import cut_counts

if TYPE_CHECKING:
    from trainer.protocol.task import Encoded

_ALIGNED = 8  # bytes
LENGTHS, HASHES = "lengths", "hashes"  # names of arrays; those of fields have a letter in front
_OF_OFFSETS, _OF_IDS = "offsets.", "ids."


@dataclass
class ChunkFacts:
    """What is added up over rows."""

    rows: int = 0
    tokens: dict[str, int] = field(default_factory=dict[str, int])  # by field
    truncated_rows: int = 0
    lost_labels: list[int] = field(default_factory=lambda: [0, 0])
    cuts: cut_counts.CutCounts = field(default_factory=dict[str, dict[str, Any]])
    notes: left_out.Notes = field(default_factory=left_out.Notes)

    def plain(self) -> dict[str, Any]:
        """As JSON, for of()."""
        keys = {"held": self.notes.keys.held, "read": sorted(self.notes.keys.read)}
        return {**self.__dict__, "notes": self.notes.record(), "keys": keys}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ChunkFacts:
        notes, keys = left_out.Notes.of(values["notes"]), values["keys"]
        notes.keys = left_out.ReadKeys(dict(keys["held"]), set(keys["read"]))
        own = {name: value for name, value in values.items() if name != "keys"}
        return cls(**{**own, "notes": notes})

    def add(self, other: ChunkFacts) -> None:
        """Add the facts of other rows."""
        self.rows += other.rows
        self.truncated_rows += other.truncated_rows
        for place in (0, 1):
            self.lost_labels[place] += other.lost_labels[place]
        for name, count in other.tokens.items():
            self.tokens[name] = self.tokens.get(name, 0) + count
        for name, counts in other.cuts.items():
            mine = self.cuts.setdefault(name, {**counts, **dict.fromkeys(_COUNTED, 0)})
            for key in _COUNTED:
                mine[key] += counts[key]
        self.notes.merge(other.notes)


_COUNTED = ("texts", "texts_cut", "tokens", "tokens_cut")


@dataclass(frozen=True)
class EncodedRow:
    """An encoded row, and its number among the raw rows, for messages."""

    number: int
    encoded: Encoded
    lost_labels: tuple[int, int]


def write_chunk(
    path: Path,
    rows: Sequence[EncodedRow],
    notes: left_out.Notes,
    length: Callable[[Mapping[str, Any]], int],
) -> None:
    """Write the rows, and what was noted when they were read. DataError for an encoding that is not
    lists of ids; StorageError when the disk refuses.
    """
    facts = ChunkFacts(rows=len(rows), notes=notes)
    fields = list(rows[0].encoded)
    ids: dict[str, list[np.ndarray]] = {name: [] for name in fields}
    for row in rows:
        if list(row.encoded) != fields:
            raise DataError(
                f"row {row.number} is encoded as {sorted(row.encoded)}, another one as "
                f"{sorted(fields)}."
            )
        for name, values in row.encoded.items():
            ids[name].append(as_ids(values, name, row.number))
        facts.truncated_rows += int(row.encoded.is_truncated)
        facts.lost_labels[0] += row.lost_labels[0]
        facts.lost_labels[1] += row.lost_labels[1]
        cut_counts.add(facts.cuts, row.encoded.cuts)
        for control in row.encoded.controls:
            note = left_out.Note(f"row {row.number + 1}", reason(control), control[0])
            facts.notes.add(note)
    arrays = {
        LENGTHS: np.array([length(row.encoded) for row in rows], "<i8"),
        HASHES: np.array([row.encoded.row_hash for row in rows], "<u8"),
    }
    for name, lists in ids.items():
        ends = np.cumsum([0, *map(len, lists)])
        arrays[_OF_OFFSETS + name] = ends.astype("<i8")
        arrays[_OF_IDS + name] = np.concatenate([np.zeros(0, "<i4"), *lists]).astype("<i4")
        facts.tokens[name] = int(ends[-1])
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, b"".join(_bytes_of(arrays, facts.plain())))


def _bytes_of(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> Iterable[bytes]:
    places: dict[str, tuple[str, int, int]] = {}
    end = 0
    for name, array in arrays.items():
        places[name] = (array.dtype.str, end, len(array))
        end += -(-array.nbytes // _ALIGNED) * _ALIGNED
    text = json.dumps({"arrays": places, "facts": facts}).encode()
    text += b" " * (-len(text) % _ALIGNED)
    yield len(text).to_bytes(_ALIGNED, "little") + text
    for array in arrays.values():
        yield array.tobytes() + bytes(-array.nbytes % _ALIGNED)


class Chunk:
    """The rows of a file of write_chunk(), by their place in it."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        size = int.from_bytes(self._map[:_ALIGNED], "little")
        header = json.loads(self._map[_ALIGNED : _ALIGNED + size])
        self._places: dict[str, list[Any]] = header["arrays"]
        self._starts = _ALIGNED + size
        self._facts = header["facts"]
        self.fields = [name[len(_OF_IDS) :] for name in self._places if name.startswith(_OF_IDS)]

    @property
    def facts(self) -> ChunkFacts:
        return ChunkFacts.of(self._facts)

    def array(self, name: str) -> np.ndarray:
        """LENGTHS or HASHES, (rows,)."""
        kind, start, count = self._places[name]
        return np.frombuffer(self._map, kind, count, self._starts + start)

    def sizes(self, name: str) -> np.ndarray:
        """(rows,) int64: the number of ids of each row in a field."""
        return np.diff(self.array(_OF_OFFSETS + name))

    def numbers(self, name: str) -> np.ndarray:
        """(rows,) int32: the values of a field that has one number per row; zeros without it."""
        if name not in self.fields:
            return np.zeros(len(self.array(LENGTHS)), np.int32)
        return self.array(_OF_IDS + name)

    def row(self, place: int) -> dict[str, np.ndarray]:
        """A row by field, (tokens,) int32 each."""
        row: dict[str, np.ndarray] = {}
        for name in self.fields:
            start, stop = self.array(_OF_OFFSETS + name)[place : place + 2]
            row[name] = self.array(_OF_IDS + name)[start:stop].copy()
        return row
