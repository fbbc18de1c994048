"""Which encoded rows stand in which chunk of a stream: those of an epoch in its order."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from trainer.data.epochs import epoch_order

_ROWS = 1024  # of a chunk, at least: about a tenth of a second to a second of work
_MOST_CHUNKS = 20_000
_PER_FOLDER = 1000


@dataclass(frozen=True)
class ChunkLayout:
    """The chunks of `num_rows` rows in the order of one epoch."""

    folder: Path
    num_rows: int
    seed: int | None  # None: the order of the data
    epoch: int

    @property
    def chunk_rows(self) -> int:
        """The rows of a chunk; the last one may have fewer."""
        rows = _ROWS
        while self.num_rows > rows * _MOST_CHUNKS:
            rows *= 2
        return rows

    @property
    def num_chunks(self) -> int:
        return -(-self.num_rows // self.chunk_rows)

    def path(self, chunk: int) -> Path:
        return self.folder / f"{chunk // _PER_FOLDER:03d}" / f"{chunk:06d}.rows"

    def rows(self, chunk: int) -> np.ndarray:
        """The numbers of a chunk's rows, in the order of the epoch."""
        start = chunk * self.chunk_rows
        return self._order[start : start + self.chunk_rows]

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(chunk, place in it) of each row."""
        chunks, places = np.divmod(self._place_of_row[rows], self.chunk_rows)
        return chunks, places

    def finished(self) -> set[int]:
        """The chunks that are there."""
        whole: set[int] = set()
        for number in range(-(-self.num_chunks // _PER_FOLDER)):
            try:
                names = os.listdir(self.folder / f"{number:03d}")
            except FileNotFoundError:
                continue
            whole |= {int(name[:6]) for name in names if name.endswith(".rows") and name[0] != "."}
        return whole

    @property
    def _order(self) -> np.ndarray:
        return epoch_order(self.num_rows, seed=self.seed, epoch=self.epoch)

    @cached_property
    def _place_of_row(self) -> np.ndarray:
        place_of_row = np.empty(self.num_rows, np.int64 if self.num_rows > 2**31 - 1 else np.int32)
        place_of_row[self._order] = np.arange(self.num_rows, dtype=place_of_row.dtype)
        return place_of_row
