"""Numbers that merge exactly over batches and ranks, and scores of answers.

The numbers are sums with counts, and pooled values.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ratio:
    """A mean that is divided once: summed over batches and ranks, in fp64."""

    num: Tensor  # () any float dtype
    den: Tensor  # () integer or float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        """The mean of `values`."""
        return cls(torch.tensor(values, dtype=torch.float64).sum(), torch.tensor(len(values)))

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.num.double() + other.num.double(), self.den.double() + other.den.double())

    def value(self) -> float:
        """The mean; NaN when nothing was counted."""
        return float(self.num.double() / self.den.double())


@dataclass(frozen=True)
class GatheredValues:
    """Values that must be seen together (AUROC, calibration error): gathered from all ranks, then
    reduced.
    """

    values: Tensor  # (N, ...)
    reduce: Callable[[Tensor], float | dict[str, float]]  # several numbers: each by its own name

    def __add__(self, other: GatheredValues) -> GatheredValues:
        return GatheredValues(torch.cat([self.values, other.values]), self.reduce)

    def value(self) -> float | dict[str, float]:
        return self.reduce(self.values)


# Answers
# --------------------------------------------------------------------------------------------------
# Each takes a predicted answer and its references, at least one, and returns the best score over
# them, 0.0 to 1.0. Source: Rajpurkar et al. 2016 (SQuAD) for normalisation, exact match and F1;
# ServiceNow/xc-cache for the edge cases.

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, no ASCII punctuation (nothing in its place), no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """1.0 when the prediction is a reference, both normalised."""
    return float(normalise(prediction) in map(normalise, references))


def precision(prediction: str, references: Sequence[str]) -> float:
    """The share of the prediction's words that a reference has; 0.0 for an empty prediction."""
    return max(
        _share(_shared_words(prediction, reference), prediction, 0.0) for reference in references
    )


def recall(prediction: str, references: Sequence[str]) -> float:
    """The share of a reference's words that the prediction has; 1.0 for an empty reference."""
    return max(
        _share(_shared_words(prediction, reference), reference, 1.0) for reference in references
    )


def f1(prediction: str, references: Sequence[str]) -> float:
    """Words in common, twice, over all words of prediction and reference; 1.0 if both are empty."""
    return max(
        _share(2 * _shared_words(prediction, reference), f"{prediction} {reference}", 1.0)
        for reference in references
    )


def recall_em(prediction: str, references: Sequence[str]) -> float:
    """1.0 when a normalised reference stands somewhere in the normalised prediction. An empty
    reference stands in every one, as in the published scores. A reference of which normalising
    leaves nothing ("A", "?"), which would as well, stands only where nothing is left of the
    prediction, either.
    """
    normal = normalise(prediction)
    pairs = ((reference, normalise(reference)) for reference in references)
    return float(
        any((text or not reference or not normal) and text in normal for reference, text in pairs)
    )


def answer_scores(
    predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, Ratio]:
    """em, f1, precision, recall, recall_em: the mean over predictions, each with its references."""
    measures = {
        "em": exact_match,
        "f1": f1,
        "precision": precision,
        "recall": recall,
        "recall_em": recall_em,
    }
    pairs = list(zip(predictions, references, strict=True))
    return {
        name: Ratio.of([measure(*pair) for pair in pairs]) for name, measure in measures.items()
    }


def scores_by_dataset(
    rows: Sequence[Mapping[str, Any]], predictions: Sequence[str]
) -> dict[str, float]:
    """`answer_scores` of each data set that rows name ("dataset") as em_nq, f1_nq, ...; rows
    without references do not count. Empty when no row names one.
    """
    groups: dict[str, list[tuple[str, Sequence[str]]]] = {}
    for row, prediction in zip(rows, predictions, strict=True):
        if "dataset" in row and row["answers"]:
            groups.setdefault(row["dataset"], []).append((prediction, row["answers"]))
    scores: dict[str, float] = {}
    for dataset, pairs in sorted(groups.items()):
        of_group = answer_scores([text for text, _ in pairs], [answers for _, answers in pairs])
        scores |= {f"{name}_{dataset}": score.value() for name, score in of_group.items()}
    return scores


def cut_at(text: str, marks: Sequence[str]) -> str:
    """`text` up to the first of `marks` that stands in it."""
    return min((text.partition(mark)[0] for mark in marks), key=len, default=text)


def _shared_words(one: str, other: str) -> int:
    return (Counter(normalise(one).split()) & Counter(normalise(other).split())).total()


def _share(part: int, text: str, if_empty: float) -> float:
    whole = len(normalise(text).split())
    return part / whole if whole else if_empty
