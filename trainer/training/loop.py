"""The step loop: count units, run the task's losses, step, log, evaluate, save, stop when
asked to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trainer.config import Experiment, nearest
from trainer.data.order import Sharding, Window, evaluation_batches, windows
from trainer.data.token_store import TokenStore
from trainer.errors import ConfigError, DivergedError
from trainer.evaluation.mergeable import Pool, Ratio, scores_by_dataset
from trainer.runtime import distributed, rng
from trainer.tasks.abilities import GREEDY, Answers, Search, question_of
from trainer.tasks.protocol import Batch, Row, Task
from trainer.telemetry.meter import Meter
from trainer.telemetry.run_record import Preemption, Run
from trainer.training import schedule
from trainer.training.engine import Engine
from trainer.training.schedule import Plateau
from trainer.training.skipped_steps import SkippedSteps

SHOWN_ANSWERS = 20  # rows of the table of answers, as published


@dataclass(frozen=True)
class Cadence:
    """Every how many steps the loop logs, evaluates and saves."""

    log: int
    evaluate: int
    save: int


@dataclass
class Progress:
    """What the loop remembers between steps; saved with every checkpoint."""

    step: int = 0  # optimizer steps done
    units: int = 0  # units trained on so far
    best: float | None = None
    best_step: int = 0
    plateau: Plateau = field(default_factory=Plateau)
    skipped: SkippedSteps = field(default_factory=SkippedSteps)

    def state(self) -> dict[str, Any]:
        return {**self.__dict__, "plateau": self.plateau.state(), "skipped": self.skipped.state()}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Progress:
        skipped = SkippedSteps(**state.get("skipped", {}))  # older checkpoints have none
        return cls(**{**state, "plateau": Plateau.of(state["plateau"]), "skipped": skipped})


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
    run: Run
    meter: Meter
    preemption: Preemption
    save: Callable[[Progress], None]  # a checkpoint of the present state; a collective
    export_best: Callable[[], None]  # the present weights as best/; a collective
    log_gradients: bool = False
    questions: Sequence[
        Row
    ] = ()  # the first validation rows, answered by generation at each evaluation


@dataclass(frozen=True)
class Frozen:
    """A model that is only evaluated, in place of an engine."""

    model: nn.Module

    def train(self) -> None:
        """Nothing: it stays in evaluation mode."""

    def eval(self) -> None:
        self.model.eval()


@dataclass(frozen=True)
class Step:
    """One optimizer step as the log sees it."""

    # () fp64, this rank's part of the mean: the sum over ranks is the number that was optimised
    loss: Tensor
    units: int  # over all ranks
    stop: bool  # some rank was asked to stop
    diverged: bool  # some rank's previous step was not sound
    # () bool: this rank's loss is finite, and so is the gradient unless fp16 left it out
    is_sound: Tensor


def fit(session: Session, progress: Progress) -> bool:
    """Train from `progress` to the end. True when all steps are done, False when preempted (a
    checkpoint is saved).

    Raises DivergedError when the loss or the gradient norm stops being finite, or when fp16's loss
    scale leaves out too many updates; earlier checkpoints stay.
    """
    cfg, steps = session.cfg.train, session.cfg.train.steps
    source = windows(
        session.train,
        session.task,
        session.sharding,
        seed=cfg.seed,
        start_step=progress.step,
        stop_step=steps,
        is_shuffled=cfg.order == "shuffled",
    )
    bad = torch.zeros((), dtype=torch.int64, device=distributed.device())
    session.engine.train()
    for window in source:
        rate = session.cfg.optim.lr * schedule.factor(session.cfg.schedule, window.step, steps)
        log_now = _due(window.step + 1, session.cadence.log, steps)
        with session.meter.counting_flops():
            step = train_step(
                session,
                window,
                lr=rate * progress.plateau.factor,
                bad=bad,
                watch=session.log_gradients and log_now,
            )
        progress.step, progress.units = window.step + 1, progress.units + step.units
        session.meter.add(step.units)
        bad = (~step.is_sound).long()
        if step.diverged:
            raise _diverged("loss or gradient norm", float("nan"), progress.step - 1, window)
        _count_skipped(session, progress, window)
        evaluate_now = _due(progress.step, session.cadence.evaluate, steps)
        save_now = step.stop or _due(progress.step, session.cadence.save, steps)
        if log_now or evaluate_now or save_now:
            loss = _sound_loss(session, step, progress, window)
            if log_now:
                _log(session, progress, loss, rate * progress.plateau.factor)
        improved = evaluate_now and _evaluate(session, progress)
        if improved or save_now:
            session.save(progress)
        if step.stop and progress.step < steps:
            source.close()
            return False
    return True


def train_step(
    session: Session, window: Window, *, lr: float, bad: Tensor, watch: bool = False
) -> Step:
    """Run one window through the task's losses and update once.

    Every yielded loss is a sum, divided here by the units of all micro-batches on all ranks: the
    gradient is that of one mean, whatever the padding, the accumulation or the world size. The stop
    flag and the previous loss's verdict ride in the same all-reduce, so that all ranks act on them
    at the same step.
    """
    engine, device = session.engine, distributed.device()
    asked = torch.tensor([int(window.units), int(session.preemption.requested), 0], device=device)
    asked[2] = bad
    counts = distributed.total(asked)
    host = _HostCopy(counts)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    with named_when_out_of_memory(window.batches):
        batches = [to_device(batch) for batch in window.batches]
        for summed in session.task.losses(engine.model, batches):
            mean = summed / counts[0]
            engine.backward(mean)
            loss += mean.detach()
    engine.step(
        lr, (lambda named: session.run.gradients(window.step + 1, named)) if watch else None
    )
    is_sound = torch.isfinite(loss)
    if not engine.step_was_skipped():
        is_sound = is_sound & engine.has_finite_gradient()
    units, stop, diverged = host.read()
    return Step(loss=loss, units=units, stop=stop > 0, diverged=diverged > 0, is_sound=is_sound)


def to_device(batch: Batch) -> Batch:
    """The batch on this rank's device; asynchronous from pinned memory."""
    return {
        name: tensor.to(distributed.device(), non_blocking=True) for name, tensor in batch.items()
    }


@contextmanager
def named_when_out_of_memory(batches: Sequence[Batch]) -> Iterator[None]:
    """Whatever runs inside: an OutOfMemoryError carries the shapes of the largest of `batches`, see
    `batch_of`.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        largest = max(batches, key=lambda batch: sum(tensor.numel() for tensor in batch.values()))
        vars(error)["batch"] = {name: list(tensor.shape) for name, tensor in largest.items()}
        raise


def batch_of(error: torch.OutOfMemoryError) -> dict[str, list[int]]:
    """The shapes that `named_when_out_of_memory` found; empty when the error arose elsewhere."""
    return vars(error).get("batch", {})


@torch.no_grad()
def evaluate(
    engine: Engine | Frozen,
    task: Task,
    store: TokenStore,
    *,
    batch: int,
    num_rows: int | None = None,
) -> dict[str, float]:
    """Every metric of `task.scores` over the first `num_rows` (None: all) of `store`, each once, on
    any ranks.

    Random state is put back afterwards, so evaluating never changes what is trained next.
    """

    def scores(rows: list[int]) -> Mapping[str, Ratio | Pool]:
        collated = task.collate([store[row] for row in rows])
        with named_when_out_of_memory([collated]):
            return task.scores(engine.model, to_device(collated))

    with _evaluation(engine):
        return _merged(scores, store.lengths[:num_rows], batch=batch)


@torch.no_grad()
def pool(
    engine: Engine | Frozen, task: Task, store: TokenStore, *, name: str, batch: int
) -> Tensor | None:
    """The values of one pool of `task.scores` over every row of `store` exactly once, on all ranks;
    None: no such.
    """

    def scores(rows: list[int]) -> Mapping[str, Ratio | Pool]:
        found = task.scores(engine.model, to_device(task.collate([store[row] for row in rows])))
        return {
            key: score for key, score in found.items() if key == name and isinstance(score, Pool)
        }

    with _evaluation(engine):
        merged = _summed(scores, store.lengths, batch=batch).get(name)
    return None if merged is None else merged.values  # pyright: ignore[reportAttributeAccessIssue] (a Pool, see above)


def first_questions(task: Task, count: int | Literal["all"]) -> list[Row]:
    """The first `count` validation rows, as `question_of` gives them, to be answered at each
    evaluation.

    ConfigError when the task cannot answer by generation and some are wanted.
    """
    if count == 0:
        return []
    if not isinstance(task, Answers):
        raise ConfigError(
            f"--do_extra_evals or train.answers: task {task.cfg.task!r} cannot answer questions "
            "by generation. "
            "Leave it out, or give the task a method `answers` (trainer/tasks/protocol.py)."
        )
    rows = islice(task.rows("valid"), None if count == "all" else count)
    return [question_of(task, row) for row in rows]


@torch.no_grad()
def answer(
    engine: Engine | Frozen,
    task: Answers,
    store: TokenStore,
    questions: Sequence[Row],
    *,
    batch: int,
    search: Search = GREEDY,
) -> tuple[dict[str, float], list[list[str]]]:
    """Every metric of `task.answers` over `questions`, and of each data set that they name; and the
    answers to each question, the best first. On all ranks.

    questions: raw rows of the first rows of `store`; each is answered exactly once, on any number
    of ranks.
    """
    own: dict[int, list[str]] = {}

    def scores(rows: list[int]) -> Mapping[str, Ratio | Pool]:
        raw = [questions[row] for row in rows]
        answered = task.answers(engine.model, [store[row] for row in rows], raw, search=search)
        own.update(
            zip(rows, answered.n_best or [[text] for text in answered.predictions], strict=True)
        )
        return answered.scores

    with _evaluation(engine):
        found = _merged(scores, store.lengths[: len(questions)], batch=batch)
    by_row = {row: texts for part in distributed.gather(list(own.items())) for row, texts in part}
    answers = [by_row[row] for row in range(len(questions))]
    return found | scores_by_dataset(questions, [best for best, *_ in answers]), answers


@contextmanager
def _evaluation(engine: Engine | Frozen) -> Iterator[None]:
    """Evaluation mode; afterwards training mode, and random state as it was."""
    before = rng.capture()
    engine.eval()
    yield
    engine.train()
    rng.restore(before)


def _merged(
    scores: Callable[[list[int]], Mapping[str, Ratio | Pool]], lengths: np.ndarray, *, batch: int
) -> dict[str, float]:
    """`scores(rows)` over all rows and ranks as numbers, each row counted once."""
    numbers: dict[str, float] = {}
    for name, score in _summed(scores, lengths, batch=batch).items():
        value = score.value()
        numbers |= value if isinstance(value, dict) else {name: value}
    return numbers


def _summed(
    scores: Callable[[list[int]], Mapping[str, Ratio | Pool]], lengths: np.ndarray, *, batch: int
) -> dict[str, Ratio | Pool]:
    """`scores(rows)` merged over all rows and ranks; all ranks call it equally often."""
    found: dict[str, Ratio | Pool] = {}
    shares = evaluation_batches(
        len(lengths), lengths, batch=batch, world=distributed.world(), rank=distributed.rank()
    )
    for rows, counted in shares:
        for name, score in scores(rows.tolist()).items():
            score = score if counted else _nothing(score)
            found[name] = found[name] + score if name in found else score  # pyright: ignore[reportOperatorIssue]
    return {name: _over_ranks(score) for name, score in found.items()}


def _nothing(score: Ratio | Pool) -> Ratio | Pool:
    """The same kind of score over no rows: what a rank adds that only ran to keep the others
    company.
    """
    if isinstance(score, Ratio):
        return Ratio(torch.zeros_like(score.num), torch.zeros_like(score.den))
    return Pool(score.values[:0], score.reduce)


def _over_ranks(score: Ratio | Pool) -> Ratio | Pool:
    if isinstance(score, Ratio):
        num, den = distributed.total(torch.stack([score.num.double(), score.den.double()]))
        return Ratio(num, den)
    return Pool(torch.cat(distributed.gather_rows(score.values)).cpu(), score.reduce)


def _evaluate(session: Session, progress: Progress) -> bool:
    """Score the validation split, log it, keep the best. True when this is the best so far."""
    train = session.cfg.train
    with session.meter.paused():
        scores = _scores(session, progress.step)
        named = {f"valid/{name}": value for name, value in scores.items()}
        session.run.log(progress.step, **named)
        session.run.score(progress.step, **named)
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
    scores = evaluate(engine, task, valid, batch=batch)
    if session.questions:
        assert isinstance(task, Answers), "first_questions() refuses a task that cannot answer"
        of_answers, answers = answer(engine, task, valid, session.questions, batch=batch)
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


def _count_skipped(session: Session, progress: Progress, window: Window) -> None:
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


def _sound_loss(session: Session, step: Step, progress: Progress, window: Window) -> float:
    """The loss over all ranks. DivergedError when the step was not sound: it is neither logged,
    scored nor saved.
    """
    loss, norm = float(distributed.total(step.loss)), session.engine.grad_norm()
    if not math.isfinite(loss):
        raise _diverged("loss", loss, progress.step, window)
    if not math.isfinite(norm) and not session.engine.step_was_skipped():
        raise _diverged("gradient norm", norm, progress.step, window)
    return loss


def _log(session: Session, progress: Progress, loss: float, lr: float) -> None:
    scalars: dict[str, float | int] = {"loss": loss, "lr": lr, session.task.unit: progress.units}
    if not session.engine.step_was_skipped():
        scalars["grad_norm"] = session.engine.grad_norm()
    scale = session.engine.loss_scale()
    if scale is not None:
        scalars |= {"loss_scale": scale[0], "skipped_steps": progress.skipped.total}
    session.run.log(progress.step, **scalars, **session.meter.read(session.task.unit))


def _diverged(what: str, value: float, step: int, window: Window) -> DivergedError:
    rows = ", ".join(str(int(row)) for rows in window.rows for row in rows[:4])
    return DivergedError(
        f"{what} is {value} at step {step} (this rank's rows of that window begin with {rows}).\n"
        "The last good checkpoint is kept. Look at these rows; lower optim.lr, lengthen the "
        "warm-up, or clip harder "
        "(optim.clip)."
    )


def _due(step: int, every: int, last: int) -> bool:
    return step % every == 0 or step == last


class _HostCopy:
    """Small counts on their way to the host while the device works: reading them waits for the copy
    only.
    """

    def __init__(self, counts: Tensor) -> None:
        self._event = None
        if counts.device.type == "cpu":
            self._host = counts
            return
        self._host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        self._host.copy_(counts, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def read(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
