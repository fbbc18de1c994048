"""The validation split as the loop meets it: scored, logged, and the best weights so far kept."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from trainer.errors import ConfigError, nearest
from trainer.metrics.direction import Direction, direction_of
from trainer.protocol.abilities import Answers
from trainer.runtime import distributed
from trainer.runtime.preemption import Stopped
from trainer.training.scoring import answer, evaluate

if TYPE_CHECKING:
    from trainer.config.schema import Train
    from trainer.training.session import Progress, Session

logger = logging.getLogger(__name__)

SHOWN_ANSWERS = 20  # rows of the table of answers, as published


def direction_of_best(train: Train, progress: Progress) -> Direction:
    """Whether the lowest or the highest value of train.best makes best/: as the experiment states
    it, as the run began, or as the metric's name says. ConfigError where nothing does.
    """
    direction = train.best_is or progress.best_is or direction_of(str(train.best))
    if direction is None:
        raise ConfigError(
            f"train.best={train.best!r}: got no train.best_is, and the name does not say whether "
            'lower or higher is better; want one of them. Set train.best_is to "min" or "max".'
        )
    return direction


def _tell_old_direction(train: Train, progress: Progress) -> None:
    """Warn where a run goes on to keep the lowest value of a metric that is better when higher."""
    if train.best is None or train.best_is is not None or progress.best_is is None:
        return
    by_name = direction_of(train.best)
    if by_name != progress.best_is:
        logger.warning(
            "best/: this run began when train.best_is was %r unless stated, and goes on so: best/ "
            "holds the lowest %s%s. Use final/, or state train.best_is in a new experiment.",
            progress.best_is,
            train.best,
            ", which is better when higher" if by_name == "max" else "",
        )


def refuse_unknown_best(session: Session, progress: Progress) -> None:
    """ConfigError, before the first step, when no evaluation will give the metric train.best, or
    nothing says which of its values is the best. Every rank calls it.

    The first rows are evaluated; all of them where that does not show the metric, for some metrics
    are named after what is in the rows. Nothing is logged, and random state stays.
    """
    best, task, valid = session.cfg.train.best, session.task, session.valid
    distributed.on_main(lambda: _tell_old_direction(session.cfg.train, progress))
    if best in (None, "valid/loss"):
        return
    batch = session.cfg.train.eval_batch or session.cfg.train.micro_batch
    names: set[str] = set()
    for count in (min(batch, len(valid)), len(valid)):
        with session.meter.pause():
            scores = evaluate(session.engine, task, valid, batch=batch, num_rows=count)
            questions = session.questions[:count]
            if questions and isinstance(task, Answers):
                scores |= answer(session.engine, task, valid, questions, batch=batch)[0]
        names |= {f"valid/{name}" for name in scores}
        if best in names:
            direction_of_best(session.cfg.train, progress)
            return
    raise ConfigError(f"train.best={best!r}: no such metric. {nearest(str(best), sorted(names))}")


def evaluate_and_keep_best(session: Session, progress: Progress, *, is_saved: bool) -> bool:
    """Evaluate the present step, and save the weights if they are the best so far. False when a
    signal ended the evaluation: a checkpoint then says that it is owed, and a resumed run begins
    with it.

    is_saved: a checkpoint of this step is there already.
    """
    try:
        with session.meter.pause():
            with session.engine.averaged():
                scores = _scores(session, progress.step)
            metrics = {f"valid/{name}": value for name, value in scores.items()}
            session.record.log(progress.step, **metrics)
            session.record.score(progress.step, **metrics)
            improved = _is_best(session, progress, metrics)
    except Stopped:
        if not is_saved:
            session.save(progress)
        return False
    progress.owes_evaluation = False
    if improved and not is_saved:
        session.save(progress)
    return True


def end_early(session: Session, progress: Progress, *, is_saved: bool) -> None:
    """End a run that has waited long enough for a better evaluation. A collective.

    is_saved: a checkpoint of this step is there already.
    """
    if not is_saved:
        session.save(progress)
    train = session.cfg.train
    best = "any finite number"
    if progress.best is not None:
        best = f"{progress.best:.6g} at step {progress.best_step}"
    text = (
        f"step {progress.step} of {train.steps} is the last: train.patience={train.patience} "
        f"evaluations in a row had no better {train.best} than {best}"
    )
    session.record.end_early(text)


def pay_evaluation(session: Session, progress: Progress) -> bool:
    """Do what evaluate_and_keep_best does, for a step that an earlier attempt saved but did not
    finish evaluating. Scores that the attempt has logged already are used.
    """
    scores = distributed.on_main(lambda: session.record.logged_scores(progress.step))
    if scores is None:
        return evaluate_and_keep_best(session, progress, is_saved=True)
    if session.cfg.train.best is not None:
        scores.setdefault(session.cfg.train.best, math.nan)  # what is not finite is not logged
    with session.meter.pause():
        _is_best(session, progress, scores)
    progress.owes_evaluation = False
    return True


def _stop_if_asked(session: Session) -> None:
    """Raise Stopped on all ranks when one of them was asked to stop. A collective."""
    if int(distributed.total(torch.tensor(int(session.preemption.requested)))):
        raise Stopped


def _is_best(session: Session, progress: Progress, metrics: Mapping[str, float]) -> bool:
    """True when these scores are the best so far, which then becomes best/. A collective."""
    train = session.cfg.train
    if "valid/loss" in metrics:
        progress.plateau.update(metrics["valid/loss"], session.cfg.schedule)
    if train.best is None:
        return False
    if train.best not in metrics:
        raise ConfigError(
            f"train.best={train.best!r}: no such metric. {nearest(train.best, sorted(metrics))}"
        )
    value = metrics[train.best]
    progress.waited += 1
    if not math.isfinite(value):  # an infinite one would never be surpassed
        if distributed.is_main():
            logger.warning(
                "%s is %s at step %d: best/ stays as it is", train.best, value, progress.step
            )
        return False
    is_least = direction_of_best(train, progress) == "min"
    if progress.best is not None and (
        value >= progress.best if is_least else value <= progress.best
    ):
        return False
    progress.best, progress.best_step, progress.waited = value, progress.step, 0
    session.export_best()
    return True


def _scores(session: Session, step: int) -> dict[str, float]:
    """All metrics of the validation split; answers, if asked for, are also written down."""
    engine, task, valid, train = session.engine, session.task, session.valid, session.cfg.train
    batch = train.eval_batch or train.micro_batch
    stop = functools.partial(_stop_if_asked, session)
    scores = evaluate(engine, task, valid, batch=batch, stop=stop)
    if session.questions:
        assert isinstance(task, Answers), "first_questions() refuses a task that cannot answer"
        of_answers, answers = answer(engine, task, valid, session.questions, batch=batch, stop=stop)
        pairs = zip(session.questions, answers[:SHOWN_ANSWERS], strict=False)
        session.record.answers(
            step,
            [
                {"question": row["question"], "prediction": texts[0], "references": row["answers"]}
                for row, texts in pairs
            ],
        )
        scores |= of_answers
    return scores
