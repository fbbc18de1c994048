"""The rows on which a model is worse than another: slices by length, source, label or first words.

Many slices are looked at, and among many one is always the worst. So each is held against the worst
of all slices when each row's two results are dealt to the models at random. The chance that any
slice is named of models which are equally good on every row is LEVEL_OF_ONE + LEVEL_OF_TWO at most.
Source: Westfall & Young 1993, Resampling-Based Multiple Testing (the maximum statistic).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
_ROUNDING = 1e-5  # of scores that are summed in fp32: equal ones may differ by so much
_MOST_CHARACTERS = 60  # of a value in a condition
_ROWS_AT_ONCE = 4096  # whose masks are numbers, which take many times the memory of truth values

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
    is_worse_than_all: bool  # whether its whole interval is worse than the mean over all rows

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
        scale_C = math.sqrt(float((losses_N**2).mean())) * np.sqrt(masks_CN.sum(axis=1))
        largest_R = _largest(masks_CN, losses_N, scale_C)
        bound = float(np.quantile(largest_R, 1 - level, method="higher"))
        # What the rows of a candidate lost together, in standard deviations of such a sum when
        # losses are as large as over all rows and of random sign. Rows of slices that are named
        # already count for nothing in the ones after them.
        sums_C = _sums(masks_CN, losses_N * is_left_N)
        while True:
            scores_C = sums_C / scale_C
            worst = int(scores_C.argmax())
            if scores_C[worst] <= bound * (1 + _ROUNDING):
                break
            conditions, mask_N = candidates[worst]
            p = (1 + int((largest_R >= scores_C[worst] * (1 - _ROUNDING)).sum())) / (1 + DEALS)
            worse.append(_slice(conditions, mask_N, before_N, after_N, bound=bound, p=p))
            sums_C = sums_C - _sums(masks_CN, losses_N * (is_left_N & mask_N))
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
                by_rows.setdefault(_key(mask_N), ((condition,), mask_N))
    return list(by_rows.values())


def _key(mask_N: np.ndarray) -> bytes:
    """The same for the same rows."""
    return hashlib.sha256(np.packbits(mask_N).tobytes()).digest()


def _conditions(name: str, values: Feature) -> Iterable[tuple[str, np.ndarray]]:
    if any(isinstance(value, str) for value in values):
        counts = Counter(None if value is None else str(value) for value in values)
        for kind, _ in counts.most_common(MOST_VALUES):
            mask_N = np.fromiter(
                ((value is None) if kind is None else str(value) == kind for value in values),
                dtype=bool,
                count=len(values),
            )
            yield f"no {name}" if kind is None else f"{name} = {_shown(kind)}", mask_N
        return
    numbers = np.array([math.nan if value is None else float(value) for value in values])
    known = numbers[np.isfinite(numbers)]
    cuts = set(np.quantile(known, QUANTILES, method="lower").tolist()) if len(known) else set()
    for cut in sorted(cuts):
        yield f"{name} > {cut:g}", numbers > cut
        yield f"{name} <= {cut:g}", numbers <= cut


def _shown(value: str) -> str:
    """A value on one line, cut where it is long."""
    line = " ".join(value.split()) or repr(value)
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."


def _pairs(
    singles: Sequence[tuple[tuple[str, ...], np.ndarray]],
) -> list[tuple[tuple[str, ...], np.ndarray]]:
    """The largest slices of two conditions that are smaller than each alone. Which ones are taken
    follows from their rows, never from results, or their level would not hold.
    """
    if not singles:
        return []
    masks_CN = np.stack([mask for _, mask in singles])
    both_CC = _sums(masks_CN, masks_CN.T)  # rows that two slices share
    sizes_C = both_CC.diagonal()
    fits_CC = (both_CC >= MIN_ROWS) & (both_CC < np.minimum(sizes_C[:, None], sizes_C))
    first_P, second_P = np.nonzero(np.triu(fits_CC, 1))
    order = np.argsort(-both_CC[first_P, second_P], kind="stable")
    keys = {_key(mask) for mask in masks_CN}
    pairs: list[tuple[tuple[str, ...], np.ndarray]] = []
    for first, second in zip(first_P[order].tolist(), second_P[order].tolist(), strict=True):
        if len(pairs) == MOST_PAIRS:
            break
        mask_N = masks_CN[first] & masks_CN[second]
        if (key := _key(mask_N)) not in keys:
            keys.add(key)
            pairs.append(((*singles[first][0], *singles[second][0]), mask_N))
    return pairs


def _sums(masks_CN: np.ndarray, values_NX: np.ndarray) -> np.ndarray:
    """(C,) or (C, X) the sums of values over the rows of each candidate, in fp64."""
    total = np.zeros((len(masks_CN), *values_NX.shape[1:]))
    counted = np.flatnonzero(values_NX if values_NX.ndim == 1 else values_NX.any(axis=1))
    for first in range(0, len(counted), _ROWS_AT_ONCE):
        rows = counted[first : first + _ROWS_AT_ONCE]
        total += masks_CN[:, rows].astype(np.float64) @ values_NX[rows].astype(np.float64)
    return total


def _largest(masks_CN: np.ndarray, losses_N: np.ndarray, scale_C: np.ndarray) -> np.ndarray:
    """By deal, the largest score of any candidate when the sign of each row's loss is drawn."""
    draws = np.random.default_rng([SEED, len(losses_N), len(masks_CN)])
    sums_RC = np.zeros((DEALS, len(masks_CN)), dtype=np.float32)
    counted = np.flatnonzero(losses_N)
    for first in range(0, len(counted), _ROWS_AT_ONCE):
        rows = counted[first : first + _ROWS_AT_ONCE]
        signs_RN = draws.integers(2, size=(DEALS, len(rows)), dtype=np.int8).astype(np.float32)
        values_NC = (masks_CN[:, rows] * losses_N[rows]).astype(np.float32).T
        sums_RC += (2 * signs_RN - 1) @ values_NC
    return (sums_RC / scale_C.astype(np.float32)).max(axis=1).astype(np.float64)


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
        is_worse_than_all=effect + half < float((after_N - before_N).mean()),
    )
