"""Whether a metric is better when it is lower or higher, by its name. Imports no torch."""

from __future__ import annotations

import re
from typing import Literal

Direction = Literal["min", "max"]

# A metric with one of these words in its name is better when it is lower.
LEAST_IS_BEST = (
    *("loss", "perplexity", "ppl", "nll", "error", "wer", "cer", "rank", "mae", "mse", "rmse"),
    *("ece", "brier"),
)
# Names of the tasks' own metrics and of those that people add; a depth (@10) or the name of a data
# set (_nq) may follow.
_MOST_IS_BEST = re.compile(
    r"(em|exact_match|f1|precision|recall|recall_em|acc|accuracy|weighted_accuracy|auroc|auc|ap|map"
    r"|mrr|ndcg|hits?|success|rouge(1|2|l|lsum)|bleu|chrf|meteor|bertscore)(@\d+)?(_.+)?"
)


def direction_of(metric: str) -> Direction | None:
    """ "min" where lower is better, "max" where higher is; None where the name does not say.

    metric: with or without its split ("valid/"), and with a set behind it ("accuracy/mean") or not.
    """
    name = metric.lower().removeprefix("valid/").partition("/")[0]
    if any(word in LEAST_IS_BEST for word in name.replace("-", "_").split("_")):
        return "min"
    return "max" if _MOST_IS_BEST.fullmatch(name) else None
