"""Chooses the passages of a query that a training step uses: by epoch as Tevatron v1 does, at
random, or always the first ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.errors import DataError
from trainer.protocol.task import DRAW, EPOCH

if TYPE_CHECKING:
    from trainer.protocol.task import Row
    from trainer.tasks.retriever.config import Data, Selection


@dataclass(frozen=True)
class Turn:
    """What a choice may depend on: the row, the epoch and random numbers."""

    item: int  # the row's place in its data set
    epoch: int
    seed: int
    draw: int  # a random number of this row and step

    @property
    def hash_value(self) -> int:
        """Python's hash of an integer below 2**61 is the integer itself."""
        return self.item + self.seed


def positive(count: int, turn: Turn, how: Selection) -> int:
    """The index of the chosen positive, out of `count`. Source of by_epoch: texttron/tevatron,
    branch tevatron-v1.
    """
    if how == "first":
        return 0
    return (turn.hash_value + turn.epoch if how == "by_epoch" else _draws(turn, 0)[0]) % count


def targets(count: int, most: int, turn: Turn, how: Selection) -> list[int]:
    """The indices of up to `most` positives, out of `count`: the one that `positive` takes, and
    those behind it.
    """
    first = positive(count, turn, how)
    return [(first + step) % count for step in range(min(most, count))]


def negatives(count: int, num_chosen: int, turn: Turn, how: Selection) -> list[int]:
    """The indices of num_chosen negatives, out of `count`; some repeat when `count` is smaller.

    by_epoch walks through one shuffled order, epoch by epoch. When there are too few negatives, the
    published program draws from the process's random state, which a resumed run cannot restore;
    here the row and the epoch fix the draw.
    """
    if num_chosen == 0:
        return []
    if count < num_chosen:
        return random.Random(f"{turn.hash_value} {turn.epoch}").choices(range(count), k=num_chosen)
    if how == "first":
        return list(range(num_chosen))
    if how == "drawn":
        return np.argsort(_draws(turn, count)[1:], kind="stable")[:num_chosen].tolist()
    order = list(range(count))
    random.Random(turn.hash_value).shuffle(order)
    start = turn.epoch * num_chosen % count
    return (order * 2)[start : start + num_chosen]


def _draws(turn: Turn, count: int) -> np.ndarray:
    """1 + count raw 64-bit numbers of PCG64, whose stream numpy guarantees. The first is for the
    positive, the others are for the negatives.
    """
    return np.random.PCG64(turn.draw).random_raw(1 + count) >> np.uint64(1)


def choose(row: Mapping[str, Any], data: Data, *, seed: int) -> list[int]:
    """The places of the chosen passages of an encoded row: in training, where rows carry a draw,
    data.passages of them, up to data.positives of which are positives; else all positives and the
    first negatives.
    """
    total, num_positives = len(row["lengths"]), int(row["num_positives"][0])
    if DRAW not in row:
        return list(range(min(total, num_positives + data.passages - 1)))
    turn = Turn(
        item=int(row["item"][0]), epoch=int(row[EPOCH][0]), seed=seed, draw=int(row[DRAW][0])
    )
    of_positives = targets(num_positives, data.positives, turn, data.select_positive)
    of_negatives = negatives(
        total - num_positives, data.passages - len(of_positives), turn, data.select_negatives
    )
    return [*of_positives, *(num_positives + place for place in of_negatives)]


def trainable(rows: Iterable[Row], passages: int, positives: int = 1) -> Iterator[Row]:
    """The same rows. DataError for a row without a positive passage, or without a negative one when
    more of `passages` are trained on than the row's positives, of which up to `positives` are.
    """
    for row in rows:
        missing = None
        if not row["positives"]:
            missing = "positive"
        elif passages > min(positives, len(row["positives"])) and not row["negatives"]:
            missing = "negative"
        if missing is not None:
            raise DataError(
                f"query {row['id']!r} has no {missing} passage, and data.passages={passages} of "
                "each are trained on. Take it out, give it some, or train on one positive alone "
                "(data.passages=1)."
            )
        yield row
