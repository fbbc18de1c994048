"""Whether a metric is better when it is lower or higher, by its name. Imports no torch."""

from __future__ import annotations

import re
from typing import Literal

Direction = Literal["min", "max"]

# Names of the tasks' own metrics and of those that people add. A word may stand before a loss or an
# error ("shuffled_loss"), a depth (@10) or the name of a data set (_nq) behind any name.
_LEAST_IS_BEST = re.compile(
    r"((.+_)?(loss|perplexity|ppl|nll|error|wer|cer|mae|mse|rmse|ece|brier)"
    r"|((mean|median|average|avg)_)?rank)(@\d+)?(_.+)?"
)
_MOST_IS_BEST = re.compile(
    r"(em|exact_match|f1|precision|recall|recall_em|acc|accuracy|weighted_accuracy|auroc|auc|ap|map"
    r"|mrr|(mean_)?reciprocal_rank|ndcg|hits?|success|rouge(1|2|l|lsum)|bleu|chrf|meteor|bertscore"
    r"|(spearman|pearson|kendall)(_rank)?(_correlation)?)(@\d+)?(_.+)?"
)
# Words that turn the rest of a name round ("neg_mse", "recall_drop").
_TURNS = {"neg", "negative", "minus", "inverse", "inverted", "reduction", "improvement"} | {
    *("gain", "drop", "decrease", "gap"),
}
# Words that make another measure out of a rank.
_OF_RANKS = {"reciprocal", "correlation", "spearman", "pearson", "kendall"}
_WORDS_OF_MOST = _OF_RANKS | {
    *("em", "match", "f1", "precision", "recall", "acc", "accuracy", "auroc", "auc", "ap", "map"),
    *("mrr", "ndcg", "hit", "hits", "success", "bleu", "chrf", "meteor", "bertscore"),
    *("rouge1", "rouge2", "rougel", "rougelsum"),
}

_SPLIT = re.compile(r"valid(_[A-Za-z0-9][A-Za-z0-9.-]*)?/")  # of validation rows, or of a named set


def is_of_validation(name: str) -> bool:
    """Whether a logged number is the score of an evaluation: valid/loss, valid_nq/loss."""
    return _SPLIT.match(name) is not None


def direction_of(metric: str) -> Direction | None:
    """ "min" where lower is better, "max" where higher is; None where the name does not say, or
    has words of both kinds.

    metric: with or without its split ("valid/", "valid_nq/"), and with a set behind it
    ("accuracy/mean") or not.
    """
    match = _SPLIT.match(metric)
    rest = metric[match.end() :] if match else metric
    name = rest.lower().partition("/")[0].replace("-", "_")
    words = {word.partition("@")[0] for word in name.split("_")}
    if words & _TURNS:
        return None
    if _LEAST_IS_BEST.fullmatch(name):
        return None if words & _WORDS_OF_MOST else "min"
    if not _MOST_IS_BEST.fullmatch(name) or ("rank" in words and not words & _OF_RANKS):
        return None
    return "max"
