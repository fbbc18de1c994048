"""How far scores can be believed: calibration error in quantile bins, and the one temperature that
mends most of it.

A statement's score is sigmoid(logit / temperature). Dividing by one positive number changes no
ranking, so AUROC, average precision and accuracy stay what they were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from trainer.errors import DataError

Values = Tensor | np.ndarray | Sequence[float]  # (N,)
Objective = Literal["ece", "nll"]

COLDEST, HOTTEST = 0.01, 100.0
STEPS = 60  # of the first, geometric search: neighbours are 17 % apart
NARROWER = 40  # steps of each later search, between the neighbours of the best
SEARCHES = 3  # later ones: after the third, neighbours are 5e-6 apart
# Values that differ by no more are equal: fp32 scores have their last bit from the processor, and
# where the error does not depend on the temperature, that bit must not choose one.
SLACK: dict[Objective, float] = {"ece": 2e-7, "nll": 0.0}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bins:
    """The occupied bins of some scores, the lowest first: three arrays of their number."""

    mean_score: np.ndarray
    share_true: np.ndarray
    count: np.ndarray


@dataclass(frozen=True)
class Calibration:
    """A fitted temperature, and what it did to the very rows it was fitted on."""

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

    Scores are rounded to fp32, as the published program's are: whether two logits tie, and so fall
    into one bin, is decided there. The sigmoid itself is taken in float64: torch's in fp32 gives a
    logit another last bit where it stands in what is left over from whole vectors.
    """
    logits_N = torch.from_numpy(_array(logits) / temperature)
    return logits_N.float().double().sigmoid().float().double().numpy()


def quantile_bins(
    scores: Values, labels: Values, bins: int = 10, *, weights: Values | None = None
) -> Bins:
    """The occupied ones of `bins` bins that hold equally many statements, ties apart. DataError
    without statements.

    scores: 0 to 1. labels: 1 for true, 0 for false. weights: of the means within a bin; the edges
    ignore them.
    """
    scores_N, labels_N, weights_N = _statements(scores, labels, weights)
    # 100 * linspace(0, 1) rounds other than linspace(0, 100): an edge on a statement is where the
    # published one is.
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
    """Expected calibration error: mean over the occupied quantile bins of |share true - mean
    score|, bins alike.

    Source: Liu et al. 2023 (Vera). Elsewhere ECE often means bins of equal width, weighted by their
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
    """The temperature between 0.01 and 100 that makes the objective least; of equals, the one
    nearest to 1.

    The order of the rows does not matter, and the objective is never worse than at 1. ECE has
    several minima in T: a geometric search sees all but the narrowest of them, and later ones
    narrow down on the best. objective: "ece" as in Liu et al. 2023 (Vera), or "nll", smooth and
    steadier on few rows (Guo et al. 2017). weights: one for each row, as 1 / the statements of its
    task. DataError without rows or with a logit not finite.
    """
    sorted_rows = _sort(*_statements(logits, labels, weights))
    loss = _objective(objective, *sorted_rows)
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
    """The temperature that suits these rows, and their ECE and NLL at 1 and at it; `weights` only
    shape the fit.

    split: where the rows are from. Numbers "after" flatter: report those of rows that were not
    fitted on as well.
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


def _objective(
    name: Objective, logits: np.ndarray, labels: np.ndarray, weights: np.ndarray
) -> Callable[[float], float]:
    if name == "nll":
        return lambda temperature: nll(logits, labels, temperature=temperature, weights=weights)
    return lambda temperature: ece(
        scores_of(logits, temperature=temperature), labels, weights=weights
    )


def _best(tried: dict[float, float], slack: float) -> float:
    """The temperature nearest to 1 among those whose objective is within `slack` of the least."""
    least = min(tried.values())
    equal = [temperature for temperature, value in tried.items() if value <= least + slack]
    return float(min(equal, key=lambda temperature: abs(np.log(temperature))))


def _sort(
    logits: np.ndarray, labels: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows in an order of their own, so that sums round alike whatever order they came in."""
    order = np.lexsort((weights, labels, logits))
    return logits[order], labels[order], weights[order]


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
