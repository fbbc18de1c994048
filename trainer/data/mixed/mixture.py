"""Which rows an optimizer step takes from each of several sources: a function of (seed, step), the
same for any world size.

The rows of a run have places 0, 1, 2, ... How many of the first n places are of each source is a
formula of n and the weights alone: never off by more than a row or two, and it never falls. So how
many rows of a source stand before a step is known without counting. They are that source's own
rows 0, 1, 2, ...: epoch after epoch, each a permutation of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from trainer.config.mix import exact, labels_of, weights_of
from trainer.data.arranged.pool import Pool
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.config.own_rows import OwnRows

_DIGITS = 9  # of weights by temperature, whose powers may differ in the last bits by machine
_NEVER = 1 << 40  # steps that no run has
_MOST_POOLED = 1024  # steps of several sources whose rows change places

Weights = tuple[Fraction, ...]  # by source; they sum to 1


@dataclass(frozen=True)
class Mix:
    """What a dictionary says of its sources."""

    names: tuple[str, ...]
    # (first step, weights); () where weights follow from the rows of the sources
    phases: tuple[tuple[int, Weights], ...]
    labels: tuple[str, ...] = ()  # of the sources, in metrics
    temperature: float = 1.0
    stops: bool = False  # the run ends where a source ends
    is_by_step: bool = False  # each step has rows of one source

    @classmethod
    def of(cls, data: OwnRows | None) -> Mix | None:
        """The mix of a `data` block; None where its rows have one source."""
        if not getattr(data, "mix", None):
            return None
        assert data is not None
        # sorted, as for the id: it is the same whatever the order of the dictionary
        first, mixing, names = weights_of(data), data.mixing, sorted(data.mix)
        phases: list[tuple[int, Weights]] = []
        if first is not None:
            phases.append((0, exact(first, names)))
            phases += [(one.after, exact(one.weights, names)) for one in mixing.changes]
        labels = tuple(labels_of(names).values())
        temperature, stops = mixing.temperature or 1.0, mixing.ends == "stop"
        is_by_step = getattr(getattr(data, "batches", None), "source", "mixed") == "one"
        return cls(tuple(names), tuple(phases), labels, temperature, stops, is_by_step)

    def phases_of(self, sizes: Sequence[int]) -> tuple[tuple[int, Weights], ...]:
        """The same with weights, now that the rows of each source are counted."""
        if self.phases:
            return self.phases
        if self.temperature == 1.0:
            return ((0, tuple(Fraction(size, sum(sizes)) for size in sizes)),)
        most = max(sizes)
        powers = [(size / most) ** (1 / self.temperature) for size in sizes]
        parts = [Fraction(str(round(power, _DIGITS))) for power in powers]
        return ((0, tuple(part / sum(parts) for part in parts)),)


@lru_cache(maxsize=8)
def mixture_of(mix: Mix, sizes: tuple[int, ...], global_batch: int, seed: int | None) -> Mixture:
    """The mixture, which remembers the orders that it drew last."""
    return Mixture(mix, sizes, global_batch, seed)


@dataclass(frozen=True)
class Mixture:
    """The rows of a run over several sources, in the place of Epochs. Row numbers count through all
    sources, in the order of their names.

    An epoch of a mixture is as many rows as its sources have together. DataError where a step would
    take more rows of a source than it has.
    """

    mix: Mix
    sizes: tuple[int, ...]  # rows of each source
    global_batch: int
    seed: int | None  # None keeps the order of each source
    _orders: dict[tuple[int, int], np.ndarray] = field(
        default_factory=dict[tuple[int, int], np.ndarray], compare=False, repr=False
    )

    def __post_init__(self) -> None:
        small = [
            f"{name!r} has {size} rows, and a step takes up to {most} of it"
            for name, size, most in zip(self.mix.names, self.sizes, self._most, strict=True)
            if size < most
        ]
        if small:
            raise DataError(
                f"data.mix: no step may have a row twice, but {'; '.join(small)} "
                f"(train.global_batch={self.global_batch}). Use smaller weights for them, a "
                "smaller global_batch, or more data."
            )

    @property
    def steps(self) -> Fraction:
        """Steps of one epoch of the mixture."""
        return Fraction(sum(self.sizes), self.global_batch)

    def count(self, epochs: float) -> Fraction:
        """The steps of so many epochs of the mixture."""
        return Fraction(str(epochs)) * self.steps

    def taken(self, steps: int) -> tuple[int, ...]:
        """How many rows of each source the first `steps` steps take."""
        counts = [0] * len(self.sizes)
        # what is dealt out: the places of rows, or those of whole steps
        places, rows = (1, self.global_batch) if self.mix.is_by_step else (self.global_batch, 1)
        for start, stop, parts in self._phases:
            if start < steps:
                rest = (min(steps, stop) - start) * places
                for source, (part, of) in enumerate(parts):
                    share = (2 * rest * part + of) // (2 * of)  # to the nearest place
                    counts[source] += share * rows
                    rest -= share
        return tuple(counts)

    @cached_property
    def _phases(self) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """(first step, the step behind the last, parts) of every phase. A part (1, 3) of a source
        is a third of the places that the sources before it leave: so the number of none falls where
        the number of places rises.
        """
        phases = self.mix.phases_of(self.sizes)
        stops = [*(start for start, _ in phases[1:]), _NEVER]
        spans: list[tuple[int, int, list[tuple[int, int]]]] = []
        for (start, weights), stop in zip(phases, stops, strict=True):
            rest, parts = Fraction(1), list[tuple[int, int]]()
            for weight in weights:
                part = weight / rest if rest else Fraction(0)
                parts.append((part.numerator, part.denominator))
                rest -= weight
            spans.append((start, stop, parts))
        return spans

    def rows(self, step: int) -> np.ndarray:
        """The (global_batch,) rows of a step (0-based), no row twice, source after source."""
        begins, ends = self.taken(step), self.taken(step + 1)
        return np.concatenate(
            [
                self._rows_of_source(source, begin, end - begin)
                for source, (begin, end) in enumerate(zip(begins, ends, strict=True))
                if end > begin
            ]
        )

    def _rows_of_source(self, source: int, begin: int, count: int) -> np.ndarray:
        """`count` rows of a source, behind the first `begin` that are taken of it."""
        epoch, place = divmod(begin, self.sizes[source])
        rows = self._order(source, epoch)[place : place + count]
        missing = count - len(rows)
        if missing:
            rows = np.concatenate([rows, self._order(source, epoch + 1)[:missing]])
        return rows + sum(self.sizes[:source])

    def pool(self, step: int) -> tuple[Pool, int]:
        """The steps around a step whose rows may change places with it, and its place among them:
        of steps of one source each, all that its source has in this epoch of it.
        """
        if not self.mix.is_by_step:
            span = self.span(step)
            first = step - (step - span.start) % _MOST_POOLED
            return Pool(first, min(span.stop - first, _MOST_POOLED)), step - first
        begins, ends = self.taken(step), self.taken(step + 1)
        source = next(place for place, begin in enumerate(begins) if ends[place] > begin)
        begin, size, batch = begins[source], self.sizes[source], self.global_batch
        start = begin // size * size  # of its epoch
        if ends[source] > start + size:  # the step has rows of two epochs
            return Pool(begin, 1, source), 0
        first = -(-start // batch) * batch
        return Pool(first, (start + size - first) // batch, source), (begin - first) // batch

    def rows_of(self, pool: Pool) -> np.ndarray:
        """(steps, global_batch) the rows of a pool."""
        if pool.source is None:
            return np.stack([self.rows(pool.first + place) for place in range(pool.count)])
        rows = self._rows_of_source(pool.source, pool.first, pool.count * self.global_batch)
        return rows.reshape(pool.count, self.global_batch)

    def span(self, step: int) -> range:
        """The steps around a step that have its weights, and in which every source stays in its
        epoch; where one begins an epoch within the step itself, only that step.
        """
        begins, ends = self.taken(step), self.taken(step + 1)
        first, stop = next(phase[:2] for phase in self._phases if step < phase[1])
        for source, size in enumerate(self.sizes):
            epoch = begins[source] // size
            if ends[source] > (epoch + 1) * size:
                return range(step, step + 1)
            first = max(first, self._first_step(source, epoch * size))
            end = self._first_step(source, (epoch + 1) * size)
            is_within = self.taken(end)[source] > (epoch + 1) * size  # a step has rows of both
            stop = min(stop, end - 1 if is_within else end)
        return range(first, max(stop, step + 1))

    def epoch(self, step: int) -> int:
        """A number that rises with every epoch of every source."""
        pairs = zip(self.taken(step), self.sizes, strict=True)
        return sum(count // size for count, size in pairs)

    def epochs_of(self, step: int, rows: np.ndarray) -> np.ndarray:
        """(N,) int64: the epoch, of its own source, of each row of a step, or of another step of
        its span.
        """
        begins, ends = self.taken(step), self.taken(step + 1)
        epochs = np.zeros(len(rows), np.int64)
        first_row = 0
        for source, size in enumerate(self.sizes):
            is_of_source = (rows >= first_row) & (rows < first_row + size)
            epoch = begins[source] // size
            later = ends[source] - (epoch + 1) * size
            epochs[is_of_source] = epoch
            if later > 0:
                of_next = self._order(source, epoch + 1)[:later] + first_row
                epochs[np.isin(rows, of_next)] += 1
            first_row += size
        return epochs

    def steps_of(self, steps: int) -> int:
        """The steps of a run that wants `steps`: fewer if it ends where a source ends. DataError
        where a source has no rows for a single step.
        """
        if not self.mix.stops:
            return steps
        lasts = [self._first_step(source, size + 1) - 1 for source, size in enumerate(self.sizes)]
        if min(lasts) < 1:
            raise DataError(
                f'mixing.ends="stop": {self.mix.names[lasts.index(0)]!r} has fewer rows than one '
                'step takes of it. Give it more, a smaller weight, or use ends="again".'
            )
        return min(steps, *lasts)

    def epochs_after(self, steps: int) -> list[float]:
        """How often each source was read after so many steps."""
        return [count / size for count, size in zip(self.taken(steps), self.sizes, strict=True)]

    def _first_step(self, source: int, count: int) -> int:
        """The fewest steps that take `count` rows of a source; _NEVER where none do."""
        most = 1
        while most < _NEVER and self.taken(most)[source] < count:
            most *= 2
        return bisect_left(range(most), count, key=lambda steps: self.taken(steps)[source])

    @cached_property
    def _most(self) -> list[int]:
        """The most rows of each source in a step."""
        most = [0] * len(self.sizes)
        for _, _, parts in self._phases:
            rest = self.global_batch
            for source, (part, of) in enumerate(parts):
                if self.mix.is_by_step:
                    most[source] = max(most[source], rest if part else 0)
                    continue
                most[source] = max(most[source], -(-rest * part // of))
                rest -= rest * part // of
        return most

    def _order(self, source: int, epoch: int) -> np.ndarray:
        """The order of a source's rows in an epoch of its own: as drawn, but rows that the end of
        the epoch before has put into the step of its beginning come behind. So no step has a row
        twice.
        """
        if (source, epoch) in self._orders:
            return self._orders[source, epoch]
        size = self.sizes[source]
        begun = max(0, epoch - 1)
        if size < 2 * self._most[source]:  # the last rows of an epoch may have been moved as well
            earlier = [one for of, one in self._orders if of == source and one < epoch]
            begun = max(earlier, default=0)
        order = self._orders.get((source, begun))
        if order is None:
            order = self._permutation(source, begun)
        for number in range(begun + 1, epoch + 1):
            order = self._behind(order, source, number)
        order.setflags(write=False)
        for earlier in [one for one in self._orders if one[0] == source and one[1] != epoch - 1]:
            del self._orders[earlier]
        self._orders[source, epoch] = order
        return order

    def _behind(self, before: np.ndarray, source: int, epoch: int) -> np.ndarray:
        """The order of an epoch behind that of the epoch before."""
        shuffle, start = self._permutation(source, epoch), epoch * self.sizes[source]
        step = self._first_step(source, start + 1) - 1  # takes the first row of the epoch
        count_before = start - self.taken(step)[source]
        if count_before == 0:
            return shuffle
        reach = self.taken(step + 1)[source] - self.taken(step)[source]
        first = shuffle[:reach]
        is_there = np.isin(first, before[-count_before:])
        return np.concatenate([first[~is_there], first[is_there], shuffle[reach:]])

    def _permutation(self, source: int, epoch: int) -> np.ndarray:
        """A permutation drawn from (seed, epoch, source), as epochs.epoch_order draws."""
        size = self.sizes[source]
        if self.seed is None:
            return np.arange(size)
        words = np.random.SeedSequence([self.seed, epoch, source])
        return np.argsort(np.random.PCG64(words).random_raw(size), kind="stable")
