"""ROUGE-1, -2, -L and -Lsum of a summary against several references, by Google's rouge-score."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

    from trainer.tasks.summariser.config import Rouge

KINDS = {
    "rouge1": "rouge1",
    "rouge2": "rouge2",
    "rougel": "rougeL",
    "rougelsum": "rougeLsum",
}  # ours: rouge-score's
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def scores(prediction: str, references: Sequence[str], how: Rouge) -> dict[str, float]:
    """F1 of each kind of ROUGE, 0.0 to 1.0, against the best of at least one reference.

    how.best: "each" takes the best reference for each kind on its own (Lin 2004; rouge-score's
    score_multi); "rouge1" takes all kinds from the reference with the best ROUGE-1, the first of
    equals (Cachola et al. 2020, SciTLDR's cal-rouge.py). The ROUGE-1 of the two is the same.
    """
    by_reference = [_against(prediction, reference, how) for reference in references]
    if how.best == "rouge1":
        return max(by_reference, key=lambda of_reference: of_reference["rouge1"])
    return {kind: max(of_reference[kind] for of_reference in by_reference) for kind in KINDS}


def _against(prediction: str, reference: str, how: Rouge) -> dict[str, float]:
    scores: Mapping[str, tuple[float, float, float]] = _scorer(how.stemmer).score(
        lines(reference), lines(prediction)
    )
    return {kind: float(scores[name][2]) for kind, name in KINDS.items()}


def lines(text: str) -> str:
    """A sentence a line, as ROUGE-Lsum wants it; other kinds do not see where lines end.

    rouge-score would split with a model of NLTK's that has to be downloaded. This cuts behind . ! ?
    and keeps the lines that a text has: an abbreviation becomes a sentence of its own, on both
    sides.
    """
    return "\n".join(
        _END_OF_SENTENCE.sub("\n", line.strip()) for line in text.splitlines() if line.strip()
    )


@lru_cache(maxsize=2)
def _scorer(stemmer: bool) -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer

    # it tells which tokenizer it uses, every time
    logging.getLogger("absl").setLevel(logging.WARNING)
    return RougeScorer(list(KINDS.values()), use_stemmer=stemmer)
