"""Log-probabilities of answers under the model that a run begins with: computed once, stored in a
folder of shards (trainer/data/readings/row_store.py), and found by the token ids of a row.

<root>/<name>/        one for each identity (base, precision, ...) and the rows of a split
  start-<n>.safetensors  `keys` (rows, 32) uint8 and `values` (rows, 2) fp32, of both answers
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from trainer.data.order import evaluation_batches
from trainer.data.readings.row_store import Row, RowStore, bounds_of, key_of, table_of
from trainer.data.shard_folder import FORMAT, META
from trainer.errors import DataError, DivergedError
from trainer.files.safetensors_file import WrittenFile, blocks_of, checksum_problem, tensors_of
from trainer.protocol.abilities import EncodedRows
from trainer.runtime import distributed

logger = logging.getLogger(__name__)

SHARD_ROWS = 2048  # what a kill costs at most

# encoded rows -> (B, 2) log-probabilities of their answers under the start
Compute = Callable[[Sequence[Row]], torch.Tensor]


@dataclass(frozen=True)
class StartStore(RowStore):
    """Where the log-probabilities of one experiment are, whatever the split."""

    content: ClassVar[str] = "start"
    flag: ClassVar[str] = "preference.reference"

    names: Sequence[str]  # of the fields that they depend on

    def fill(self, split: str, rows: EncodedRows, compute: Compute, *, batch: int) -> None:
        """Write what the folder of a split still lacks. A collective: of every shard each rank
        computes some batches, and rank 0 writes it. Of runs that begin together one does it and the
        others wait; a whole folder is only read. ConfigError for a folder that was begun for
        another base or other rows.
        """
        shards = self.shards(split, self._plan(rows))
        plan = shards.begin({"format": FORMAT, **self._plan(rows)}, choice="shard_rows")
        bounds = bounds_of(len(rows), int(plan["shard_rows"]))
        with self.filling(shards, len(bounds)) as missing:
            if missing:
                facts = (split, f"{len(rows):,}", len(missing), len(bounds), shards.path)
                logger.info("%s: the start reads %s rows, %d of %d parts, into %s", *facts)
            for number in missing:
                tensors = self._computed(rows, bounds[number], compute, batch)
                if distributed.is_main():
                    shards.write_shard(number, blocks_of(tensors))

    def read(self, split: str, rows: EncodedRows) -> Iterator[tuple[bytes, np.ndarray]]:
        """(key, (2,) values) of every row of a split that was filled. DataError for a damaged
        file.
        """
        shards = self.shards(split, self._plan(rows))
        records = shards.read(META, lambda meta: [WrittenFile(**one) for one in meta["shards"]])
        for record in records:
            problem = checksum_problem(shards.path, record)
            if problem is not None:
                raise DataError(
                    f"{shards.path / record.name}: {problem}. Delete {shards.path}: the next start "
                    "of the run makes it again."
                )
            tensors = dict(tensors_of(shards.path / record.name))
            keys = [bytes(key) for key in tensors["keys"].numpy()]
            yield from zip(keys, tensors["values"].numpy(), strict=True)

    def _plan(self, rows: EncodedRows) -> dict[str, Any]:
        return {**self.identity, "rows": rows.digest, "count": len(rows), "shard_rows": SHARD_ROWS}

    def _computed(
        self, rows: EncodedRows, numbers: range, compute: Compute, batch: int
    ) -> dict[str, torch.Tensor]:
        """The tensors of one shard, on every rank."""
        lengths = rows.lengths[numbers.start : numbers.stop]
        shares = evaluation_batches(
            len(numbers), lengths, batch=batch, world=distributed.world(), rank=distributed.rank()
        )
        own: list[tuple[int, list[float]]] = []
        for places, _ in shares:
            values = compute([rows[numbers.start + int(place)] for place in places]).float().cpu()
            if not torch.isfinite(values).all():
                raise DivergedError(
                    "the base gives an answer a log-probability that is not finite. Use "
                    "train.precision='bf16' or 'fp32', or another base."
                )
            own += zip(places.tolist(), values.tolist(), strict=True)
        by_place = {place: one for part in distributed.gather(own) for place, one in part}
        keys = [key_of(rows[number], self.names) for number in numbers]
        table = [by_place[place] for place in range(len(numbers))]
        return {
            "keys": table_of(keys),
            "values": torch.tensor(table, dtype=torch.float32),
        }
