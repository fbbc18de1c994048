"""Steps whose rows belong together: of one topic, and no two of them with the same thing.

The rows of a pool of steps, usually an epoch's, change places. The pool has as many steps of as
many rows afterwards, so the number of steps, the weights of a mix and the row that a run goes on
with stay as they are. A row that no step can take is left out of the pool, and another row stands
twice in it instead.

Sources: Hofstaetter et al. 2021 (arXiv 2104.06967, TAS-B) for steps of one topic; the batch sampler
NO_DUPLICATES of sentence-transformers, which puts such a row off to a later batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from trainer.data.arranged.pool import Pool, Pools
from trainer.data.arranged.shared import Shared
from trainer.data.arranged.steps import FilledSteps

# S steps of a pool, B rows of a step, N rows of the data


@dataclass(frozen=True, eq=False)
class Arrangement:
    """What belongs together among the rows of a run."""

    num_rows: int
    topics_N: np.ndarray | None = None  # the topic of each row; None: all are of one
    shared: Shared | None = None  # of what no step has two rows; None: it may have
    ends: tuple[int, ...] = ()  # where the rows of each source of a mix end
    is_by_step: bool = False  # each step has rows of one source; else it keeps its share of each
    digest: str | None = None  # of topics that a resumed run must find again

    @property
    def keeps_shares(self) -> bool:
        """Whether a step has rows of several sources, whose numbers stay."""
        return bool(self.ends) and not self.is_by_step

    def kind_of(self, row: int) -> int:
        """The source of a row, where a step has rows of several."""
        return int(np.searchsorted(self.ends, row, side="right")) if self.keeps_shares else 0

    def room(self, rows_SB: np.ndarray) -> np.ndarray:
        """(S, kinds) how many rows of each kind are in each step."""
        if not self.keeps_shares:
            return np.full((len(rows_SB), 1), rows_SB.shape[1])
        kinds_SB = np.searchsorted(self.ends, rows_SB, side="right")
        return np.stack([np.bincount(kinds, minlength=len(self.ends)) for kinds in kinds_SB])

    def alike(self, pool: Pool) -> range:
        """All rows that may stand in the steps of a pool."""
        if pool.source is None:
            return range(self.num_rows)
        return range((0, *self.ends)[pool.source], self.ends[pool.source])


@dataclass(frozen=True)
class Arranged:
    """The steps of a pool, and what became of its rows."""

    rows_SB: np.ndarray
    left_out: int  # rows that no step could take; so many others stand twice
    mixed: int  # rows in steps of several topics


@lru_cache(maxsize=64)  # of a mix whose steps have one source each, a pool of each is in use
def arranged(epochs: Pools, pool: Pool, by: Arrangement) -> Arranged:
    """The steps of a pool: a function of the seed, the pool and the rows. DataError where a step
    cannot be filled.
    """
    rows_SB = epochs.rows_of(pool)
    words = [epochs.seed or 0, pool.first, pool.count, 0 if pool.source is None else pool.source]
    draws = np.random.PCG64(np.random.SeedSequence(words))
    steps_SB = _of_topics(rows_SB, _Region(by, by.alike(pool), rows_SB.shape[1]), draws)
    if not by.keeps_shares:  # else a step has its own number of rows of each source
        order = np.argsort(draws.random_raw(len(steps_SB)), kind="stable")
        steps_SB = steps_SB[order]
    steps_SB.setflags(write=False)  # all callers share this array
    mixed = 0
    if by.topics_N is not None:
        topics_SB = by.topics_N[steps_SB]
        mixed = int((topics_SB != topics_SB[:, :1]).any(1).sum()) * rows_SB.shape[1]
    return Arranged(steps_SB, len(np.setdiff1d(rows_SB, steps_SB)), mixed)


@dataclass(frozen=True)
class _Region:
    """What some steps of a pool are filled by."""

    by: Arrangement
    alike: range  # rows that may stand in them
    size: int  # B

    def filled(self, rows: np.ndarray, room_TK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(T, B) rows in steps with this room, and the rows that no step could take."""
        count = len(room_TK) * self.size
        if self.by.shared is None or not count:
            return rows[:count].reshape(-1, self.size), rows[count:]
        steps = FilledSteps(room_TK, self.by.shared, self.by.kind_of)
        unplaced = steps.fill(rows.tolist())
        steps.repeat(rows.tolist(), self.alike)
        return steps.rows(), np.array(unplaced, np.int64)


def _of_topics(rows_SB: np.ndarray, region: _Region, draws: np.random.PCG64) -> np.ndarray:
    """(S, B) rows in steps of one topic each, topic after topic. What fills no step of its own
    topic is left for the last steps, neighbouring topics together.
    """
    rows, size, by = rows_SB.flatten(), region.size, region.by
    if by.topics_N is None:
        return region.filled(rows, by.room(rows_SB))[0]
    topics, numbers, counts = np.unique(by.topics_N[rows], return_inverse=True, return_counts=True)
    rank = np.argsort(np.argsort(draws.random_raw(len(topics)), kind="stable"), kind="stable")
    rows = rows[np.argsort(rank[numbers], kind="stable")]
    ends = np.cumsum(counts[np.argsort(rank)])
    whole: list[np.ndarray] = []
    rest: list[np.ndarray] = []
    for of_topic in np.split(rows, ends[:-1]):
        steps, unplaced = region.filled(of_topic, np.full((len(of_topic) // size, 1), size))
        whole.append(steps)
        rest.append(unplaced)
    num_last = len(rows_SB) - sum(map(len, whole))
    last, _ = region.filled(np.concatenate(rest), np.full((num_last, 1), size))
    return np.concatenate([*whole, last])
