"""Which evaluation is the best so far: by one metric, or by several, where others break ties."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer.config.scores.direction import Direction, direction_of
from trainer.errors import ConfigError, nearest
from trainer.runtime import distributed

if TYPE_CHECKING:
    from trainer.config.schema import Train
    from trainer.training.session import Progress

logger = logging.getLogger(__name__)


def direction_of_best(train: Train, progress: Progress, metric: str) -> Direction:
    """Whether the lowest or the highest value of a metric of train.best makes best/: as the
    experiment states it, as the run began, or as the metric's name says. ConfigError where nothing
    does.
    """
    stated = train.stated_direction(metric)
    direction = stated or progress.best_is or direction_of(metric)
    if direction is None:
        raise ConfigError(
            f"train.best={metric!r}: got no train.best_is, and the name does not say whether "
            'lower or higher is better; want one of them. Set train.best_is to "min" or "max", or '
            f'of several metrics to {{"{metric}": "max"}}.'
        )
    return direction


def tell_old_direction(train: Train, progress: Progress) -> None:
    """Warn where a run goes on to keep the lowest value of a metric that is better when higher."""
    if train.best is None or train.best_is is not None or progress.best_is is None:
        return
    for metric in train.best_metrics:
        by_name = direction_of(metric)
        if by_name != progress.best_is:
            logger.warning(
                "best/: this run began when train.best_is was %r unless stated, and goes on so: "
                "best/ holds the lowest %s%s. Use final/, or state train.best_is in a new "
                "experiment.",
                progress.best_is,
                metric,
                ", which is better when higher" if by_name == "max" else "",
            )


def refuse_absent(train: Train, metrics: Mapping[str, object]) -> None:
    """ConfigError for a metric of train.best that is not among `metrics`."""
    for metric in train.best_metrics:
        if metric not in metrics:
            raise ConfigError(
                f"train.best={metric!r}: no such metric. {nearest(metric, sorted(metrics))}"
            )


def take_best(train: Train, progress: Progress, metrics: Mapping[str, float]) -> bool:
    """Whether these scores are the best so far; `progress` then remembers them. Another evaluation
    was waited for.

    The first metric of train.best decides; where it is equal the next one does. An evaluation that
    is equal in all of them is no better. A value that is not finite is never better.
    """
    if train.best is None:
        return False
    refuse_absent(train, metrics)
    values = [metrics[metric] for metric in train.best_metrics]
    progress.waited += 1
    if not math.isfinite(values[0]):  # an infinite one would never be surpassed
        if distributed.is_main():
            text = "%s is %s at step %d: best/ stays as it is"
            logger.warning(text, train.best_metrics[0], values[0], progress.step)
        return False
    best = None if progress.best is None else [progress.best, *progress.tie_breakers]
    if best is not None and not _is_better(train, progress, values, best):
        return False
    progress.best, *progress.tie_breakers = values
    progress.best_step, progress.waited = progress.step, 0
    return True


def _is_better(train: Train, progress: Progress, values: list[float], known: list[float]) -> bool:
    for metric, value, before in zip(train.best_metrics, values, known, strict=True):
        is_least = direction_of_best(train, progress, metric) == "min"
        worst = math.inf if is_least else -math.inf
        value, before = (one if math.isfinite(one) else worst for one in (value, before))
        if value != before:
            return value < before if is_least else value > before
    return False


def best_text(train: Train, progress: Progress) -> str:
    """The best values so far, for a line of the log: "0.91 at step 400"."""
    if progress.best is None:
        return "any finite number"
    values = (f"{value:.6g}" for value in (progress.best, *progress.tie_breakers))
    return f"{', '.join(values)} at step {progress.best_step}"
