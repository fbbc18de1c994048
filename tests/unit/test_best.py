"""Which value of a metric makes best/: as the experiment states it, else as the metric's name
says; a run that began before that goes on as it began.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.wording import refused
from trainer.config.schema import Schedule, Train
from trainer.metrics.direction import direction_of
from trainer.training import validation
from trainer.training.choice.best import direction_of_best, tell_old_direction
from trainer.training.session import Progress

HIGHER = (
    *("em", "f1", "precision", "recall", "recall_em", "em_nq", "recall_em_triviaqa"),
    *("rouge1", "rouge2", "rougel", "rougelsum", "mrr@10", "recall@1", "recall@100", "ndcg@10"),
    *("mean_reciprocal_rank", "reciprocal_rank@10", "spearman_rank", "spearman"),
    *("accuracy/mean", "weighted_accuracy/all", "auroc/seen", "ap_true/all", "f1_false/unseen1"),
)
LOWER = (
    "loss",
    "shuffled_loss",
    "loss/all",
    "perplexity",
    "ece/all",
    "my-error",
    "mean_rank",
    "rank",
)
LOWER += ("word_error_rate", "mean_rank_nq", "loss_nq")


def train(best: str | None, **own: Any) -> Train:
    return Train(steps=4, global_batch=2, micro_batch=2, best=best, **own)


def test_the_name_of_each_of_our_metrics_says_what_is_better() -> None:
    assert {direction_of(f"valid/{name}") for name in HIGHER} == {"max"}
    assert {direction_of(f"valid/{name}") for name in LOWER} == {"min"}
    for name in ("tied/all", "entropy", "recalled", "apples", "rank_accuracy", "accuracy_rank"):
        assert direction_of(f"valid/{name}") is None, name
    for name in ("accuracy_loss", "recall_error", "neg_mse", "loss_reduction", "recall_drop"):
        assert direction_of(f"valid/{name}") is None, name


def kept(best: str, values: list[float], progress: Progress, **own: Any) -> list[int]:
    """The evaluations that became best/."""
    exported: list[int] = []
    cfg = SimpleNamespace(train=train(best, **own), schedule=Schedule())
    session: Any = SimpleNamespace(cfg=cfg, export_best=lambda: exported.append(progress.step))
    for progress.step, value in enumerate(values, 1):
        validation._is_best(session, progress, {best: value})
    return exported


def test_best_follows_the_metric_unless_it_is_stated() -> None:
    rising = [0.1, 0.2, 0.15, 0.3]
    assert kept("valid/recall@10", rising, Progress()) == [1, 2, 4]
    assert kept("valid/recall@10", rising, Progress(), best_is="min") == [1]
    assert kept("valid/loss", rising, Progress()) == [1]
    assert kept("valid/tied/all", rising, Progress(), best_is="max") == [1, 2, 4]
    with refused("best_is_unknown", metric="valid/tied/all"):
        kept("valid/tied/all", rising, Progress())


def test_a_value_that_is_no_finite_number_makes_no_best_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inf, nan = float("inf"), float("nan")
    assert kept("valid/recall", [nan, inf, 0.1, 0.2], Progress()) == [3, 4]
    assert kept("valid/loss", [-inf, 0.2, nan, 0.1], Progress()) == [2, 4]
    assert caplog.messages[0] == "valid/recall is nan at step 1: best/ stays as it is"
    assert len(caplog.messages) == 4


def test_a_run_that_began_before_keeps_the_lowest_and_is_told_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    older = {name: one for name, one in Progress(step=3).state().items() if name != "best_is"}
    old, new = Progress.of(older), Progress.of(Progress().state())
    of_recall = train("valid/recall")
    assert [direction_of_best(of_recall, one, "valid/recall") for one in (old, new)] == [
        "min",
        "max",
    ]
    assert Progress.of(old.state()).best_is == "min", "its later checkpoints say so too"
    with caplog.at_level(logging.WARNING):
        tell_old_direction(of_recall, new)
        tell_old_direction(train("valid/loss"), old)
        tell_old_direction(train("valid/recall", best_is="min"), old)
        assert not caplog.messages
        tell_old_direction(of_recall, old)
    [message] = caplog.messages
    assert "best/ holds the lowest valid/recall, which is better when higher" in message
