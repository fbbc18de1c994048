"""Makes the memory plan of a run before its first step, enforces it while the run trains, and
compares it with the memory that was allocated.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.stream.store import StreamStore
from trainer.errors import DoesNotFitError
from trainer.files.atomic import read_json, write_json
from trainer.launch import late
from trainer.plan.memory import plan_text
from trainer.plan.memory.advice import advise
from trainer.plan.memory.measure import MeasuringError, measuring
from trainer.plan.memory.plan import MemoryPlan, make
from trainer.plan.memory.planned_rows import Specimens
from trainer.plan.time.target import target_of
from trainer.protocol.abilities import shared
from trainer.protocol.task import DRAW, EPOCH, STEP
from trainer.runtime import distributed, rng
from trainer.runtime.batch import batch_of, name_batch_when_out_of_memory, to_device
from trainer.training.engine import Engine, trainable

if TYPE_CHECKING:
    from trainer.launch.prepare import PreparedRun
    from trainer.training.options import Options

logger = logging.getLogger(__name__)

FILE = "memory_plan.json"


def plan_before_start(run: PreparedRun, options: Options) -> dict[str, Any] | None:
    """Run plan_memory() on rank 0, and give every rank its result. A collective."""
    return distributed.on_main(lambda: plan_memory(run, options))


@measuring()
def plan_memory(run: PreparedRun, options: Options) -> dict[str, Any] | None:
    """Plan memory and time, log the plan in one line, and write it into the run folder. Returns it
    as plain values; None if there is no device to plan for.

    DoesNotFitError, which says what would fit, unless --force is given. If a step cannot be
    measured, a warning says so.
    """
    world, file = run.plan.sharding.world, run.plan.folder / FILE
    target = target_of(options.device, world=world)
    device = target.device
    if device is None:
        logger.info(
            "memory: not planned, for there is no GPU here; `python -m trainer plan --device "
            "24GiB` plans"
        )
        return None
    key, subject, cublas = run.key(device), run.subject(), device.cublas_nbytes
    try:
        measured, plan = None, _earlier(file, key)
        if plan is None:
            measured = make(subject, cublas=cublas)
            plan = measured.plan
        logger.info("%s", plan_text.summary(plan, device))
        time = late.predict_time(subject, target)
        write_json(file, {"key": key, "plan": plan.plain(), late.KEY: time})
        if not plan.fits(device, world) and not options.force:
            measured = measured or make(subject, cublas=cublas)
            advice = advise(subject, measured, device, cublas=cublas)
            raise DoesNotFitError(plan_text.refusal(plan, advice, device, world=world))
    except MeasuringError as error:
        logger.warning("memory: not planned. %s", error)
        return None
    return plan.plain()


def _earlier(path: Path, key: str) -> MemoryPlan | None:
    """The plan of an earlier start of the same run."""
    entry = read_json(path)
    if entry is None or entry.get("key") != key:
        return None
    try:
        return MemoryPlan.of(entry["plan"])
    except (KeyError, TypeError, ValueError):  # damaged, or in an older form: it is made again
        return None


@contextmanager
def enforce_plan(memory: dict[str, Any] | None, engine: Engine, run: PreparedRun) -> Iterator[None]:
    """Inside, the steps of a run are trained. Before them the heaviest batches are tried; after
    them the memory that was used is compared with the plan.

    memory: from plan_memory(). An OutOfMemoryError inside becomes a DoesNotFitError that says what
    took the memory.
    """
    folder = run.plan.folder
    plan = MemoryPlan.of(memory) if memory is not None else None
    try:
        if plan is not None:
            rehearse(engine, run, plan.heaviest, plan.heaviest_evaluated, is_planned=True)
        elif run.plan.cfg.train.compile:
            # always compile for the same rows, also in a resumed run: equal kernels give equal bits
            first = list(range(run.plan.sharding.micro_batch))
            rehearse(engine, run, first, first)
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(plan, engine, folder, error) from error
    if plan is not None:
        compare(plan, folder)


def rehearse(
    engine: Engine,
    run: PreparedRun,
    trained_rows: Sequence[int],
    evaluated_rows: Sequence[int],
    *,
    is_planned: bool = False,
) -> None:
    """Run a micro-batch and an evaluation batch of these rows before step 1, so that a failure or a
    compilation happens now. is_planned: the rows are those of the memory plan.

    The run is not changed: the optimizer does not step, the weights keep no gradient, and random
    state is restored. Every rank calls it, because a forward may be a collective.
    """
    state = rng.capture()
    engine.train()
    task, valid = run.task, run.stores["valid"]
    rows = [
        {
            **of_row,
            DRAW: np.zeros(1, dtype=np.int64),
            EPOCH: np.zeros(1, dtype=np.int64),
            STEP: np.ones(1, dtype=np.int64),
        }
        for of_row in _rehearse(run, trained_rows, is_planned=is_planned)
    ]
    module = engine.model.module
    weights = list(trainable(module).values())
    place = run.plan.sharding.place
    trained = shared(task, task.collate(rows), place)
    with name_batch_when_out_of_memory([trained]):
        for loss in task.losses(module, [to_device(trained)]):
            with _drop_gradients(weights):
                # not backward(): DeepSpeed's hooks would add these gradients to the first step's
                torch.autograd.grad(loss, weights, allow_unused=True)
            del loss
    engine.eval()
    evaluated = task.collate([valid[row % len(valid)] for row in evaluated_rows])
    evaluated = shared(task, evaluated, place)
    with torch.no_grad(), name_batch_when_out_of_memory([evaluated]):
        task.scores(engine.model, to_device(evaluated))
    engine.train()
    rng.restore(state)


def _rehearse(
    run: PreparedRun, numbers: Sequence[int], *, is_planned: bool
) -> list[dict[str, np.ndarray]]:
    """The training rows of these numbers. A stream has not encoded them yet: they are encoded by
    themselves, and those of a plan are rows that fill every limit.
    """
    train = run.stores["train"]
    if not isinstance(train, StreamStore):
        return [train[number % len(train)] for number in numbers]
    if not is_planned:
        return [train.alone(number % len(train)) for number in numbers]
    rows = Specimens(run.task).encoded_rows(numbers, is_drawn=False)
    return [{name: np.asarray(ids, np.int32) for name, ids in row.items()} for row in rows]


@contextmanager
def _drop_gradients(weights: Sequence[Tensor]) -> Iterator[None]:
    """Inside, autograd.grad drops the gradient of each of these weights. All gradients at once
    would be as large as the model, and from ZeRO-2 on no step holds them all.
    """
    hooks = [
        weight.register_hook(lambda gradient: gradient.new_zeros(()).expand_as(gradient))
        for weight in weights
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def compare(plan: MemoryPlan, folder: Path) -> None:
    """Log and record the planned and the measured peak; on a GPU only."""
    if not torch.cuda.is_available():
        return
    estimate, measured = plan.peak.peak.total, torch.cuda.max_memory_allocated()
    logger.info("%s", plan_text.comparison(estimate, measured))
    if distributed.is_main() and (path := folder / FILE).is_file():
        write_json(path, json.loads(path.read_text()) | {"measured": measured})


def out_of_memory(
    plan: MemoryPlan | None, engine: Engine, folder: Path, error: torch.OutOfMemoryError
) -> DoesNotFitError:
    """An error that explains an OutOfMemoryError. Its text is also written into the run folder."""
    parts = engine.bytes_by_kind()
    total = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else sum(parts.values())
    text = plan_text.out_of_memory(
        plan, parts | {"rest": total - sum(parts.values())}, batch_of(error), str(error)
    )
    if distributed.is_main():
        (folder / "out_of_memory.txt").write_text(text + "\n")
    return DoesNotFitError(text)
