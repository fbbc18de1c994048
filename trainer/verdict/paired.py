"""Two models on the same rows: the difference of a score, its interval, and how easily chance alone
would give as large a one.

Sources: Efron & Tibshirani 1993, An Introduction to the Bootstrap, ch. 13 and 15 (percentile
intervals, permutation tests); Hesterberg 2015, The American Statistician 69 (percentiles for few
rows); Welch 1947, Biometrika 34 (seeds); McNemar 1947, Psychometrika 12; Holm 1979, Scand. J.
Statist. 6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from trainer.metrics.intervals import LEVEL, RESAMPLES, SEED, RowSums
from trainer.verdict import student

# N rows, R resamples

SWAPS = 2000  # deals of the permutation test, at least
# Deals for each of many scores: p is never below 1 / deals, and the correction multiplies it by the
# number of scores, so that with a fixed number of deals no difference of many scores would show.
_SWAPS_OF_SCORE = 100
_BLOCK = 100  # deals that are summed at once


@dataclass(frozen=True)
class Difference:
    """One score of two models on the same rows."""

    before: float
    after: float
    low: float  # the ends of the interval of after - before
    high: float
    # How often a difference at least as large comes about when each row's two results are dealt to
    # the models at random; with several seeds no less than what their spread gives.
    p: float
    num_rows: int  # that count for this score
    # Of a score that is 0 or 1 in each row: the rows that only one of the models has right, and
    # McNemar's exact p of them. None of other scores.
    mcnemar: McNemar | None = None

    @property
    def effect(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class McNemar:
    """Rows that were right and are wrong now, rows that were wrong and are right now, and p."""

    broken: int
    mended: int
    p: float


def compare(
    before: Sequence[RowSums], after: Sequence[RowSums], *, num_scores: int = 1
) -> Difference:
    """The score of the model `after` against that of the model `before`, each over the same N rows
    in the same order; several sums are several seeds of one recipe.

    num_scores: of how many scores holm() will correct p.

    With several seeds the interval and p cover both the choice of rows and that of seeds. The seeds
    are far too few to be drawn with replacement: their variance is estimated, and Student's t takes
    the place of the percentiles. ValueError when the rows are not as many everywhere, when no row
    counts, or when a result is not finite.
    """
    num_rows = len(before[0].num_N)
    if any(len(one.num_N) != num_rows for one in [*before, *after]) or num_rows == 0:
        raise ValueError("both models need results of the same rows, and at least one row")
    first, second = _value(before), _value(after)
    if not math.isfinite(first) or not math.isfinite(second):
        raise ValueError("no row counts for this score, or a result is not finite")
    counts_N = (before[0].den_N != 0) | (after[0].den_N != 0)
    before, after = ([_rows_of(one, counts_N) for one in side] for side in (before, after))
    mean_before, mean_after = _mean(before), _mean(after)
    effects_R = _resampled(mean_before, mean_after)
    deals = max(SWAPS, _SWAPS_OF_SCORE * num_scores)
    p = _swapped_p(mean_before, mean_after, deals)
    if len(before) == len(after) == 1:
        low, high = _percentiles(effects_R, before[0].den_N)
    else:
        half, p_of_seeds = _of_seeds(before, after, effects_R)
        low, high, p = second - first - half, second - first + half, max(p, p_of_seeds)
    is_right = len(before) == len(after) == 1 and _is_binary(before[0]) and _is_binary(after[0])
    return Difference(
        before=first,
        after=second,
        low=low,
        high=high,
        p=p,
        num_rows=int(counts_N.sum()),
        mcnemar=mcnemar(before[0].num_N, after[0].num_N) if is_right else None,
    )


def mcnemar(before_N: np.ndarray, after_N: np.ndarray) -> McNemar:
    """The exact test of rows that are right (1) or wrong (0) under two models.

    Rows that both have right or both have wrong say nothing of the difference: of the others each
    is as likely broken as mended if the models are equally good.
    """
    broken = int(((before_N > 0.5) & (after_N < 0.5)).sum())
    mended = int(((before_N < 0.5) & (after_N > 0.5)).sum())
    num, fewer = broken + mended, min(broken, mended)
    # logarithms, for the numbers of combinations of many rows have thousands of digits
    logs = [
        math.lgamma(num + 1) - math.lgamma(k + 1) - math.lgamma(num - k + 1)
        for k in range(fewer + 1)
    ]
    tail = math.fsum(math.exp(one - num * math.log(2)) for one in logs)
    return McNemar(broken, mended, min(1.0, 2 * tail))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """The p values, corrected for being several: with one of them below .05, the chance that any of
    the differences is none is at most .05.
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for place, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, p_values[name] * (len(p_values) - place)))
        corrected[name] = largest
    return {name: corrected[name] for name in p_values}


def _mean(seeds: Sequence[RowSums]) -> RowSums:
    return RowSums(
        np.mean([seed.num_N for seed in seeds], axis=0),
        np.mean([seed.den_N for seed in seeds], axis=0),
    )


def _value(seeds: Sequence[RowSums]) -> float:
    return float(np.mean([seed.value() for seed in seeds]))


def _is_binary(sums: RowSums) -> bool:
    return bool(np.isin(sums.num_N, (0.0, 1.0)).all() and (sums.den_N == 1).all())


def _rows_of(sums: RowSums, counts_N: np.ndarray) -> RowSums:
    return RowSums(sums.num_N[counts_N], sums.den_N[counts_N])


def _resampled(before: RowSums, after: RowSums) -> np.ndarray:
    """(R,) the difference over draws of rows with replacement, both models on the same rows."""
    num_rows = len(before.num_N)
    draws = np.random.default_rng([SEED, num_rows])
    columns = [before.num_N, before.den_N, after.num_N, after.den_N]
    parts_N4 = np.stack(columns, axis=1).astype(np.float64)
    sums_R4 = np.empty((RESAMPLES, 4))
    for resample in range(RESAMPLES):
        rows = draws.integers(num_rows, size=num_rows)
        sums_R4[resample] = np.bincount(rows, minlength=num_rows) @ parts_N4
    with np.errstate(invalid="ignore", divide="ignore"):
        effects_R = sums_R4[:, 2] / sums_R4[:, 3] - sums_R4[:, 0] / sums_R4[:, 1]
    return effects_R[np.isfinite(effects_R)]


def _percentiles(effects_R: np.ndarray, den_N: np.ndarray) -> tuple[float, float]:
    """The ends of the interval of one seed. The percentiles lie further out when rows are few, by
    as much as Student's t is wider than a normal distribution (Hesterberg 2015). Rows of unlike
    weights count as so many of equal weight (Kish 1965, Survey Sampling).
    """
    num_rows = float(den_N.sum() ** 2 / (den_N**2).sum())
    degrees = max(1, math.floor(num_rows) - 1)
    widening = math.sqrt((degrees + 1) / degrees)
    outside = 100 * NormalDist().cdf(-widening * student.quantile(LEVEL, degrees))
    low, high = np.percentile(effects_R, [outside, 100 - outside])
    return float(low), float(high)


def _of_seeds(
    before: Sequence[RowSums], after: Sequence[RowSums], effects_R: np.ndarray
) -> tuple[float, float]:
    """Half the interval's width, and p, when a side has several seeds: the variances of the rows
    and of each side's seeds add up, with the degrees of freedom of Welch and Satterthwaite. A side
    with one seed is that one model.
    """
    parts = [(float(effects_R.var(ddof=1)), max(1, len(before[0].num_N) - 1))]
    for side in (before, after):
        if len(side) > 1:
            spread = float(np.var([seed.value() for seed in side], ddof=1))
            parts.append((spread / len(side), len(side) - 1))
    variance = sum(part for part, _ in parts)
    effect = _value(after) - _value(before)
    if variance == 0:
        return 0.0, float(effect == 0)
    weighted = sum(part**2 / degrees for part, degrees in parts)
    degrees = max(1, math.floor(variance**2 / weighted))
    error = math.sqrt(variance)
    p = 1 - student.within(abs(effect) / error, degrees)
    return student.quantile(LEVEL, degrees) * error, p


def _swapped_p(before: RowSums, after: RowSums, deals: int) -> float:
    """The share of `deals` deals whose difference is at least as far from 0 as the real one, which
    counts as one deal itself (so p is never 0). Of few rows every deal is looked at once.
    """
    num_rows = len(before.num_N)
    draws = np.random.default_rng([SEED, num_rows, 1])
    real = abs(after.value() - before.value())
    parts_N2 = np.stack([before.num_N, before.den_N], axis=1).astype(np.float64)
    moved_N2 = np.stack([after.num_N, after.den_N], axis=1) - parts_N2  # by a swap of the row
    first_2, total_2 = parts_N2.sum(axis=0), 2 * parts_N2.sum(axis=0) + moved_N2.sum(axis=0)
    # what rounding adds to sums of the same rows in another order
    least = real - 1e-12 * (abs(after.value()) + abs(before.value()))

    def as_far(is_swapped_BN: np.ndarray) -> int:
        one_B2 = first_2 + is_swapped_BN @ moved_N2
        other_B2 = total_2 - one_B2
        with np.errstate(invalid="ignore", divide="ignore"):
            difference_B = one_B2[:, 0] / one_B2[:, 1] - other_B2[:, 0] / other_B2[:, 1]
        return int((np.abs(difference_B) >= least).sum())

    if 2**num_rows <= deals:
        every_BN = np.arange(2**num_rows)[:, None] >> np.arange(num_rows) & 1
        return as_far(every_BN) / 2**num_rows
    blocks = (
        draws.integers(2, size=(_BLOCK, num_rows), dtype=np.int8) for _ in range(deals // _BLOCK)
    )
    return (1 + sum(map(as_far, blocks))) / (1 + deals)
