"""The rows on which a model is worse than another: slices by length, source, label or first words.

Many slices are looked at, and among many one is always the worst. So each is held against the worst
of all slices when each row's two results are dealt to the models at random. The chance that any
slice is named of models which are equally good on every row is LEVEL_OF_ONE + LEVEL_OF_TWO at most.
Source: Westfall & Young 1993, Resampling-Based Multiple Testing (the maximum statistic).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from trainer.metrics.intervals import SEED

# N rows, C candidates, R deals

# What is told of single slices and of those of two conditions, together. Below the usual .05, for
# whoever compares often is misled by one in twenty.
LEVEL_OF_ONE, LEVEL_OF_TWO = 0.02, 0.003
DEALS = 4000
MIN_ROWS = 20  # of a slice: the results of fewer say nothing
MOST_PAIRS = 2000  # slices of two conditions; the largest are looked at
QUANTILES = (0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95)
MOST_VALUES = 40  # of a feature that is text; the most frequent are looked at

# Scores of few values are often equal, and deals are summed in 32 bits.
_ROUNDING = 1e-5

Feature = Sequence[float] | Sequence[str | None]


@dataclass(frozen=True)
class Slice:
    """Rows that one or two conditions pick, and the mean of a score there under both models."""

    conditions: tuple[str, ...]  # "question length > 200", "source = nq"
    num_rows: int
    before: float
    after: float
    # The ends of the interval of after - before, at the level of all slices together.
    low: float
    high: float
    p: float  # corrected for all slices

    @property
    def effect(self) -> float:
        return self.after - self.before


def worse_slices(
    before_N: np.ndarray, after_N: np.ndarray, features: Mapping[str, Feature]
) -> list[Slice]:
    """The slices whose rows have a lower mean after than before, the clearest first; each explains
    rows that the ones before it leave.

    before_N, after_N: a score of each row, higher is better; of a loss, its negative. features: by
    name what each row has: numbers, cut at quantiles, or texts, None where a row has none.
    ValueError when they are not of as many rows.
    """
    losses_N = (before_N - after_N).astype(np.float64)  # what a row lost
    if any(len(values) != len(losses_N) for values in features.values()):
        raise ValueError("each feature needs a value for every row")
    if not losses_N.any():
        return []
    singles = _singles(features)
    families = [(singles, LEVEL_OF_ONE), (_pairs(singles), LEVEL_OF_TWO)]
    worse: list[Slice] = []
    is_left_N = np.ones(len(losses_N), dtype=bool)
    for candidates, level in families:
        if not candidates:
            continue
        masks_CN = np.stack([mask for _, mask in candidates])
        largest_R = _largest(masks_CN, losses_N)
        bound = float(np.quantile(largest_R, 1 - level, method="higher"))
        while True:
            # rows of slices that are named already count for nothing in the ones after them
            scores_C = _scores(masks_CN, losses_N, is_left_N)
            worst = int(scores_C.argmax())
            if scores_C[worst] <= bound * (1 + _ROUNDING):
                break
            conditions, mask_N = candidates[worst]
            as_large = largest_R >= scores_C[worst] * (1 - _ROUNDING)
            p = (1 + int(as_large.sum())) / (1 + DEALS)
            worse.append(_slice(conditions, mask_N, before_N, after_N, bound=bound, p=p))
            is_left_N &= ~mask_N
    return worse


def _singles(features: Mapping[str, Feature]) -> list[tuple[tuple[str, ...], np.ndarray]]:
    """Every slice of one condition, each set of rows once, with at least MIN_ROWS rows in it and
    outside it.
    """
    by_rows: dict[bytes, tuple[tuple[str, ...], np.ndarray]] = {}
    for name, values in features.items():
        for condition, mask_N in _conditions(name, values):
            if min(mask_N.sum(), (~mask_N).sum()) >= MIN_ROWS:
                by_rows.setdefault(np.packbits(mask_N).tobytes(), ((condition,), mask_N))
    return list(by_rows.values())


def _conditions(name: str, values: Feature) -> list[tuple[str, np.ndarray]]:
    if any(isinstance(value, str) for value in values):
        texts = np.array(["" if value is None else f"={value}" for value in values], dtype=object)
        kinds, counts = np.unique(texts.astype(str), return_counts=True)
        frequent = [str(kinds[place]) for place in np.argsort(-counts, kind="stable")]
        return [
            (f"{name} = {kind[1:]}" if kind else f"no {name}", texts == kind)
            for kind in frequent[:MOST_VALUES]
        ]
    numbers = np.array([math.nan if value is None else float(value) for value in values])
    known = numbers[np.isfinite(numbers)]
    if not len(known):
        return []
    cuts = sorted({float(cut) for cut in np.quantile(known, QUANTILES, method="lower")})
    return [
        (f"{name} {sign} {cut:g}", numbers > cut if sign == ">" else numbers <= cut)
        for cut in cuts
        for sign in (">", "<=")
    ]


def _pairs(
    singles: Sequence[tuple[tuple[str, ...], np.ndarray]],
) -> list[tuple[tuple[str, ...], np.ndarray]]:
    """The largest slices of two conditions that are smaller than each alone. Which ones are taken
    follows from their rows, never from results, or their level would not hold.
    """
    by_rows: dict[bytes, tuple[tuple[str, ...], np.ndarray]] = {}
    for (first, first_N), (second, second_N) in combinations(singles, 2):
        both_N = first_N & second_N
        if MIN_ROWS <= both_N.sum() < min(first_N.sum(), second_N.sum()):
            by_rows.setdefault(np.packbits(both_N).tobytes(), ((*first, *second), both_N))
    alone = {np.packbits(mask_N).tobytes() for _, mask_N in singles}
    pairs = [pair for key, pair in by_rows.items() if key not in alone]
    return sorted(pairs, key=lambda pair: -int(pair[1].sum()))[:MOST_PAIRS]


def _scores(masks_CN: np.ndarray, losses_N: np.ndarray, is_left_N: np.ndarray) -> np.ndarray:
    """What the rows of a candidate lost together, in standard deviations of such a sum when losses
    are as large as over all rows and of random sign.
    """
    sizes_C = masks_CN.sum(axis=1)
    spread = math.sqrt(float((losses_N**2).mean()))
    return masks_CN @ (losses_N * is_left_N) / (spread * np.sqrt(sizes_C))


def _largest(masks_CN: np.ndarray, losses_N: np.ndarray) -> np.ndarray:
    """By deal, the largest score of any candidate when the sign of each row's loss is drawn."""
    draws = np.random.default_rng([SEED, len(losses_N), len(masks_CN)])
    spread = math.sqrt(float((losses_N**2).mean()))
    scale_C = (spread * np.sqrt(masks_CN.sum(axis=1))).astype(np.float32)
    masks_NC = np.ascontiguousarray(masks_CN.T, dtype=np.float32)
    counted = np.flatnonzero(losses_N)
    values = losses_N[counted].astype(np.float32)
    masks_NC = masks_NC[counted]
    largest: list[np.ndarray] = []
    for _ in range(DEALS // 500):
        signs = draws.integers(2, size=(500, len(counted)), dtype=np.int8).astype(np.float32)
        sums = ((2 * signs - 1) * values) @ masks_NC
        largest.append((sums / scale_C).max(axis=1))
    return np.concatenate(largest).astype(np.float64)


def _slice(
    conditions: tuple[str, ...],
    mask_N: np.ndarray,
    before_N: np.ndarray,
    after_N: np.ndarray,
    *,
    bound: float,
    p: float,
) -> Slice:
    gains = (after_N - before_N)[mask_N].astype(np.float64)
    half = bound * float(gains.std(ddof=1)) / math.sqrt(len(gains))
    effect = float(gains.mean())
    return Slice(
        conditions=conditions,
        num_rows=len(gains),
        before=float(before_N[mask_N].mean()),
        after=float(after_N[mask_N].mean()),
        low=effect - half,
        high=effect + half,
        p=p,
    )
