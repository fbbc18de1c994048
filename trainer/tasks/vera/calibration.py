"""Calibration of a verifier's scores: its error in quantile bins, and the temperature that
lowers it.

A statement's score is sigmoid(logit / temperature). A positive temperature changes no ranking, so
AUROC, average precision and accuracy do not depend on it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from trainer.errors import DataError

Values = Tensor | np.ndarray | Sequence[float]  # (N,)
Objective = Literal["ece", "nll"]

COLDEST, HOTTEST = 0.01, 100.0
STEPS = 60  # steps of the first, geometric search: neighbours are 17 % apart
NARROWER = 40  # steps of each later search, between the neighbours of the best temperature
SEARCHES = 3  # number of later searches: after the third, neighbours are 5e-6 apart
# Objective values that differ by at most this much count as equal. The last bit of an fp32 score
# depends on the processor, and must not choose the temperature where the error does not depend on
# it.
SLACK: dict[Objective, float] = {"ece": 2e-7, "nll": 0.0}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bins:
    """The occupied bins of some scores, the lowest scores first; each array has one value a bin."""

    mean_score: np.ndarray
    share_true: np.ndarray
    count: np.ndarray


@dataclass(frozen=True)
class Calibration:
    """A fitted temperature, with ECE and NLL before and after it on the rows that it was fitted
    to.
    """

    temperature: float
    objective: Objective
    split: str
    rows: int
    ece_before: float
    ece_after: float
    nll_before: float
    nll_after: float


def scores_of(logits: Values, *, temperature: float = 1.0) -> np.ndarray:
    """(N,) scores between 0 and 1, float64; equal logits have equal scores.

    Scores are rounded to fp32, as in the published program, for the rounding decides which scores
    are equal and fall into one bin. The sigmoid is computed in float64: in fp32, torch gives a
    logit another last bit when it stands behind the last full vector of the processor.
    """
    logits_N = torch.from_numpy(_array(logits) / temperature)
    return logits_N.float().double().sigmoid().float().double().numpy()


def quantile_bins(
    scores: Values, labels: Values, bins: int = 10, *, weights: Values | None = None
) -> Bins:
    """The occupied bins among `bins` bins, which hold the same number of statements except for
    ties. DataError without statements.

    scores: 0 to 1. labels: 1 for true, 0 for false. weights: of the statements in the means of a
    bin; the edges of the bins ignore them.
    """
    scores_N, labels_N, weights_N = _statements(scores, labels, weights)
    # 100 * linspace(0, 1) rounds as the published program does, linspace(0, 100) does not; an edge
    # can fall exactly on a score
    edges = np.percentile(scores_N, 100 * np.linspace(0, 1, bins + 1))
    bin_N = np.searchsorted(edges[1:-1], scores_N)
    count = np.bincount(bin_N, minlength=bins)
    occupied = count > 0
    weight = np.bincount(bin_N, weights_N, bins)[occupied]
    return Bins(
        mean_score=np.bincount(bin_N, weights_N * scores_N, bins)[occupied] / weight,
        share_true=np.bincount(bin_N, weights_N * labels_N, bins)[occupied] / weight,
        count=count[occupied],
    )


def ece(scores: Values, labels: Values, bins: int = 10, *, weights: Values | None = None) -> float:
    """Expected calibration error: the unweighted mean of |share true - mean score| over the
    occupied quantile bins.

    Source: Liu et al. 2023 (Vera). Other work often uses bins of equal width, weighted by their
    counts.
    """
    bins_of_scores = quantile_bins(scores, labels, bins, weights=weights)
    return float(np.abs(bins_of_scores.share_true - bins_of_scores.mean_score).mean())


def nll(
    logits: Values, labels: Values, *, temperature: float = 1.0, weights: Values | None = None
) -> float:
    """Mean negative log likelihood of the labels, in nats. DataError without statements."""
    logits_N, labels_N, weights_N = _statements(logits, labels, weights)
    scaled_N = logits_N / temperature
    return float(np.average(np.logaddexp(0, scaled_N) - labels_N * scaled_N, weights=weights_N))


def fit_temperature(
    logits: Values, labels: Values, *, objective: Objective = "ece", weights: Values | None = None
) -> float:
    """The temperature between 0.01 and 100 with the lowest objective; among equal ones the nearest
    to 1.

    The order of the rows does not matter, and the objective is never worse than at 1. ECE has
    several minima in T: a geometric search finds all but the narrowest, and later searches narrow
    down on the best. objective: "ece" as in Liu et al. 2023 (Vera), or "nll", which is smooth and
    steadier on few rows (Guo et al. 2017). weights: one for each row, for example 1 / the
    statements of its task. DataError without rows or when a logit is not finite.
    """
    logits_N, labels_N, weights_N = _statements(logits, labels, weights)
    # sorted, so that sums round alike in whatever order the rows came
    order = np.lexsort((weights_N, labels_N, logits_N))
    logits_N, labels_N, weights_N = logits_N[order], labels_N[order], weights_N[order]

    def loss(temperature: float) -> float:
        if objective == "nll":
            return nll(logits_N, labels_N, temperature=temperature, weights=weights_N)
        return ece(scores_of(logits_N, temperature=temperature), labels_N, weights=weights_N)

    tried = {
        temperature: loss(temperature)
        for temperature in [1.0, *np.geomspace(COLDEST, HOTTEST, STEPS + 1)]
    }
    width = (HOTTEST / COLDEST) ** (1 / STEPS)
    for _ in range(SEARCHES):
        best = _best(tried, SLACK[objective])
        low, high = max(best / width, COLDEST), min(best * width, HOTTEST)
        tried |= {
            temperature: loss(temperature) for temperature in np.geomspace(low, high, NARROWER + 1)
        }
        width **= 2 / NARROWER
    best = _best(tried, SLACK[objective])
    if not COLDEST < best < HOTTEST:
        log.warning(
            "The best temperature, %g, is at the edge of what is searched: look at the rows it "
            "was fitted on",
            best,
        )
    return best


def calibrate(
    logits: Values,
    labels: Values,
    *,
    split: str,
    objective: Objective = "ece",
    weights: Values | None = None,
) -> Calibration:
    """The temperature fitted to these rows, and their ECE and NLL at 1 and at that temperature.

    `weights` count in the fit only. split: the name of the rows' split. The numbers "after" are too
    good, for they are of the rows of the fit: report those of other rows as well.
    """
    temperature = fit_temperature(logits, labels, objective=objective, weights=weights)
    return Calibration(
        temperature=temperature,
        objective=objective,
        split=split,
        rows=len(_array(logits)),
        ece_before=ece(scores_of(logits), labels),
        ece_after=ece(scores_of(logits, temperature=temperature), labels),
        nll_before=nll(logits, labels),
        nll_after=nll(logits, labels, temperature=temperature),
    )


def _best(tried: dict[float, float], slack: float) -> float:
    """The temperature nearest to 1 among those whose objective is within `slack` of the least."""
    least = min(tried.values())
    equal = [temperature for temperature, value in tried.items() if value <= least + slack]
    return float(min(equal, key=lambda temperature: abs(np.log(temperature))))


def _statements(
    values: Values, labels: Values, weights: Values | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    values_N, labels_N = _array(values), _array(labels)
    weights_N = np.ones_like(values_N) if weights is None else _array(weights)
    if not len(values_N) == len(labels_N) == len(weights_N):
        raise DataError(
            f"{len(values_N)} statements, {len(labels_N)} labels and {len(weights_N)} weights. "
            "Give as many of each."
        )
    if not len(values_N):
        raise DataError("No statements to calibrate on. Give a split that has some.")
    if not np.isfinite(values_N).all():
        raise DataError(
            f"{np.count_nonzero(~np.isfinite(values_N))} of {len(values_N)} logits or scores are "
            "not finite. Calibrate a checkpoint from before the model diverged."
        )
    return values_N, labels_N, weights_N


def _array(values: Values) -> np.ndarray:
    return torch.as_tensor(values).detach().double().cpu().numpy()
