"""The step loop: count units, run the task's losses, step, log, evaluate, save, stop if asked."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.config.schema import Experiment
from trainer.data.order import Sharding, StepBatches, windows
from trainer.errors import ConfigError, DivergedError, nearest
from trainer.protocol.abilities import Answers
from trainer.runtime import distributed
from trainer.runtime.batch import (
    HostCopy,
    OnDevice,
    name_batch_when_out_of_memory,
    numbers_on_device,
)
from trainer.runtime.preemption import Stopped
from trainer.survival import lifeline
from trainer.telemetry.chain import StepChain
from trainer.training import schedule
from trainer.training.bad_steps import BadSteps, RolledBack, SkippedSteps, Trouble
from trainer.training.schedule import Plateau
from trainer.training.scoring import answer, evaluate

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore
    from trainer.protocol.task import Row, Task
    from trainer.runtime.preemption import Preemption
    from trainer.survival.mirror import Mirror
    from trainer.telemetry.meter import Meter
    from trainer.telemetry.run_record import RunRecord
    from trainer.training.engine import Engine

SHOWN_ANSWERS = 20  # rows of the table of answers, as published


@dataclass(frozen=True)
class Cadence:
    """Every how many steps the loop logs, evaluates and saves."""

    log: int
    evaluate: int
    save: int
    is_first_logged: bool = False  # the first step has a line in metrics.jsonl whatever `log` says


@dataclass
class Progress:
    """What the loop remembers between steps; saved with every checkpoint."""

    step: int = 0  # optimizer steps done
    units: int = 0  # units trained on so far
    best: float | None = None
    best_step: int = 0
    owes_evaluation: bool = False  # that of this step is not done: a save comes before it
    plateau: Plateau = field(default_factory=Plateau)
    skipped: SkippedSteps = field(default_factory=SkippedSteps)
    bad: BadSteps = field(default_factory=BadSteps)
    links: list[str] = field(default_factory=list[str])  # of the chain, by rank (chain.py)

    def state(self) -> dict[str, Any]:
        own = {"plateau": self.plateau.state(), "skipped": self.skipped.state()}
        return {**self.__dict__, **own, "bad": self.bad.state()}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Progress:
        # older checkpoints have neither of these
        skipped, bad = SkippedSteps(**state.get("skipped", {})), BadSteps(**state.get("bad", {}))
        own = {"plateau": Plateau.of(state["plateau"]), "skipped": skipped, "bad": bad}
        return cls(**{**state, **own})


@dataclass(frozen=True)
class Session:
    """Everything one run of the loop needs."""

    cfg: Experiment
    task: Task
    engine: Engine
    train: TokenStore
    valid: TokenStore
    sharding: Sharding
    cadence: Cadence
    run: RunRecord
    meter: Meter
    preemption: Preemption
    save: Callable[[Progress], None]  # a checkpoint of the present state; a collective
    export_best: Callable[[], None]  # the present weights as best/; a collective
    log_gradients: bool = False
    # the first validation rows, answered by generation at each evaluation
    questions: Sequence[Row] = ()
    left_out: Mapping[int, str] = field(default_factory=dict[int, str])  # by rollbacks: step, why
    chain: StepChain = field(default_factory=StepChain)  # what proves the steps, from here on
    mirror: Mirror | None = None  # of a run that survives its ranks
    roll_back: Callable[[int, Trouble], None] | None = None  # leaves a window out; a collective

    @property
    def is_judged(self) -> bool:
        """Whether the loss of every step is looked at before it updates anything."""
        return self.cfg.train.on_bad_step != "stop" or self.cfg.train.spike_z is not None


@dataclass(frozen=True)
class Step:
    """One optimizer step as the log sees it."""

    # () fp64, this rank's part of the mean: the sum over ranks is the number that was optimised
    loss: Tensor
    units: int  # over all ranks
    stop: bool  # some rank was asked to stop
    diverged: bool  # some rank's previous step was not sound
    # () bool: this rank's loss is finite, and so is the gradient unless the update was left out
    is_sound: Tensor
    trouble: Trouble | None = None  # why this update was left out, of a run that looks


def fit(session: Session, progress: Progress, *, until: int | None = None) -> bool:
    """Train from `progress` to the end, or to step `until`. True when that is reached, False when
    preempted (a checkpoint is saved).

    Raises DivergedError when the loss or the gradient norm stops being finite and that stops the
    run, or when fp16's loss scale leaves out too many updates; earlier checkpoints stay. RolledBack
    when a run goes back to its last checkpoint.
    """
    session.engine.leaves_out_unsound = session.is_judged
    cfg, steps = session.cfg.train, session.cfg.train.steps
    source = windows(
        session.train,
        session.task,
        session.sharding,
        seed=cfg.seed,
        start_step=progress.step,
        stop_step=min(steps, until or steps),
        is_shuffled=cfg.order == "shuffled",
    )
    bad = torch.zeros((), dtype=torch.int64, device=distributed.device())
    session.engine.train()
    if progress.owes_evaluation and not _pays_evaluation(session, progress):
        source.close()
        return False
    for window in source:
        rate = session.cfg.optim.lr * schedule.factor(session.cfg.schedule, window.step, steps)
        log_now = _due(window.step + 1, session.cadence.log, steps) or (
            window.step == 0 and session.cadence.is_first_logged
        )
        with session.meter.stepping():
            step = train_step(
                session,
                window,
                lr=rate * progress.plateau.factor,
                bad=bad,
                watch=session.log_gradients and log_now,
                progress=progress,
            )
        progress.step = window.step + 1
        progress.units += 0 if step.trouble else step.units
        session.meter.add(step.units)
        norm = math.nan if step.trouble else session.engine.norm()
        session.chain.add(progress.step, window.rows, step.loss, norm)
        session.run.move(progress.step)
        bad = (~step.is_sound).long()
        if step.diverged:
            raise _diverged("loss or gradient norm", float("nan"), progress.step - 1, window)
        if step.trouble:
            _treat(session, progress, step.trouble, window)
        else:
            _count_skipped(session, progress, window)
        evaluate_now = _due(progress.step, session.cadence.evaluate, steps)
        save_now = step.stop or _due(progress.step, session.cadence.save, steps)
        lifeline.moved(progress.step, is_stepping=not (evaluate_now or save_now))
        if log_now or evaluate_now or save_now:
            loss = _sound_loss(session, step, progress, window)
            if log_now:
                _log(session, progress, step, loss, rate * progress.plateau.factor)
        elif progress.step == 1:
            session.run.say(1, loss=_sound_loss(session, step, progress, window), lr=rate)
        progress.owes_evaluation = evaluate_now
        if save_now:
            session.save(progress)
        if (evaluate_now and not _evaluated(session, progress, is_saved=save_now)) or (
            step.stop and progress.step < steps
        ):
            source.close()
            return False
        _keep(session, progress)
    return True


def _keep(session: Session, progress: Progress) -> None:
    """The end of a step, for a run that survives its ranks: what they would go on from."""
    if session.mirror is not None:
        session.mirror.keep(session.engine, progress, session.chain)
        lifeline.moved(progress.step, is_stepping=progress.step < session.cfg.train.steps)


def train_step(
    session: Session,
    window: StepBatches,
    *,
    lr: float,
    bad: Tensor,
    progress: Progress | None = None,
    watch: bool = False,
) -> Step:
    """Run one window through the task's losses and update once, unless the loss says not to.

    Every yielded loss is a sum, divided here by the units of all micro-batches on all ranks: the
    gradient is that of one mean, whatever the padding, the accumulation or the world size. The stop
    flag and the previous loss's verdict ride in the same all-reduce, so that all ranks act on them
    at the same step.
    """
    engine, device = session.engine, distributed.device()
    asked = numbers_on_device([int(window.units), int(session.preemption.requested), 0])
    asked[2] = bad
    counts = distributed.total(asked)
    host = HostCopy(counts)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    if window.step + 1 in session.left_out:
        units, stop, diverged = host.read()
        again = Trouble(session.left_out[window.step + 1], math.nan, is_rolled_back=True)
        return Step(loss, units, stop > 0, diverged > 0, torch.isfinite(loss), again)
    with name_batch_when_out_of_memory(window.batches):
        for summed in session.task.losses(engine.model, OnDevice(window.batches)):
            mean = summed / counts[0]
            engine.backward(mean)
            loss += mean.detach()
    trouble = None
    if session.is_judged:
        assert progress is not None, "a loss is judged by those before"
        trouble = progress.bad.judge(float(distributed.total(loss)), session.cfg.train)
    if trouble:
        engine.leave_out()
    else:
        with session.meter.updating():
            engine.step(
                lr, (lambda named: session.run.gradients(window.step + 1, named)) if watch else None
            )
        if session.is_judged and engine.step_was_skipped() and engine.loss_scale() is None:
            trouble = Trouble("gradient", math.nan)
    is_sound = torch.isfinite(loss)
    if not engine.step_was_skipped():
        is_sound = is_sound & engine.has_finite_gradient()
    units, stop, diverged = host.read()
    return Step(
        loss,
        units,
        stop=stop > 0,
        diverged=diverged > 0,
        is_sound=is_sound if trouble is None else torch.ones_like(is_sound),
        trouble=trouble,
    )


def refuse_unknown_best(session: Session) -> None:
    """ConfigError, before the first step, when no evaluation will give the metric train.best. Every
    rank calls it.

    The first rows are evaluated; all of them where that does not show the metric, for some metrics
    are named after what is in the rows. Nothing is logged, and random state stays.
    """
    best, task, valid = session.cfg.train.best, session.task, session.valid
    if best in (None, "valid/loss"):
        return
    batch = session.cfg.train.eval_batch or session.cfg.train.micro_batch
    names: set[str] = set()
    for count in (min(batch, len(valid)), len(valid)):
        with session.meter.pause():
            scores = evaluate(session.engine, task, valid, batch=batch, num_rows=count)
            asked = session.questions[:count]
            if asked and isinstance(task, Answers):
                scores |= answer(session.engine, task, valid, asked, batch=batch)[0]
        names |= {f"valid/{name}" for name in scores}
        if best in names:
            return
    raise ConfigError(f"train.best={best!r}: no such metric. {nearest(str(best), sorted(names))}")


def _evaluated(session: Session, progress: Progress, *, is_saved: bool) -> bool:
    """Evaluate a step that owes it, and save the best so far. False when a signal ended the
    evaluation: a checkpoint that owes it is there, and a resumed run begins with it.

    is_saved: there is a checkpoint of this step, which a run that ends here goes on from.
    """
    try:
        with session.meter.pause():
            improved = _is_best(session, progress, _evaluate(session, progress.step))
    except Stopped:
        if not is_saved:
            session.save(progress)
        return False
    progress.owes_evaluation = False
    if improved and not is_saved:
        session.save(progress)
    return True


def _pays_evaluation(session: Session, progress: Progress) -> bool:
    """What _evaluated does, of a step that an earlier attempt saved: if it went on to log the
    scores, they are taken.
    """
    known = distributed.on_main(lambda: session.run.logged_scores(progress.step))
    if known is None:
        return _evaluated(session, progress, is_saved=True)
    if session.cfg.train.best is not None:
        known.setdefault(session.cfg.train.best, math.nan)  # what is not finite is not logged
    with session.meter.pause():
        _is_best(session, progress, known)
    progress.owes_evaluation = False
    return True


def _stop_if_asked(session: Session) -> None:
    """Raise Stopped on all ranks when one of them was asked to stop. A collective."""
    if int(distributed.total(torch.tensor(int(session.preemption.requested)))):
        raise Stopped


def _evaluate(session: Session, step: int) -> dict[str, float]:
    """Score the validation split and log it."""
    scores = _scores(session, step)
    named = {f"valid/{name}": value for name, value in scores.items()}
    session.run.log(step, **named)
    session.run.score(step, **named)
    return named


def _is_best(session: Session, progress: Progress, named: Mapping[str, float]) -> bool:
    """True when these scores are the best so far, which then becomes best/. A collective."""
    train = session.cfg.train
    if "valid/loss" in named:
        progress.plateau.update(named["valid/loss"], session.cfg.schedule)
    if train.best is None:
        return False
    if train.best not in named:
        raise ConfigError(
            f"train.best={train.best!r}: no such metric. {nearest(train.best, sorted(named))}"
        )
    value = named[train.best]
    if math.isnan(value):
        return False
    if progress.best is not None and (
        value >= progress.best if train.best_is == "min" else value <= progress.best
    ):
        return False
    progress.best, progress.best_step = value, progress.step
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
        shown = zip(session.questions, answers[:SHOWN_ANSWERS], strict=False)
        session.run.answers(
            step,
            [
                {"question": row["question"], "prediction": texts[0], "references": row["answers"]}
                for row, texts in shown
            ],
        )
        scores |= of_answers
    return scores


def _treat(session: Session, progress: Progress, trouble: Trouble, window: StepBatches) -> None:
    """Count a step whose update was left out and say so. DivergedError when the run stops at it,
    RolledBack when it goes back to before it.
    """
    train = session.cfg.train
    progress.bad.count(progress.step, trouble, train, rows=_first_rows(window))
    if train.on_bad_step == "rollback" and not trouble.is_rolled_back:
        assert session.roll_back is not None, "run() gives it"
        session.roll_back(progress.step, trouble)
        raise RolledBack
    session.run.bad_step(progress.step, trouble.kind, progress.bad.steps, trouble.numbers())


def _count_skipped(session: Session, progress: Progress, window: StepBatches) -> None:
    """DivergedError for an update that was left out and is not coming back: in fp16 too many, in
    other precisions one.

    DeepSpeed leaves an update out whenever a gradient is not finite, in bf16 and fp32 too, where
    nothing would change.
    """
    scale, is_skipped = session.engine.loss_scale(), session.engine.step_was_skipped()
    if scale is not None:
        now, least = scale
        progress.skipped.count(is_skipped=is_skipped, scale=now, least=least)
        progress.skipped.refuse_too_many(progress.step, last=session.cfg.train.steps, scale=now)
    elif is_skipped:
        raise _diverged("gradient norm", float("nan"), progress.step, window)


def _sound_loss(session: Session, step: Step, progress: Progress, window: StepBatches) -> float:
    """The loss over all ranks.

    DivergedError when the step was not sound: it is neither logged, scored nor saved.
    """
    loss, norm = float(distributed.total(step.loss)), session.engine.grad_norm()
    if step.trouble:
        return math.nan if step.trouble.is_rolled_back else loss
    if not math.isfinite(loss):
        raise _diverged("loss", loss, progress.step, window)
    if not math.isfinite(norm) and not session.engine.step_was_skipped():
        raise _diverged("gradient norm", norm, progress.step, window)
    return loss


def _log(session: Session, progress: Progress, step: Step, loss: float, lr: float) -> None:
    scalars: dict[str, float | int] = {"loss": loss, "lr": lr, session.task.unit: progress.units}
    if step.trouble is None and not session.engine.step_was_skipped():
        scalars["grad_norm"] = session.engine.grad_norm()
    if progress.bad.steps:
        scalars["bad_steps"] = len(progress.bad.steps)
    scale = session.engine.loss_scale()
    if scale is not None:
        scalars |= {"loss_scale": scale[0], "skipped_steps": progress.skipped.total}
    session.run.prove(session.chain.proof())
    session.run.log(progress.step, **scalars, **session.meter.read(session.task.unit))


def _diverged(what: str, value: float, step: int, window: StepBatches) -> DivergedError:
    return DivergedError(
        f"{what} is {value} at step {step} ({_first_rows(window)}).\n"
        "The last good checkpoint is kept. Look at these rows; lower optim.lr, lengthen the "
        "warm-up, or clip harder (optim.clip)."
    )


def _first_rows(window: StepBatches) -> str:
    first = (str(int(row)) for rows in window.rows for row in rows[:4])
    return f"this rank's rows of that window begin with {', '.join(first)}"


def _due(step: int, every: int, last: int) -> bool:
    return step % every == 0 or step == last
