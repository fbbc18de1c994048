"""The validation split as the loop meets it: scored, logged, and the best weights so far kept."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import torch

from trainer.config.scores.direction import direction_of
from trainer.config.scores.judged import KEPT_LOSS, WORSE_SLICES
from trainer.data.content import rows_of
from trainer.data.mixed.store import parts_of
from trainer.data.token_store import store_of
from trainer.errors import ConfigError, nearest
from trainer.metrics import own
from trainer.protocol.abilities import Answers, Replies
from trainer.runtime import distributed
from trainer.runtime.distributed import on_main
from trainer.runtime.preemption import Stopped
from trainer.training.choice.best import (
    best_text,
    direction_of_best,
    refuse_absent,
    take_best,
    tell_old_direction,
)
from trainer.training.scoring import answer, evaluate, evaluate_rows, scores_of_answer
from trainer.verdict.judgement import FEWEST_ROWS

if TYPE_CHECKING:
    from trainer.config.scores.judged import Judging
    from trainer.data.token_store import TokenStore
    from trainer.protocol.task import Row, Task
    from trainer.training.session import Progress, Session, ValidSet

SHOWN_ANSWERS = 20  # rows of the table of answers, as published
_OF_JUDGE = {KEPT_LOSS, WORSE_SLICES}  # what a gate may name besides scores of the split


def refuse_unknown_best(session: Session, progress: Progress) -> None:
    """ConfigError, before the first step, when no evaluation will give the metric train.best, or
    nothing says which of its values is the best. Every rank calls it.

    The first rows are evaluated; all of them where that does not show the metric, for some metrics
    are named after what is in the rows. Nothing is logged, and random state stays.
    """
    train = session.cfg.train
    on_main(lambda: tell_old_direction(train, progress))
    if set(train.best_metrics) <= {"valid/loss"}:
        return
    batch = train.eval_batch or train.micro_batch
    names: set[str] = set()
    longest = max(len(rows.store) for rows in session.all_valid_sets().values())
    for count in (min(batch, longest), longest):
        with session.meter.pause():
            for split, rows in session.all_valid_sets().items():
                names |= {f"{split}/{name}" for name in _first_scores(session, rows, count, batch)}
        if names.issuperset(train.best_metrics):
            for metric in train.best_metrics:
                direction_of_best(train, progress, metric)
            return
    refuse_absent(train, dict.fromkeys(names))


def refuse_unknown_gate(session: Session) -> None:
    """ConfigError, before the first step, when the gate of `judge` names a score that no comparison
    will have by row, or nothing says which of its values is better. Every rank calls it.
    """
    how = session.cfg.judge
    asked = {} if how is None else {k: v for k, v in how.gate.items() if k not in _OF_JUDGE}
    if how is None or not asked:
        return
    train = session.cfg.train
    task: Any = session.task
    store: Any = store_of(task, how.split, task.places.cache_dir)
    rows_by_score = _rows_of_answers(task, store, how)
    if not set(asked) <= {"loss"}:
        rows = session.all_valid_sets()["valid"].store
        with session.meter.pause():
            batch = train.eval_batch or train.micro_batch
            first = min(batch, len(rows))
            _, sums = evaluate_rows(session.engine, task, rows, batch=batch, num_rows=first)
        rows_by_score = dict.fromkeys(sums, len(store)) | rows_by_score
    labels = {str(source) for source, _ in parts_of(store, len(store)) if source is not None}
    if isinstance(task, Answers):
        labels |= {row["dataset"] for row in rows_of(task, how.split)() if "dataset" in row}
    for label, name in product(labels, [*rows_by_score]):
        rows_by_score[f"{name}_{label}"] = rows_by_score[name]
    rows_by_score.setdefault("loss", len(store))
    for name, bound in asked.items():
        if name not in rows_by_score:
            raise ConfigError(
                f"judge.gate={name!r}: no such score by row. "
                f"{nearest(name, sorted({*rows_by_score, *_OF_JUDGE}))}"
            )
        if bound.gain is None:
            continue
        if (bound.best_is or direction_of(name)) is None:
            raise ConfigError(
                f"judge.gate={name!r}: got a gain and no best_is, and the name does not say "
                'whether lower or higher is better. Add "best_is": "min" or "max".'
            )
        refuse_few_rows(name, rows_by_score[name])


def refuse_few_rows(name: str, num_rows: int) -> None:
    """ConfigError for the gain of a score that too few rows have to show one."""
    if num_rows < FEWEST_ROWS:
        raise ConfigError(
            f"judge.gate={name!r}: {num_rows} rows have this score, and a gain needs "
            f"{FEWEST_ROWS} to be shown. Give the split more rows, or bound the score itself by "
            "at_least or at_most."
        )


def _rows_of_answers(task: Task, store: TokenStore, how: Judging) -> dict[str, int]:
    """How many rows of the split that is judged have each score of an answer; none without rows."""
    count = 0
    if isinstance(task, Answers):
        count = len(store)
    elif isinstance(task, Replies):
        replied = (row for row in range(len(store)) if task.reply_row(store[row]) is not None)
        count = len([*islice(replied, how.answers)])
    return dict.fromkeys(scores_of_answer(task, "a", ["a"]), count) if count else {}


def _first_scores(session: Session, rows: ValidSet, count: int, batch: int) -> dict[str, float]:
    """Every metric over the first `count` rows of a validation set, or all of them."""
    task, store = session.task, rows.store
    num_rows = min(count, len(store))
    how: dict[str, Any] = {"batch": batch, "place": session.sharding.place}
    scores = evaluate(session.engine, task, store, num_rows=num_rows, **how)
    questions = rows.questions[:count]
    if questions and isinstance(task, Answers):
        of_answers, answers = answer(session.engine, task, store, questions, batch=batch)
        scores |= of_answers | _own_scores(session, answers, questions)
    return scores


def evaluate_and_keep_best(session: Session, progress: Progress, *, is_saved: bool) -> bool:
    """Evaluate the present step, and save the weights if they are the best so far. False when a
    signal ended the evaluation: a checkpoint then says that it is owed, and a resumed run begins
    with it.

    is_saved: a checkpoint of this step is there already.
    """
    try:
        with session.meter.pause():
            improved = _is_best(session, progress, _every_score(session, progress))
    except Stopped:
        if not is_saved:
            session.save(progress)
        return False
    progress.owes_evaluation = False
    if improved and not is_saved:
        session.save(progress)
    return True


def settled(session: Session, progress: Progress) -> bool | None:
    """Do what an earlier attempt left to do: an evaluation that it owed, and the end of a run that
    has waited long enough or has used up its time. What fit() returns then; None: it goes on. A
    collective.
    """
    if progress.owes_evaluation and not pay_evaluation(session, progress):
        return False
    is_between = 0 < progress.step < session.cfg.train.steps
    if session.budget is not None and is_between and on_main(session.is_out_of_time):
        progress.is_out_of_time = True
    return ended(session, progress, is_saved=True)


def ended(session: Session, progress: Progress, *, is_saved: bool) -> bool | None:
    """True when the run ends at this step before its last one, for want of a better evaluation or
    of time; False when a signal ended the evaluation that it owed; None: it goes on. A collective.

    is_saved: a checkpoint of this step is there already.
    """
    if session.has_waited(progress):
        end_early(session, progress, is_saved=is_saved)
        return True
    return end_in_time(session, progress) if progress.is_out_of_time else None


def evaluate_pause(session: Session, progress: Progress) -> bool:
    """Evaluate the step at which --until stops the run, unless it has been evaluated already. False
    when a signal ended the evaluation: the next start with that --until makes it.

    It changes neither best/ nor train.patience nor the learning rate, so that the run goes on as if
    it had never stopped. A collective.
    """
    if distributed.on_main(lambda: session.record.logged_scores(progress.step)) is None:
        try:
            with session.meter.pause():
                _every_score(session, progress)
        except Stopped:
            return False
    session.record.end_early(
        f"step {progress.step} of {session.cfg.train.steps} is where --until stops it: it goes on "
        "with a later --until, or with none"
    )
    return True


def _every_score(session: Session, progress: Progress) -> dict[str, float]:
    """The metrics of the present step on every validation set, which are logged and recorded. A
    collective.
    """
    metrics: dict[str, float] = {}
    with session.engine.averaged():
        for split, rows in session.all_valid_sets().items():
            scores = _scores(session, rows, progress.step if split == "valid" else None)
            metrics |= {f"{split}/{name}": value for name, value in scores.items()}
    session.record.log(progress.step, **metrics)
    session.record.score(progress.step, **metrics)
    return metrics


def end_early(session: Session, progress: Progress, *, is_saved: bool) -> None:
    """End a run that has waited long enough for a better evaluation. A collective.

    is_saved: a checkpoint of this step is there already.
    """
    if not is_saved:
        session.save(progress)
    train = session.cfg.train
    text = (
        f"step {progress.step} of {train.steps} is the last: train.patience={train.patience} "
        f"evaluations in a row had no better {' and '.join(train.best_metrics)} than "
        f"{best_text(train, progress)}"
    )
    session.record.end_early(text)


def end_in_time(session: Session, progress: Progress) -> bool:
    """End a run whose time is used up (train.hours), at a step that was saved: evaluate it, if that
    is not done. False when a signal ended the evaluation. A collective.
    """
    if on_main(lambda: session.record.logged_scores(progress.step) is None):
        progress.owes_evaluation = True
    if progress.owes_evaluation and not pay_evaluation(session, progress):
        return False
    assert session.budget is not None, "without it no time is used up"
    session.record.end_early(session.budget.text(progress.step, session.cfg.train.steps))
    return True


def pay_evaluation(session: Session, progress: Progress) -> bool:
    """Do what evaluate_and_keep_best does, for a step that an earlier attempt saved but did not
    finish evaluating. Scores that the attempt has logged already are used.
    """
    scores = on_main(lambda: session.record.logged_scores(progress.step))
    if scores is None:
        return evaluate_and_keep_best(session, progress, is_saved=True)
    for metric in session.cfg.train.best_metrics:
        scores.setdefault(metric, math.nan)  # what is not finite is not logged
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
    if "valid/loss" in metrics:
        progress.plateau.update(metrics["valid/loss"], session.cfg.schedule)
    is_best = take_best(session.cfg.train, progress, metrics)
    if is_best:
        session.export_best()
    return is_best


def _scores(session: Session, rows: ValidSet, step: int | None) -> dict[str, float]:
    """All metrics of a validation set. step: under which the first answers, if asked for, are
    written down; None: they are not.
    """
    engine, task, train = session.engine, session.task, session.cfg.train
    batch = train.eval_batch or train.micro_batch
    stop = functools.partial(_stop_if_asked, session)
    how: dict[str, Any] = {"batch": batch, "stop": stop}
    scores = evaluate(engine, task, rows.store, place=session.sharding.place, **how)
    if not rows.questions:
        return scores
    assert isinstance(task, Answers), "first_questions() refuses a task that cannot answer"
    of_answers, answers = answer(engine, task, rows.store, rows.questions, **how)
    pairs = zip(rows.questions, answers[:SHOWN_ANSWERS], strict=False)
    if step is not None:
        session.record.answers(
            step,
            [
                {"question": row["question"], "prediction": texts[0], "references": row["answers"]}
                for row, texts in pairs
            ],
        )
    return scores | of_answers | _own_scores(session, answers, rows.questions)


def _own_scores(
    session: Session, answers: Sequence[list[str]], questions: Sequence[Row]
) -> dict[str, float]:
    """The user's own metrics of these answers, computed on rank 0. A collective."""
    if not session.cfg.own_metrics:
        return {}
    predictions = [texts[0] for texts in answers]
    return on_main(lambda: own.scores(session.own_metrics, predictions, questions))
