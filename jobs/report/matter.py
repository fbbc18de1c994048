"""What mattered in a search: how much of the order of its trials goes with each key."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs.search.record import SearchState, Trial

LEAST_TRIALS = 9  # three groups of three
LEAST_OF_GROUP = 3  # trials for each value of a key, on average
THIRDS = 3  # groups of a key with many numbers

MEASURE = (
    "the share of the variance of the trials' ranks that lies between the values of the key alone "
    "(eta squared, less what chance would give; a key with many numbers in thirds)"
)


@dataclass(frozen=True)
class KeyShare:
    """How much one key mattered: 0 (nothing) to 1 (it alone orders the trials). None: there were
    too few trials for the number of its values.
    """

    key: str
    share: float | None
    groups: int


@dataclass(frozen=True)
class Mattering:
    """What mattered at the first rung, the one that all trials came to. problem: why it is not
    said.
    """

    rung: int | None
    trials: int
    shares: tuple[KeyShare, ...] = ()
    problem: str = ""


def mattering(search: SearchState) -> Mattering:
    """What mattered in a search, the strongest key first."""
    rung = search.first_rung
    trials = [] if rung is None else search.ranked(rung)
    if len(trials) < LEAST_TRIALS:
        problem = (
            f"what mattered is not said: {len(trials)} trials have a score, and it takes "
            f"{LEAST_TRIALS} or more"
        )
        return Mattering(rung, len(trials), problem=problem)
    assert rung is not None, "the trials have scores at it"
    ranks = _ranks([trial.scores[rung] for trial in trials])
    shares = [_share(key, trials, ranks) for key in search.keys]
    shares.sort(key=lambda one: (one.share is None, -(one.share or 0.0)))
    return Mattering(rung, len(trials), tuple(shares))


def _share(key: str, trials: Sequence[Trial], ranks: Sequence[float]) -> KeyShare:
    labels = _labels([trial.values[key] for trial in trials])
    groups = len(set(labels))
    if groups < 2 or len(trials) < LEAST_OF_GROUP * groups:
        return KeyShare(key, None if groups > 1 else 0.0, groups)
    mean = math.fsum(ranks) / len(ranks)
    whole = math.fsum((rank - mean) ** 2 for rank in ranks)
    between = 0.0
    for label in set(labels):
        own = [rank for rank, other in zip(ranks, labels, strict=True) if other == label]
        between += len(own) * (math.fsum(own) / len(own) - mean) ** 2
    if whole == 0:
        return KeyShare(key, 0.0, groups)
    # as adjusted R squared: groups drawn by chance explain (groups - 1) / (trials - 1)
    rest = (1 - between / whole) * (len(ranks) - 1) / (len(ranks) - groups)
    return KeyShare(key, max(0.0, 1 - rest), groups)


def _labels(values: Sequence[Any]) -> list[str]:
    """The group of each value: the value itself, or for many numbers the third that it lies in."""
    texts = [json.dumps(value, sort_keys=True) for value in values]
    is_number = all(type(value) in (int, float) for value in values)
    if not is_number or len(set(texts)) * LEAST_OF_GROUP <= len(values):
        return texts
    ranks = _ranks(values)
    return [str(int((rank - 0.5) * THIRDS / len(values))) for rank in ranks]


def _ranks(values: Sequence[Any]) -> list[float]:
    """1 for the lowest; equal values share the mean of their ranks."""
    order = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(order, start=1)))}
    return [first[value] + (order.count(value) - 1) / 2 for value in values]
