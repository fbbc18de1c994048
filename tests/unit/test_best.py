"""Which value of a metric makes best/: as the experiment states it, else as the metric's name
says; a run that began before that goes on as it began.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from tests.wording import refused, says
from trainer.config.mistakes import foreign_best, turned_best
from trainer.config.schema import Schedule, Train
from trainer.config.scores.direction import direction_of
from trainer.training import validation
from trainer.training.choice.best import (
    best_text,
    direction_of_best,
    take_best,
    tell_old_direction,
)
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


def train(best: Any, **own: Any) -> Train:
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


def kept_of(evaluations: list[dict[str, float]], **own: Any) -> list[int]:
    """The evaluations that became best/, by several metrics."""
    progress, bests = Progress(), []
    cfg = Train.model_validate({"steps": 4, "global_batch": 2, "micro_batch": 2, **own})
    for progress.step, metrics in enumerate(evaluations, 1):
        if take_best(cfg, progress, metrics):
            bests.append(progress.step)
        progress = Progress.of(progress.state())  # as if it went on after each of them
    return bests


def test_the_first_metric_decides_and_the_others_break_ties_in_their_order() -> None:
    names = ["valid/em", "valid/mine/x", "valid_hard/loss"]
    own: dict[str, Any] = {"best": names, "best_is": {"valid/mine/x": "max"}}
    rows = [
        (0.5, 1.0, 3.0),
        (0.5, 1.0, 3.0),  # equal in all: no better
        (0.5, 1.0, 2.0),  # the third is a loss: lower is better
        (0.5, 2.0, 9.0),  # the second decides, and is stated to be better when higher
        (0.4, 9.0, 0.0),
        (0.6, 0.0, 9.0),
    ]
    evaluations = [dict(zip(names, row, strict=True)) for row in rows]
    assert kept_of(evaluations, **own) == [1, 3, 4, 6]
    nan = float("nan")
    broken = [dict(zip(names, row, strict=True)) for row in [(0.5, nan, 1.0), (0.5, 0.0, 2.0)]]
    assert kept_of(broken, **own) == [1, 2], "what is not finite is worse than any number"
    assert kept_of([*broken, dict(zip(names, (nan, 9.0, 0.0), strict=True))], **own) == [1, 2]


def test_the_log_tells_every_value_of_the_best() -> None:
    cfg = train("valid/loss")
    assert best_text(cfg, Progress()) == "any finite number"
    progress = Progress(best=0.5, tie_breakers=[2.0], best_step=7)
    assert best_text(cfg, progress) == "0.5, 2 at step 7"


def test_directions_are_stated_by_name_of_metrics_that_choose() -> None:
    two = ["valid/em", "valid/loss"]
    base: dict[str, Any] = {"steps": 4, "global_batch": 2, "micro_batch": 2, "best": two}
    with pytest.raises(ValidationError) as caught:
        Train.model_validate({**base, "best_is": "max"})
    says("best_is_of_several", caught.value, best_is='"max"', count=2)
    with pytest.raises(ValidationError) as caught:
        Train.model_validate({**base, "best_is": {"valid/f1": "max"}})
    says("best_is_strange", caught.value, names="'valid/f1'")
    for wrong in ([], ["valid/em", "valid/em"], [3], 3, ""):
        with pytest.raises(ValidationError):
            Train.model_validate({**base, "best": wrong})
    stated = Train.model_validate({**base, "best_is": {"valid/em": "min"}})
    assert [stated.stated_direction(one) for one in two] == ["min", None]


def test_a_direction_that_contradicts_the_name_is_doubted() -> None:
    def doubts(best: Any, best_is: Any) -> list[str]:
        cfg = SimpleNamespace(train=train(best, best_is=best_is))
        return list(turned_best(cfg))  # pyright: ignore[reportArgumentType]

    assert not doubts("valid/loss", "min")
    assert not doubts("valid/entropy", "max"), "its name says nothing"
    assert not doubts(["valid/em", "valid/loss"], {"valid/loss": "min"})
    [text] = doubts(["valid_hard/em", "valid/loss"], {"valid_hard/em": "min"})
    says("best_is_turned", f"--strict: {text}", stated="min", metric="valid_hard/em")


def test_a_metric_of_a_set_that_is_not_there_is_refused() -> None:
    def problems(best: str, *sets: str) -> list[str]:
        data = SimpleNamespace(valid_sets=dict.fromkeys(sets, "file"))
        return list(foreign_best(SimpleNamespace(train=train(best), data=data)))  # pyright: ignore

    assert not problems("valid_hard/loss", "hard")
    assert not problems("valid/loss")
    [text] = problems("valid_hrad/loss", "hard")
    says("best_of_no_set", text, best="valid_hrad/loss", name="hrad")
    assert "'hard'" in text
    says("best_not_of_validation", problems("train/loss", "hard")[0], best="train/loss")
