"""What is known of rows that are encoded while they are trained on: it is judged and told when
training meets them.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.data import left_out
from trainer.data.stream.chunk import HASHES, Chunk, ChunkFacts
from trainer.errors import DataError
from trainer.statistics.opening import cut_line

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore

log = logging.getLogger(__name__)

_WRITE_EVERY_S = 30.0
OVERLAP = "valid in train"


@dataclass
class MetRows:
    """The rows that training has met so far."""

    folder: Path  # of the run
    valid: TokenStore
    notes_of: left_out.Gathered  # of the other splits
    most_lost: float  # train.max_lost_labels
    is_strict: bool
    num_rows: int
    facts: ChunkFacts = field(default_factory=ChunkFacts)
    _overlap: left_out.Notes = field(default_factory=left_out.Notes)
    _reasons: set[str] = field(default_factory=set[str])
    _written_at: float = -_WRITE_EVERY_S
    _is_written: bool = True

    def __post_init__(self) -> None:
        hashes = self.valid.raw_hashes()
        valid = np.zeros(0, np.uint64) if hashes is None else np.asarray(hashes)
        self._order = np.argsort(valid, kind="stable")
        self._valid = valid[self._order]
        self._seen = np.zeros(len(valid), bool)

    def meet(self, chunk: Chunk) -> None:
        """Add the rows of a chunk. What is left out of them or doubted for a new reason is told at
        once. DataError when limits cut off more labels than train.max_lost_labels of all rows so
        far, and under --strict for whatever is left out or doubted.
        """
        facts = chunk.facts
        self.facts.add(facts)
        shared = self._common_rows(chunk.array(HASHES))
        for row in shared:
            self._overlap.add(left_out.Note(f"row {row + 1}", left_out.IN_TRAIN))
        if facts.notes or shared:
            self._is_written = False
            self._tell()
        lost, of = self.facts.lost_labels
        if lost > self.most_lost * of:
            raise DataError(
                f"the limits of this experiment cut {lost:,} of the {of:,} label tokens off the "
                f"{self.facts.rows:,} training rows that were met so far ({lost / of:.1%}), more "
                f"than train.max_lost_labels={self.most_lost}. Raise the limit, or "
                "train.max_lost_labels."
            )

    def _common_rows(self, hashes: np.ndarray) -> list[int]:
        """The validation rows that have one of these hashes and were not met before."""
        first, last = (np.searchsorted(self._valid, hashes, side) for side in ("left", "right"))
        numbers: list[int] = []
        for place in np.flatnonzero(first < last):
            same = slice(int(first[place]), int(last[place]))
            if not self._seen[same].all():
                numbers += self._order[same].tolist()
                self._seen[same] = True
        return numbers

    def _tell(self) -> None:
        of_split = {"train": self.facts.notes, OVERLAP: self._overlap}
        left_out.refuse(of_split, strict=self.is_strict)
        for split, notes in of_split.items():
            new = notes.counts.keys() - self._reasons
            self._reasons |= new
            if new:
                log.warning("%s, so far: %s", split, notes.line(with_places=True))
        if time.monotonic() - self._written_at > _WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Write the file of what was left out."""
        if self._is_written:
            return
        self._written_at, self._is_written = time.monotonic(), True
        self.notes_of |= {"train": self.facts.notes, OVERLAP: self._overlap}
        left_out.write(self.folder / left_out.FILE, self.notes_of)

    def close(self) -> None:
        """Write the file, and tell in one line what was met."""
        self.write()
        facts = self.facts
        cuts = [
            cut_line(name, counts) for name, counts in facts.cuts.items() if counts["texts_cut"]
        ]
        lines = (*cuts, facts.notes.line(), self._overlap.line(), facts.notes.keys.line())
        parts = [f"train: {facts.rows:,} of {self.num_rows:,} rows met", *filter(None, lines)]
        log.info("%s", "; ".join(parts))
