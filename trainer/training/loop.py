"""The step loop: train on one window after another, then log, save, evaluate or stop where due."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from trainer.data.order import StepBatches, windows
from trainer.errors import DataError, DivergedError
from trainer.runtime import distributed
from trainer.runtime.batch import (
    HostCopy,
    OnDevice,
    name_batch_when_out_of_memory,
    numbers_on_device,
)
from trainer.training import schedule
from trainer.training.bad_steps import RolledBack, Trouble
from trainer.training.session import Due, Moved
from trainer.training.validation import ended, evaluate_and_keep_best, settled

if TYPE_CHECKING:
    from trainer.training.session import Progress, Session


T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """One optimizer step as the log sees it."""

    # () fp64, this rank's part of the mean: the sum over ranks is the number that was optimised
    loss: Tensor
    units: int  # over all ranks
    stop: bool  # some rank was asked to stop
    diverged: bool  # some rank's previous step was not sound
    is_last: bool  # rank 0 says that the time is used up
    # () bool: this rank's loss is finite, and so is the gradient unless the update was left out
    is_sound: Tensor
    trouble: Trouble | None = None  # why this update was left out, of a run that looks


def fit(session: Session, progress: Progress, *, until: int | None = None) -> bool:
    """Train from `progress` to the end, as steps() does."""
    return to_end(steps(session, progress, until=until))


def to_end(course: Generator[StepBatches, StepBatches, T]) -> T:
    """What a course of steps returns, every step of it made with the window that it gives."""
    with contextlib.closing(course):
        try:
            window = next(course)
            while True:
                window = course.send(window)
        except StopIteration as end:
            return end.value


def steps(
    session: Session, progress: Progress, *, until: int | None = None
) -> Generator[StepBatches, StepBatches, bool]:
    """Train from `progress` to the end, or to step `until` (else the session's own, which is also
    saved). True when that is reached, False when preempted (a checkpoint is saved).

    It yields each window, and makes the step with the one that is sent. Raises DivergedError when
    the loss or gradient norm stops being finite and that stops the run, or fp16's loss scale leaves
    out too many updates; earlier checkpoints stay. RolledBack when it goes back to the last one.
    """
    last = session.cfg.train.steps
    session.engine.leaves_out_unsound = session.is_judged
    session.engine.train()
    unsound_before = torch.zeros((), dtype=torch.int64, device=distributed.device())
    previous: StepBatches | None = None
    with contextlib.closing(_windows(session, progress, until or session.until)) as source:
        if (end := settled(session, progress)) is not None:
            return end  # an earlier attempt came so far
        for window in source:
            window = yield window
            due = session.cadence.due(window.step + 1, last)
            lr = _rate(session, progress, window.step)
            with session.meter.stepping():
                step = train_step(
                    session,
                    window,
                    lr=lr,
                    unsound_before=unsound_before,
                    watch=session.log_gradients and due.log,
                    progress=progress,
                    is_last=session.is_out_of_time(),
                )
            _count(session, progress, step, window)
            if step.diverged:  # the verdict on a step comes with the counts of the next one
                raise _divergence("loss or gradient norm", math.nan, progress.step - 1, previous)
            unsound_before, previous = (~step.is_sound).long(), window
            if step.trouble:
                _treat(session, progress, step.trouble, window)
            else:
                _count_skipped(session, progress, step, window)
            if step.is_last and progress.step < last:
                due, progress.is_out_of_time = Due(log=True, evaluation=True, save=True), True
            saves = step.stop or due.save or progress.step == session.until
            session.report(Moved(progress.step, is_stepping=not (due.evaluation or saves)))
            if due.log or due.evaluation or saves or progress.step == 1:
                loss = _sound_loss(session, step, progress, window)
                if due.log:
                    _log(session, progress, step, loss, lr)
                elif progress.step == 1:
                    session.record.say(1, loss=loss, lr=lr)
            progress.owes_evaluation = due.evaluation
            if saves:
                session.save(progress)
            if due.evaluation and not evaluate_and_keep_best(session, progress, is_saved=saves):
                return False
            if due.evaluation and (end := ended(session, progress, is_saved=saves)) is not None:
                return end
            if step.stop and progress.step < last:
                return False
            session.after_step(session.engine, progress)
    return True


def _windows(
    session: Session, progress: Progress, until: int | None
) -> Generator[StepBatches, None, None]:
    """The rows of every step that is left."""
    train = session.cfg.train
    return windows(
        session.train,
        session.task,
        session.sharding,
        seed=train.seed,
        start_step=progress.step,
        stop_step=min(train.steps, until or train.steps),
        is_shuffled=train.order == "shuffled",
    )


def _rate(session: Session, progress: Progress, step: int) -> float:
    """The learning rate of a 0-based step."""
    cfg = session.cfg
    factor = schedule.factor(cfg.schedule, step, cfg.train.steps)
    return cfg.optim.lr * factor * progress.plateau.factor


def _count(session: Session, progress: Progress, step: Step, window: StepBatches) -> None:
    """Add a step to the progress, the speed and the chain of proofs."""
    progress.step = window.step + 1
    if not step.trouble:
        progress.units += step.units
        session.sums.count()
    session.meter.add(step.units)
    norm = math.nan if step.trouble else session.engine.norm()
    session.chain.add(progress.step, window.rows, step.loss, norm)
    session.record.move(progress.step)


def train_step(
    session: Session,
    window: StepBatches,
    *,
    lr: float,
    unsound_before: Tensor,
    progress: Progress | None = None,
    watch: bool = False,
    is_last: bool = False,
) -> Step:
    """Run one window through the task's losses and update once, unless the loss says not to.

    Every yielded loss is a sum, divided here by the units of all micro-batches on all ranks: the
    gradient is that of one mean, whatever the padding, the accumulation or the world size. The stop
    flag, the previous loss's verdict and rank 0's clock (is_last) ride in the same all-reduce, so
    that all ranks act on them at the same step.
    """
    engine, number = session.engine, window.step + 1
    own_flags = [session.preemption.requested, False, is_last and distributed.is_main()]
    own_counts = numbers_on_device([int(window.units), *map(int, own_flags)])
    own_counts[2] = unsound_before
    counts = distributed.total(own_counts)
    host = HostCopy(counts)
    loss = torch.zeros((), dtype=torch.float64, device=distributed.device())
    if number in session.rolled_back:
        units, stop, diverged, last = host.read()
        trouble = Trouble(session.rolled_back[number], math.nan, is_rolled_back=True)
        return Step(loss, units, stop > 0, diverged > 0, last > 0, torch.isfinite(loss), trouble)
    engine.begin(number)
    with name_batch_when_out_of_memory(window.batches), session.sums.adding(window.sources):
        for summed in session.task.losses(engine.model, OnDevice(window.batches)):
            mean = summed / counts[0]
            engine.backward(mean)
            loss += mean.detach()
    trouble = None
    if session.is_judged:
        assert progress is not None, "a loss is judged by those before"
        total = float(distributed.total(loss))
        trouble = progress.bad.judge(total, session.cfg.train)
    if trouble:
        engine.leave_out()
    else:
        with session.meter.updating():
            engine.step(
                lr, (lambda norms: session.record.gradients(number, norms)) if watch else None
            )
        if session.is_judged and engine.step_was_skipped() and engine.loss_scale() is None:
            trouble = Trouble("gradient", math.nan)
    is_sound = torch.isfinite(loss)
    if not engine.step_was_skipped():
        is_sound = is_sound & engine.has_finite_gradient()
    units, stop, diverged, last = host.read()
    leaves_out = trouble is not None and session.cfg.train.on_bad_step != "stop"
    if units == 0 and not (leaves_out or diverged):
        raise _no_label(number, window)
    return Step(
        loss,
        units,
        stop=stop > 0,
        diverged=diverged > 0,
        is_last=last > 0,
        is_sound=is_sound if trouble is None else torch.ones_like(is_sound),
        trouble=trouble,
    )


def _no_label(step: int, window: StepBatches) -> DataError:
    """The loss of a step is over nothing, on all ranks together."""
    return DataError(
        f"step {step}: no row of its global batch has a label left ({_first_rows(window)}).\n"
        "The loss is a mean over labels, and there are none. Raise the limit that cuts them "
        "off (`python -m trainer stats` counts what limits cut), take such rows out, or use a "
        "larger train.global_batch."
    )


def _treat(session: Session, progress: Progress, trouble: Trouble, window: StepBatches) -> None:
    """Count a step whose update was left out and say so. DivergedError when the run stops at it,
    RolledBack when it goes back to before it.
    """
    train = session.cfg.train
    _blame_base(session, progress)
    progress.bad.count(progress.step, trouble, train, rows=_first_rows(window))
    if train.on_bad_step == "rollback" and not trouble.is_rolled_back:
        assert session.roll_back is not None, "launch/start.py gives it"
        session.roll_back(progress.step, trouble)
        raise RolledBack
    session.record.bad_step(progress.step, trouble.kind, progress.bad.steps, trouble.numbers())


def _blame_base(session: Session, progress: Progress) -> None:
    """ConfigError when no update was made yet, and weights that the run began with are not
    finite. A collective.
    """
    if progress.step - 1 <= len(progress.bad.steps) + progress.skipped.total:
        session.refuse_unsound_base()


def _count_skipped(session: Session, progress: Progress, step: Step, window: StepBatches) -> None:
    """DivergedError for an update that was left out and is not coming back: in fp16 too many, in
    other precisions one.

    DeepSpeed leaves an update out whenever a gradient is not finite, in bf16 and fp32 too, where
    nothing would change.
    """
    scale, is_skipped = session.engine.loss_scale(), session.engine.step_was_skipped()
    if scale is not None:
        now, least = scale
        if progress.step == 1 and is_skipped and not distributed.total(step.loss).isfinite():
            _blame_base(session, progress)
        progress.skipped.count(is_skipped=is_skipped, scale=now, least=least)
        progress.skipped.refuse_too_many(progress.step, last=session.cfg.train.steps, scale=now)
    elif is_skipped:
        _blame_base(session, progress)
        raise _divergence("gradient norm", float("nan"), progress.step, window)


def _sound_loss(session: Session, step: Step, progress: Progress, window: StepBatches) -> float:
    """The loss over all ranks.

    DivergedError when the step was not sound: it is neither logged, scored nor saved.
    """
    loss, norm = float(distributed.total(step.loss)), session.engine.grad_norm()
    if step.trouble:
        return math.nan if step.trouble.is_rolled_back else loss
    if not math.isfinite(loss):
        _blame_base(session, progress)
        raise _divergence("loss", loss, progress.step, window)
    if not math.isfinite(norm) and not session.engine.step_was_skipped():
        raise _divergence("gradient norm", norm, progress.step, window)
    return loss


def _log(session: Session, progress: Progress, step: Step, loss: float, lr: float) -> None:
    scalars: dict[str, float | int] = {"loss": loss, "lr": lr, session.task.unit: progress.units}
    if step.trouble is None and not session.engine.step_was_skipped():
        scalars["grad_norm"] = session.engine.grad_norm()
    if progress.bad.steps:
        scalars["bad_steps"] = len(progress.bad.steps)
    scalars |= {**session.sums.read(), **session.epochs_of_sources(progress.step)}
    scale = session.engine.loss_scale()
    if scale is not None:
        scalars |= {"loss_scale": scale[0], "skipped_steps": progress.skipped.total}
    session.record.prove(session.chain.proof())
    session.record.log(progress.step, **scalars, **session.meter.read(session.task.unit))


def _divergence(what: str, value: float, step: int, window: StepBatches | None) -> DivergedError:
    rows = "its rows are not known" if window is None else _first_rows(window)
    return DivergedError(
        f"{what} is {value} at step {step} ({rows}).\n"
        "The last good checkpoint is kept. Look at these rows; lower optim.lr, lengthen the "
        "warm-up, or clip harder (optim.clip)."
    )


def _first_rows(window: StepBatches) -> str:
    first = (str(int(row)) for rows in window.rows for row in rows[:4])
    return f"this rank's rows of that window begin with {', '.join(first)}"
