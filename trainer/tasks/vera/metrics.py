"""The metrics of a verifier, computed from one table that holds every scored statement once.

A metric's name is <metric>/<set>. Sets are "mean" (for accuracy and tied) or "all" (for other
metrics), "seen", "unseen", "unseen1", "unseen2" and each task. The definitions are those of the
published program (Liu et al. 2023, Vera), even where they are odd:

accuracy        The share of multiple-choice problems whose best statement is the true one. The
first statement wins a tie, and the true statement comes first: a verifier that gives all statements
the same score has accuracy 1. tied            The share of multiple-choice problems with such a
tie. The published program does not report it; accuracy can be too high by as much.
weighted_accuracy, auroc, ap_true, ap_false Over statements, each with the weight 1 / the statements
of its task. A logit above 0 predicts "true". The score of the false class is the negated logit.
precision_true, recall_true, f1_true, ..._false Read off the precision-recall curve at the first
threshold above 0. Where all logits have one sign, the curve has no such point or none beyond it,
and the values are 1, 0 and 0. That is right for the class that is never predicted, and wrong for
the other. F1 is 0 where precision and recall are 0; the published program gives NaN. ece
The expected calibration error in 10 quantile bins of all statements of all tasks, without a
temperature.

A metric that has nothing to measure is left out: accuracy of a boolean task, AUROC of one class,
ap_true without a true statement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from trainer.errors import DivergedError
from trainer.tasks.vera.calibration import ece, scores_of

TASK, GROUP, COLUMN, LOGIT, LABEL = range(5)
Kind = Literal["multiple_choice", "boolean"]
Part = Literal["seen", "unseen1", "unseen2"]
PARTS: dict[str, tuple[Part, ...]] = {
    "seen": ("seen",),
    "unseen": ("unseen1", "unseen2"),
    "unseen1": ("unseen1",),
    "unseen2": ("unseen2",),
}


def statement_metrics(
    table: Tensor | np.ndarray,
    tasks: Sequence[str],
    kinds: Mapping[str, Kind],
    parts: Mapping[str, Part],
) -> dict[str, float]:
    """Every metric of a table, by name; {} for an empty table.

    table: (N, 5) float64, in any order: number of the task in `tasks`, number of the problem
    (unique within its task), column within the problem, logit, label (1 true, 0 false).
    DivergedError for a logit that is not finite.
    """
    rows = _check(table, tasks)
    numbers = rows[:, TASK].astype(np.int64)
    of_task = {
        task: numbers == number for number, task in enumerate(tasks) if (numbers == number).any()
    }
    choices: dict[str, dict[str, float]] = {}
    for task, mask in of_task.items():
        if kinds[task] != "multiple_choice":
            continue
        of_rows = rows[mask]
        ranked, firsts = _rank(of_rows)
        has_second = np.diff(firsts, append=len(of_rows)) > 1
        best, seconds = ranked[firsts], ranked[firsts + has_second]
        is_tied = has_second & (of_rows[best, LOGIT] == of_rows[seconds, LOGIT])
        accuracy = float(of_rows[best, LABEL].mean())
        choices[task] = {"accuracy": accuracy, "tied": float(is_tied.mean())}
    scores: dict[str, float] = {}
    for metric in ("accuracy", "tied"):
        by_task = {task: values[metric] for task, values in choices.items()}
        # the unweighted means over all tasks and over each part
        means = {"mean": float(np.mean(list(by_task.values())))} if by_task else {}
        for name, own in PARTS.items():
            of_part = [value for task, value in by_task.items() if parts[task] in own]
            if of_part:
                means[name] = float(np.mean(of_part))
        scores |= {f"{metric}/{name}": value for name, value in (means | by_task).items()}
    weights = 1.0 / np.bincount(numbers)[numbers] if len(rows) else np.empty(0)
    for name, mask in _sets(of_task, parts).items():
        of_set = _of_statements(rows[mask, LOGIT], rows[mask, LABEL] > 0.5, weights[mask])
        scores |= {f"{metric}/{name}": value for metric, value in of_set.items()}
    return scores


def best_rows(table: Tensor | np.ndarray) -> np.ndarray:
    """The row number of each problem's highest logit; among equal logits that of the lowest column.

    The problems are sorted by task and number.
    """
    rows = _rows(table)
    ranked, firsts = _rank(rows)
    return ranked[firsts]


def _rank(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers sorted by task, problem, falling logit and column; and where each problem begins
    among them.
    """
    ranked = np.lexsort((rows[:, COLUMN], -rows[:, LOGIT], rows[:, GROUP], rows[:, TASK]))
    problems = rows[ranked][:, [TASK, GROUP]]
    return ranked, np.flatnonzero(np.any(np.diff(problems, axis=0, prepend=-1) != 0, axis=1))


def _sets(of_task: Mapping[str, np.ndarray], parts: Mapping[str, Part]) -> dict[str, np.ndarray]:
    """(N,) bool for each set that has rows: which rows belong to it."""
    masks = {"all": np.any(list(of_task.values()), axis=0)} if of_task else {}
    for name, own in PARTS.items():
        of_part = [mask for task, mask in of_task.items() if parts[task] in own]
        if of_part:
            masks[name] = np.any(of_part, axis=0)
    return masks | dict(of_task)


def _of_statements(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    from sklearn.metrics import roc_auc_score

    values = {
        "weighted_accuracy": float(np.average((logits > 0) == labels, weights=weights)),
        "ece": ece(scores_of(logits), labels),
    }
    if labels.any() and not labels.all():
        values["auroc"] = float(roc_auc_score(labels, logits, sample_weight=weights))
    if labels.any():
        values |= {
            f"{name}_true": value for name, value in _of_class(labels, logits, weights).items()
        }
    if not labels.all():
        values |= {
            f"{name}_false": value for name, value in _of_class(~labels, -logits, weights).items()
        }
    return values


def _of_class(is_member: np.ndarray, logits: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """ap, precision, recall and f1 of a class that has members, whose logits should be high."""
    from sklearn.metrics import average_precision_score, precision_recall_curve

    precisions, recalls, thresholds = precision_recall_curve(
        is_member, logits, sample_weight=weights
    )
    above = int(np.searchsorted(thresholds, 0.0, side="right"))
    # without a threshold at or below 0, or without one above, it is the curve's last point, (1, 0)
    place = above or len(thresholds)
    precision, recall = float(precisions[place]), float(recalls[place])
    return {
        "ap": float(average_precision_score(is_member, logits, sample_weight=weights)),
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / (precision + recall) if precision + recall else 0.0,
    }


def _check(table: Tensor | np.ndarray, tasks: Sequence[str]) -> np.ndarray:
    rows = _rows(table)
    bad = np.flatnonzero(~np.isfinite(rows[:, LOGIT]))
    if len(bad):
        first = rows[bad[0]]
        raise DivergedError(
            f"{len(bad)} of {len(rows)} logits are not finite; the first is {first[LOGIT]}, of "
            f"task {tasks[int(first[TASK])]!r}, problem {int(first[GROUP])}, column "
            f"{int(first[COLUMN])}. Evaluate an earlier checkpoint, or train on with a lower "
            "optim.lr."
        )
    places = rows[:, [TASK, GROUP, COLUMN]]
    assert len(np.unique(places, axis=0)) == len(places), (
        "a statement stands twice: number problems over all ranks"
    )
    return rows


def _rows(table: Tensor | np.ndarray) -> np.ndarray:
    return torch.as_tensor(table).detach().double().cpu().numpy().reshape(-1, 5)
