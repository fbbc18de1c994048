"""Two models on the same rows: the difference of a score, its interval, and how easily chance alone
would give as large a one.

Sources: Efron & Tibshirani 1993, An Introduction to the Bootstrap, ch. 13 and 15 (percentile
intervals, permutation tests); McNemar 1947, Psychometrika 12; Holm 1979, Scand. J. Statist. 6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.metrics.intervals import LEVEL, RESAMPLES, SEED, RowSums

# N rows, R resamples, S seeds

SWAPS = 2000  # deals of the permutation test
_BLOCK = 100  # deals that are summed at once


@dataclass(frozen=True)
class Difference:
    """One score of two models on the same rows."""

    before: float
    after: float
    low: float  # the ends of the interval of after - before
    high: float
    # How often a difference at least as large comes about when each row's two results are dealt to
    # the models at random.
    p: float
    num_rows: int
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


def compare(before: Sequence[RowSums], after: Sequence[RowSums]) -> Difference:
    """The score of the model `after` against that of the model `before`, each over the same N rows
    in the same order; several sums are several seeds of one recipe.

    A seed is drawn with replacement as rows are, so that the interval covers both. ValueError when
    the rows are not as many everywhere, or when no row counts.
    """
    num_rows = len(before[0].num_N)
    if any(len(one.num_N) != num_rows for one in [*before, *after]) or num_rows == 0:
        raise ValueError("both models need results of the same rows, and at least one row")
    first, second = _value(before), _value(after)
    if not math.isfinite(first) or not math.isfinite(second):
        raise ValueError("no row counts for this score")
    low, high = _interval(before, after)
    mean_before, mean_after = _mean(before), _mean(after)
    is_right = len(before) == len(after) == 1 and _is_binary(before[0]) and _is_binary(after[0])
    return Difference(
        before=first,
        after=second,
        low=low,
        high=high,
        p=_swapped_p(mean_before, mean_after),
        num_rows=num_rows,
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
    tail = sum(math.comb(num, k) for k in range(fewer + 1))
    return McNemar(broken, mended, min(1.0, 2 * tail / 2**num))


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


def _interval(before: Sequence[RowSums], after: Sequence[RowSums]) -> tuple[float, float]:
    """The percentiles of the difference over draws of rows, and of seeds where there are several;
    both models on the same rows each time.
    """
    num_rows = len(before[0].num_N)
    draws = np.random.default_rng([SEED, num_rows, len(before), len(after)])
    columns = [column for seed in [*before, *after] for column in (seed.num_N, seed.den_N)]
    parts_NM = np.stack(columns, axis=1).astype(np.float64)
    differences: list[float] = []
    for _ in range(RESAMPLES):
        rows = draws.integers(num_rows, size=num_rows)
        sums_SX = (np.bincount(rows, minlength=num_rows) @ parts_NM).reshape(-1, 2)
        with np.errstate(invalid="ignore", divide="ignore"):
            values_S = sums_SX[:, 0] / sums_SX[:, 1]
        first, second = values_S[: len(before)], values_S[len(before) :]
        if len(before) > 1:
            first = first[draws.integers(len(first), size=len(first))]
        if len(after) > 1:
            second = second[draws.integers(len(second), size=len(second))]
        differences.append(float(second.mean() - first.mean()))
    outside = 100 * (1 - LEVEL) / 2
    low, high = np.nanpercentile(differences, [outside, 100 - outside])
    return float(low), float(high)


def _swapped_p(before: RowSums, after: RowSums) -> float:
    """The share of SWAPS deals whose difference is at least as far from 0 as the real one, which
    counts as one deal itself (so p is never 0).
    """
    draws = np.random.default_rng([SEED, len(before.num_N), 1])
    real = abs(after.value() - before.value())
    parts_N2 = np.stack([before.num_N, before.den_N], axis=1).astype(np.float64)
    moved_N2 = np.stack([after.num_N, after.den_N], axis=1) - parts_N2  # by a swap of the row
    first_2, total_2 = parts_N2.sum(axis=0), 2 * parts_N2.sum(axis=0) + moved_N2.sum(axis=0)
    as_far = 0
    for _ in range(SWAPS // _BLOCK):
        is_swapped_BN = draws.integers(2, size=(_BLOCK, len(parts_N2)), dtype=np.int8)
        one_B2 = first_2 + is_swapped_BN @ moved_N2
        other_B2 = total_2 - one_B2
        with np.errstate(invalid="ignore", divide="ignore"):
            difference_B = one_B2[:, 0] / one_B2[:, 1] - other_B2[:, 0] / other_B2[:, 1]
        as_far += int((np.abs(difference_B) >= real * (1 - 1e-12)).sum())
    return (1 + as_far) / (1 + SWAPS)
