"""Which rows an optimizer step takes, and of which epoch they are: a function of (seed, step), the
same for any world size.

An epoch is a permutation of the rows. Of a run that is counted in steps, each epoch drops the rows
at its end that fill no step. Of a run that is counted in epochs (`is_whole`), every row of an epoch
is trained on once: the step in which an epoch ends is filled with the first rows of the next one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from trainer.data.arranged.pool import Pool
from trainer.errors import DataError


@dataclass(frozen=True)
class Epochs:
    """The epochs of a run. Raises DataError when the rows do not fill even one step."""

    num_rows: int
    global_batch: int  # rows of an optimizer step
    seed: int | None  # None keeps the order of the data
    is_whole: bool = False  # every row of an epoch is trained on

    def __post_init__(self) -> None:
        if self.num_rows < self.global_batch:
            raise DataError(
                f"the train split has {self.num_rows} rows, fewer than "
                f"train.global_batch={self.global_batch}. "
                f"Use a global_batch of at most {self.num_rows}, or more data."
            )

    @property
    def steps(self) -> Fraction:
        """Steps of one epoch; a fraction where epochs end within a step."""
        if self.is_whole:
            return Fraction(self.num_rows, self.global_batch)
        return Fraction(self.num_rows // self.global_batch)

    def count(self, epochs: float) -> Fraction:
        """The steps of so many epochs; a fraction where the last one ends within a step."""
        return Fraction(str(epochs)) * self.steps

    def rows(self, step: int) -> np.ndarray:
        """The (global_batch,) rows of a step (0-based), no row twice."""
        start = self._start(step)
        epoch, place = divmod(start, self.num_rows)
        rows = self._order(epoch)[place : place + self.global_batch]
        missing = self.global_batch - len(rows)
        return np.concatenate([rows, self._order(epoch + 1)[:missing]]) if missing else rows

    def span(self, step: int) -> range:
        """The steps around a step whose rows are all of its epoch; where the step itself has rows
        of two, only that step.
        """
        epoch = self.epoch(step)
        first = math.ceil(epoch * self.steps)
        stop = math.floor((epoch + 1) * self.steps)
        return range(first, stop) if first <= step < stop else range(step, step + 1)

    def pool(self, step: int) -> tuple[Pool, int]:
        """The steps of its span, whose rows may change places, and the place of a step in it."""
        span = self.span(step)
        return Pool(span.start, len(span)), step - span.start

    def rows_of(self, pool: Pool) -> np.ndarray:
        """(steps, global_batch) the rows of a pool."""
        return np.stack([self.rows(pool.first + place) for place in range(pool.count)])

    def epoch(self, step: int) -> int:
        """The epoch (0-based) of the first row of a step."""
        return self._start(step) // self.num_rows

    def place(self, step: int) -> int:
        """How many rows of its epoch stand before a step."""
        return self._start(step) % self.num_rows

    def next_epoch_rows(self, step: int) -> frozenset[int]:
        """The rows of a step that are the first ones of the next epoch."""
        rest = self.num_rows - self._start(step) % self.num_rows
        return frozenset(self.rows(step)[rest:].tolist())

    def epochs_of(self, step: int, rows: np.ndarray) -> np.ndarray:
        """(N,) int64: the epoch of each row of a step, or of another step of its span."""
        later = list(self.next_epoch_rows(step))
        return self.epoch(step) + np.isin(rows, later).astype(np.int64)

    def _start(self, step: int) -> int:
        """The place of the first row of a step among the rows of all epochs."""
        if self.is_whole:
            return step * self.global_batch
        epoch, place = divmod(step, self.num_rows // self.global_batch)
        return epoch * self.num_rows + place * self.global_batch

    def _order(self, epoch: int) -> np.ndarray:
        return _whole_order(self, epoch) if self.is_whole else self._permutation(epoch)

    def _permutation(self, epoch: int) -> np.ndarray:
        return epoch_order(self.num_rows, seed=self.seed, epoch=epoch)

    def _rows_before(self, epoch: int) -> int:
        """The rows of earlier epochs in the step in which an epoch begins."""
        return epoch * self.num_rows % self.global_batch


@lru_cache(maxsize=2)
def epoch_order(num_rows: int, *, seed: int | None, epoch: int) -> np.ndarray:
    """The order of the rows in an epoch, (num_rows,) int64, read-only: a permutation drawn from
    (seed, epoch) alone. seed: None keeps the order of the data.

    Rows are sorted by raw 64-bit draws of PCG64, whose stream numpy guarantees; what
    `Generator.permutation` draws may change between numpy versions (NEP 19), and a resumed run
    would then repeat rows.
    """
    if seed is None:
        order = np.arange(num_rows)
    else:
        draws = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
        order = np.argsort(draws, kind="stable")
    order.setflags(write=False)  # all callers share this array
    return order


@lru_cache(maxsize=2)
def _whole_order(epochs: Epochs, epoch: int) -> np.ndarray:
    """The order of an epoch that may begin within a step: as drawn, but rows that the end of the
    epoch before has put into that step come behind it. So no step has a row twice.
    """
    batch = epochs.global_batch
    begun = epoch
    if epochs.num_rows >= 2 * batch:  # only the first rows of an order move, never the last
        begun = max(0, epoch - 1)
    else:  # begin with an epoch that begins a step, and so is as it was drawn
        while epochs._rows_before(begun):
            begun -= 1
    order = epochs._permutation(begun)
    for number in range(begun + 1, epoch + 1):
        shuffle, count = epochs._permutation(number), epochs._rows_before(number)
        if count == 0:
            order = shuffle
            continue
        first = shuffle[:batch]
        is_there = np.isin(first, order[-count:])
        order = np.concatenate([first[~is_there], first[is_there], shuffle[batch:]])
    order.setflags(write=False)
    return order
