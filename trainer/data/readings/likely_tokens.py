"""A teacher's likeliest tokens at every label of every row: written shard by shard over ranks
before the first step, then read through memory maps.

<root>/<name>/           one for each identity (teacher, precision, k, temperature) and rows
  teacher-<n>.safetensors  by label: `ids` (labels, k) int32, `logps` (labels, k), `rest` (labels,)
                           fp32; by entry, a row with one text that is learnt of it: `offsets`
                           (entries + 1,) in labels, `keys` (entries, 32), `checksums` (entries,)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from trainer.data.order import evaluation_batches
from trainer.data.readings.key_index import KeyIndex
from trainer.data.readings.row_store import RowStore, bounds_of, key_of, table_of
from trainer.data.shard_folder import FORMAT, META, ShardFolder
from trainer.errors import CheckpointError, DataError, DivergedError
from trainer.files.atomic import size_of
from trainer.files.safetensors_file import WrittenFile, blocks_of, checksum_of, tensors_of
from trainer.protocol.abilities import EncodedRows
from trainer.runtime import distributed

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = (
    64 * 2**20
)  # on average; held in memory while it is made: what a kill costs a rank
MIN_SHARDS = 64  # of rows that are enough for so many: that many ranks have work
MIN_SHARD_ROWS = 64
_LOWEST = -1e4  # a log-probability that is 0 in fp32; a logit may be -inf
_VALUES = ("ids", "logps", "rest")

Row = Mapping[str, Any]  # an encoded row
LikelyTokens = tuple[Tensor, Tensor, Tensor]  # (L, k) ids, (L, k) log-probabilities, (L,) of others
# encoded rows, each with one text that is learnt of it -> what the teacher says of its L labels
Compute = Callable[[Sequence[Row]], list[LikelyTokens]]


def key_of_row(row: Row) -> bytes:
    """The key of a row with one text that is learnt of it."""
    return key_of(row, sorted(row))


@dataclass(frozen=True)
class RowsToRead:
    """What is read of the rows of one split."""

    rows: EncodedRows
    every: Callable[[Row], Sequence[Row]]  # a row, once with each text that may be learnt of it
    num_labels: Callable[[Row], int]  # of a row with one text
    draws: bool  # whether `every` gives all texts of a row, or one

    @cached_property
    def labels(self) -> int:
        """The number of labels of all rows, each of which is read for it."""
        rows = (self.rows[number] for number in range(len(self.rows)))
        return sum(self.num_labels(one) for row in rows for one in self.every(row))


@dataclass(frozen=True)
class TeacherStore(RowStore):
    """Where what a teacher says is stored, whatever the split."""

    content: ClassVar[str] = "teacher"
    flag: ClassVar[str] = "teacher.store"

    top_k: int
    dtype: torch.dtype  # of log-probabilities

    @property
    def bytes_per_label(self) -> int:
        return self.top_k * (4 + self.dtype.itemsize) + 4

    def fill(self, split: str, reading: RowsToRead, compute: Compute, *, batch: int) -> None:
        """Write what the folder of a split still lacks. A collective: of the missing shards, rank r
        takes every r-th. ConfigError for a folder that was begun for another teacher or other rows,
        StorageError where the disk has no room for it.
        """
        plan, rows = self._plan(reading), reading.rows
        shards = self.shards(split, plan)
        size = distributed.on_main(lambda: self._shard_rows(shards, reading))
        begun = shards.begin({"format": FORMAT, **plan, "shard_rows": size}, choice="shard_rows")
        bounds = bounds_of(len(rows), int(begun["shard_rows"]))
        with self.filling(shards, len(bounds)) as missing:
            distributed.on_main(lambda: self._tell(split, reading, shards, len(bounds)))
            for number in missing[distributed.rank() :: distributed.world()]:
                tensors = self._computed(reading, bounds[number], compute, batch)
                shards.write_shard(number, blocks_of(tensors))
                logger.info(
                    "teacher: part %d of %d of %s is written", number + 1, len(bounds), split
                )

    def read(self, readings: Mapping[str, RowsToRead]) -> TeacherValues:
        """What was filled, of all splits together."""
        return TeacherValues(
            [self.shards(split, self._plan(one)) for split, one in readings.items()]
        )

    def _plan(self, reading: RowsToRead) -> dict[str, Any]:
        rows = reading.rows
        of_rows = {"rows": rows.digest, "count": len(rows), "every_text": reading.draws}
        return {**self.identity, **of_rows}

    def _shard_rows(self, shards: ShardFolder, reading: RowsToRead) -> int:
        """The rows of a shard of a folder that is not begun yet."""
        if shards.is_begun:
            return 0  # the folder's own counts
        count = len(reading.rows)
        by_size = MAX_SHARD_BYTES * count // max(1, reading.labels * self.bytes_per_label)
        return max(1, min(by_size, max(MIN_SHARD_ROWS, -(-count // MIN_SHARDS))))

    def _tell(self, split: str, reading: RowsToRead, shards: ShardFolder, num_shards: int) -> None:
        """Log what is still to be written. StorageError where the disk has no room for it."""
        missing = len(shards.missing(num_shards))
        if not missing:
            return
        needed = -(-reading.labels * self.bytes_per_label * missing // num_shards)
        facts = (split, f"{len(reading.rows):,}", f"{reading.labels:,}", missing, num_shards)
        text = "%s: the teacher reads %s rows, %s labels; %d of %d parts are missing: %s into %s"
        logger.info(text, *facts, size_of(needed), shards.path)
        shards.refuse_small_disk(
            needed,
            "what the teacher says",
            "Free some space, write elsewhere (teacher.store), or use a lower teacher.top_k.",
        )

    def _computed(
        self, reading: RowsToRead, numbers: range, compute: Compute, batch: int
    ) -> dict[str, Tensor]:
        """The tensors of one shard."""
        entries: list[Row] = []
        lengths: list[int] = []
        for number in numbers:
            of_row = reading.every(reading.rows[number])
            entries += of_row
            lengths += [int(reading.rows.lengths[number])] * len(of_row)
        parts: list[LikelyTokens | None] = [None] * len(entries)
        batches = evaluation_batches(
            len(entries), np.asarray(lengths), batch=batch, world=1, rank=0
        )
        for places, _ in batches:
            values = compute([entries[int(place)] for place in places])
            for place, one in zip(places.tolist(), values, strict=True):
                parts[place] = self._as_on_disk(one)
        whole = [part for part in parts if part is not None]
        sizes = torch.tensor([0, *(len(part[0]) for part in whole)])
        ids, logps, rest = (torch.cat(of_entries) for of_entries in zip(*whole, strict=True))
        return {
            "ids": ids,
            "logps": logps,
            "rest": rest,
            "offsets": sizes.cumsum(0),
            "keys": table_of([key_of_row(entry) for entry in entries]),
            "checksums": torch.tensor([checksum_of(part) for part in whole]),
        }

    def _as_on_disk(self, values: LikelyTokens) -> LikelyTokens:
        ids, logps, rest = values
        if bool((logps.isnan() | (logps == torch.inf)).any()):
            raise DivergedError(
                "the teacher gives a token a log-probability that is not a number. Use "
                "train.precision='bf16' or 'fp32', or another teacher."
            )
        return ids, logps.clamp(min=_LOWEST).to(self.dtype), rest.clamp(min=_LOWEST)


class TeacherValues:
    """Finished folders. Their values stay on the disk until they are read, and each entry is
    checked when it is read first.
    """

    def __init__(self, folders: Sequence[ShardFolder]) -> None:
        self._shards: list[tuple[Path, dict[str, Tensor]]] = []
        for shards in folders:
            records = shards.read(META, lambda meta: [WrittenFile(**one) for one in meta["shards"]])
            self._shards += [(shards.path / one.name, _mapped(shards, one)) for one in records]
        self._index = KeyIndex([tensors["keys"] for _, tensors in self._shards])
        self._is_checked = [np.zeros(len(one["checksums"]), bool) for _, one in self._shards]

    def of(self, row: Row) -> LikelyTokens | None:
        """What the teacher says of a row with one text, views of the file; None: it has not read
        it. DataError when its bytes are not those that were written.
        """
        place = self._index.find(key_of_row(row))
        if place is None:
            return None
        shard, entry = place
        path, tensors = self._shards[shard]
        start, stop = tensors["offsets"][entry : entry + 2].tolist()
        ids, logps, rest = (tensors[name][start:stop] for name in _VALUES)
        if not self._is_checked[shard][entry]:
            if checksum_of((ids, logps, rest)) != int(tensors["checksums"][entry]):
                raise _damage(path, f"the checksum of its row {entry} is another")
            self._is_checked[shard][entry] = True
        return ids, logps, rest

    def paths(self) -> Iterator[Path]:
        """The files."""
        return (path for path, _ in self._shards)


def _mapped(shards: ShardFolder, record: WrittenFile) -> dict[str, Tensor]:
    path = shards.path / record.name
    try:
        if path.stat().st_size != record.size:
            raise _damage(path, f"it has {path.stat().st_size} bytes, want {record.size}")
        return dict(tensors_of(path))
    except (OSError, CheckpointError) as error:
        raise _damage(path, str(error)) from error


def _damage(path: Path, problem: str) -> DataError:
    return DataError(
        f"{path}: {problem}. Delete {path.parent}: the next start of the run makes it again."
    )
