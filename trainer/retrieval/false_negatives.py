"""Negatives that a reranker takes for unknown positives: they are left out of training rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.data.formats.lists import as_list
from trainer.data.left_out import note
from trainer.data.readers.fields import QUESTION_IDS, first_given
from trainer.errors import ConfigError, DataError
from trainer.retrieval.negatives import UNTRAINABLE

if TYPE_CHECKING:
    from trainer.protocol.task import Row

SIDES = ("positive_passages", "negative_passages")
FALSE = "negatives that the judge takes for positives (left out)"


@dataclass(frozen=True)
class JudgeLimits:
    """When a negative is a false one: if one of these holds of the judge's scores."""

    above: float | None = None  # its score is above this one
    margin: float | None = None  # its score is above that of the best positive, less this margin

    @property
    def is_given(self) -> bool:
        return self.above is not None or self.margin is not None

    def is_false(self, score: float, best: float) -> bool:
        """Whether a negative with this score is a false one, beside a best positive of `best`."""
        if self.above is not None and score > self.above:
            return True
        return self.margin is not None and score > best - self.margin


def judged_rows(rows: Iterable[Row], verdict: JudgeLimits) -> Iterator[Row]:
    """Tevatron's training rows without false negatives, and without their scores.

    rows: with "scores", one for each passage, positives first (reranking.with_scores). A row
    without any negative left is left out; each negative and row is noted. DataError when no row
    remains. Sources: Qu et al. 2021 (RocketQA) for above; Solatorio 2024 (GISTEmbed) for margin.
    """
    num_rows, num_kept = 0, 0
    for row in rows:
        num_rows += 1
        name = first_given(row, QUESTION_IDS)[1]
        place = f"question {str(num_rows) if name is None else name!r}"
        positives, negatives = (as_list(row.get(side) or [], place, side) for side in SIDES)
        of_positives = row["scores"][: len(positives)]
        of_negatives = row["scores"][len(positives) :]
        best = max(of_positives, default=math.inf)
        pairs = list(zip(negatives, of_negatives, strict=True))
        kept = [pair for pair in pairs if not verdict.is_false(pair[1], best)]
        if len(kept) < len(pairs):
            note(place, FALSE, count=len(pairs) - len(kept))
        if not kept:
            note(place, UNTRAINABLE)
            continue
        num_kept += 1
        yield {
            **row,
            SIDES[1]: [passage for passage, _ in kept],
            "scores": [*of_positives, *(score for _, score in kept)],
        }
    if not num_kept:
        raise DataError(
            f"the judge takes every negative of all {num_rows} questions for a positive: no row is "
            "left to train on. Give a higher limit or a smaller margin, or another judge."
        )


def checked(above: float | None, margin: float | None, flags: tuple[str, str]) -> JudgeLimits:
    """The verdict of two flags. ConfigError for a number that is not finite."""
    for flag, value in zip(flags, (above, margin), strict=True):
        if value is not None and not abs(value) < float("inf"):
            raise ConfigError(f"{flag} {value}: want a finite number, such as 0.5.")
    return JudgeLimits(above, margin)
