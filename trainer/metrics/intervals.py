"""How far a score would move if other rows of its kind had been drawn: the bootstrap over rows.

Source: Efron & Tibshirani 1993, An Introduction to the Bootstrap, ch. 13 (percentile intervals).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000
LEVEL = 0.95
SEED = 20261127
# Why a score has no interval.
OF_ALL_ROWS = "it is computed from all rows together, and is no sum over rows"


@dataclass(frozen=True)
class RowSums:
    """What each row adds to a mean: the score is the sum of `num` over the sum of `den`."""

    num_N: np.ndarray  # fp64
    den_N: np.ndarray

    def value(self) -> float:
        return float(self.num_N.sum() / self.den_N.sum()) if self.den_N.sum() else float("nan")


def intervals(scores: Mapping[str, RowSums]) -> dict[str, tuple[float, float]]:
    """By name, the 2.5th and the 97.5th percentile of a score over RESAMPLES draws of its N rows
    with replacement. A score of no row, or of rows that count for nothing, has none.

    All scores are computed on the same draws, and so are those of another model on as many rows:
    the draws depend on N alone. So differences between them may be compared draw by draw.
    """
    names = [name for name, sums in scores.items() if len(sums.num_N) and sums.den_N.sum()]
    if not names:
        return {}
    columns = [part for name in names for part in (scores[name].num_N, scores[name].den_N)]
    parts_NM = np.stack(columns, axis=1).astype(np.float64)
    num_rows = len(parts_NM)
    draws = np.random.default_rng([SEED, num_rows])
    totals_RM = np.empty((RESAMPLES, parts_NM.shape[1]))
    for resample in range(RESAMPLES):
        rows = draws.integers(num_rows, size=num_rows)
        totals_RM[resample] = np.bincount(rows, minlength=num_rows) @ parts_NM
    bounds: dict[str, tuple[float, float]] = {}
    for place, name in enumerate(names):
        num_R, den_R = totals_RM[:, 2 * place], totals_RM[:, 2 * place + 1]
        values = num_R[den_R > 0] / den_R[den_R > 0]
        outside = 100 * (1 - LEVEL) / 2
        low, high = np.percentile(values, [outside, 100 - outside])
        bounds[name] = (float(low), float(high))
    return bounds
