"""The test split of a finished run (--test): scored once, with the exported weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from trainer.evaluation.run import TEST, Evaluated, Question, evaluated
from trainer.files.atomic import write_json
from trainer.metrics.intervals import LEVEL, OF_ALL_ROWS, RESAMPLES, SEED
from trainer.metrics.test_record import FILE, is_tested, tested_model, weights_of
from trainer.runtime import distributed
from trainer.runtime.distributed import on_main
from trainer.runtime.preemption import Stopped
from trainer.telemetry.metrics_file import has_line
from trainer.telemetry.run_record import METRICS

if TYPE_CHECKING:
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan

logger = logging.getLogger(__name__)


def run_test(
    plan: RunPlan,
    options: Options,
    preemption: Preemption,
    *,
    step: int,
    log: Callable[[int, Mapping[str, float]], None],
) -> bool:
    """Score the test split with best/, or with final/ where a run has no best/: into test.json and
    one line of the log. False when a signal ended it; the same command then begins it again.

    step: the last one of the run. A collective. What was scored already is left as it is.
    """
    if on_main(lambda: is_tested(plan.folder)):
        return True
    train, name = plan.cfg.train, on_main(lambda: tested_model(plan.folder))
    question = Question(
        plan.values, model=name, split=TEST, batch=train.eval_batch or train.micro_batch
    )
    logger.info("the test split is scored with %s/", name)

    def stop() -> None:
        if int(distributed.total(torch.tensor(int(preemption.requested)))):
            raise Stopped

    try:
        # the run itself tells wandb, by its log
        found = evaluated(question, replace(options, wandb_project_name=None), stop=stop)
    except Stopped:
        return False
    scalars = _scalars(found)
    if not on_main(lambda: has_line(plan.folder / METRICS, step, f"{TEST}/rows")):
        log(step, scalars)
    on_main(lambda: write_json(plan.folder / FILE, _record(plan, name, step, found)))
    on_main(lambda: _tell(found))
    return True


def _scalars(found: Evaluated) -> dict[str, float]:
    """The line of the log: scores, the ends of their intervals, rows and seconds."""
    scalars: dict[str, float] = {}
    for name, value in found.scores.items():
        scalars[f"{TEST}/{name}"] = value
        if name in found.intervals:
            low, high = found.intervals[name]
            scalars |= {f"{TEST}/{name}_low": low, f"{TEST}/{name}_high": high}
    return {**scalars, f"{TEST}/rows": found.num_rows, f"{TEST}/seconds": round(found.seconds, 1)}


def _record(plan: RunPlan, model: str, step: int, found: Evaluated) -> dict[str, Any]:
    scores: dict[str, dict[str, float | None]] = {}
    for name, value in found.scores.items():
        low, high = found.intervals.get(name, (None, None))
        if math.isfinite(value):
            scores[name] = {"value": value, "low": low, "high": high}
    return {
        "model": model,
        "weights": weights_of(plan.folder / model),
        "step": step,
        "rows": found.num_rows,
        "digest": found.digest,
        "seconds": round(found.seconds, 1),
        "scores": scores,
        "bootstrap": {"level": LEVEL, "resamples": RESAMPLES, "seed": SEED},
    }


def _tell(found: Evaluated) -> None:
    for name, value in found.scores.items():
        low, high = found.intervals.get(name, (None, None))
        interval = f"no interval: {OF_ALL_ROWS}" if low is None else f"95%: {low:.6g} to {high:.6g}"
        logger.info("%s/%s %.6g (%s)", TEST, name, value, interval)
    logger.info("%d rows of the test split in %.1f s", found.num_rows, found.seconds)
