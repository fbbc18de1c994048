"""ROUGE-1, -2, -L and -Lsum of a summary against several references, by Google's rouge-score."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
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
    score_multi). "rouge1" takes all kinds from the reference with the best ROUGE-1, the first one
    in a tie (Cachola et al. 2020, SciTLDR's cal-rouge.py). ROUGE-1 itself is the same in both.
    """
    scorer = _scorer(how.stemmer)
    by_reference: list[dict[str, float]] = []
    for reference in references:
        of_reference = scorer.score(lines(reference), lines(prediction))
        by_reference.append({kind: float(of_reference[name][2]) for kind, name in KINDS.items()})
    if how.best == "rouge1":
        return max(by_reference, key=lambda of_reference: of_reference["rouge1"])
    return {kind: max(of_reference[kind] for of_reference in by_reference) for kind in KINDS}


def lines(text: str) -> str:
    """The text with one sentence on each line, as ROUGE-Lsum wants it; other kinds ignore lines.

    rouge-score would split sentences with a model of NLTK that has to be downloaded. This function
    cuts behind . ! ? and keeps the lines of the text. It also cuts behind abbreviations, in
    predictions and references alike.
    """
    return "\n".join(
        _END_OF_SENTENCE.sub("\n", line.strip()) for line in text.splitlines() if line.strip()
    )


@lru_cache(maxsize=2)
def _scorer(stemmer: bool) -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer

    # each scorer would log which tokenizer it uses
    logging.getLogger("absl").setLevel(logging.WARNING)
    return RougeScorer(list(KINDS.values()), use_stemmer=stemmer)
