"""Whether a model's confidence in its answers is how often they are right.

Source: Naeini et al. 2015, Obtaining Well Calibrated Probabilities Using Bayesian Binning (the
expected calibration error); bins of equally many rows as in Nguyen & O'Connor 2015.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BINS = 10


@dataclass(frozen=True)
class Confidence:
    """How confidence and right answers go together."""

    confidence: float  # the mean probability of an answer
    right: float  # the share of answers that are right
    error: float  # the expected calibration error: the mean distance of the two, over bins
    num_rows: int


def calibration(confidence_N: np.ndarray, is_right_N: np.ndarray) -> Confidence:
    """Of N answers with their probabilities (0 to 1) and whether they are right (0 or 1). The bins
    hold equally many rows. ValueError without rows.
    """
    if not len(confidence_N):
        raise ValueError("no answer has a confidence")
    order = np.argsort(confidence_N, kind="stable")
    parts = np.array_split(order, min(BINS, len(order)))
    distances = [abs(confidence_N[one].mean() - is_right_N[one].mean()) * len(one) for one in parts]
    return Confidence(
        confidence=float(confidence_N.mean()),
        right=float(is_right_N.mean()),
        error=float(sum(distances) / len(order)),
        num_rows=len(order),
    )
