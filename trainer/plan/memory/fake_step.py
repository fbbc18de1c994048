"""Runs steps under fake tensors. measure() of measure.py starts this as a process of its own.

Until the input ends, it reads requests from standard input, one line of JSON each, and writes the
measured steps to standard output.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from trainer.plan.memory.measure import Measured, MeasureRequest, SteppedTogether

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainer.config.optimizer.freeze import Freeze
    from trainer.config.schema import Optim
    from trainer.plan.memory.fake_device import FakeDevice
    from trainer.plan.memory.tracker import Ran, Tracker
    from trainer.protocol.task import Places, Task

logger = logging.getLogger(__name__)


def main() -> None:
    """Answer the requests on standard input."""
    answers, sys.stdout = sys.stdout, sys.stderr  # a print must not get among the answers
    answer_all(sys.stdin, answers)
    # A normal exit of the interpreter frees Python objects of the fake device that torch's threads
    # still use.
    os._exit(0)


def answer_all(requests: TextIO, answers: TextIO) -> None:
    """Answer requests, a line each, until they end."""
    import torch

    from trainer.plan.memory.fake_device import register
    from trainer.protocol.task import Places

    # In a fork torch creates its pool of threads again at the first use. When two threads of a
    # backward pass use it first at the same time, one finds none, and the process is aborted.
    torch.set_num_threads(1)  # fake tensors compute nothing
    register()  # torch counts devices once, at the first backward pass, which may be a processor's
    for line in requests:
        job = json.loads(line)
        folders = {
            name: None if path is None else Path(path) for name, path in job["places"].items()
        }
        places = Places(**cast("dict[str, Any]", folders))
        answers_of_line = [
            _measure(MeasureRequest(**one), places).plain() for one in job["requests"]
        ]
        answers.write(json.dumps(answers_of_line) + "\n")
        answers.flush()


def _measure(request: MeasureRequest, places: Places) -> Measured:
    from trainer.plan.memory.fake_device import linear_of_partitioned

    step = _run_step(request, places)
    if request.kind != "train" or not step.frozen:
        return step
    with linear_of_partitioned():  # it keeps more only where weights are frozen
        partitioned = _run_step(request, places)
    seconds = step.seconds + partitioned.seconds
    return replace(
        step, partitioned=partitioned.moments, reading=partitioned.reading, seconds=seconds
    )


def _run_step(request: MeasureRequest, places: Places) -> Measured:
    """One step, with a few of the model's blocks, or with all of them where blocks differ."""
    from trainer import tasks
    from trainer.plan.time.blocks import (
        SHOWN,
        SHOWN_RECOMPUTED,
        UnequalBlocksError,
        shorten,
        whole,
    )

    train = tasks.parse(request.experiment).train
    every = train.recompute_every or 0
    if every > 1 or (every and train.activation_offload):
        # blocks differ: only every so many is recomputed, or the last ones keep their inputs
        return _run_blocks(request, places, lambda _: whole())
    num_blocks = SHOWN_RECOMPUTED if every else SHOWN
    try:
        return _run_blocks(request, places, lambda model: shorten(model, num_blocks))
    except UnequalBlocksError as error:
        logger.info("all blocks are run: %s", error)
        return _run_blocks(request, places, lambda _: whole())


def _run_blocks(request: MeasureRequest, places: Places, shorten: Any) -> Measured:
    from trainer import tasks
    from trainer.models import recomputation
    from trainer.models.base_model import DTYPES
    from trainer.models.optimizers import state_nbytes
    from trainer.models.optimizers.rates import freeze_whole, rules
    from trainer.plan.memory.fake_device import PlannedInputs, fake_device
    from trainer.plan.memory.tracker import forwards_in

    started = time.process_time()
    cfg = tasks.parse(request.experiment)
    inputs = PlannedInputs()
    task: Any = tasks.load(cfg, places)
    student = task
    if request.kind == "teach":
        task = student.task_of_teacher()
        cfg = task.cfg
    model = task.skeleton().to(DTYPES[cfg.train.precision])
    freeze_whole(model, cfg.train.freeze)
    blocks = recomputation.num_blocks(model)
    state = sum(
        state_nbytes(cfg.optim, model.get_parameter(name).shape, rule=rule)
        for name, rule in rules(model, cfg.optim).items()
    )
    sizes = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    trainable = sum(size for size, is_trained in sizes if is_trained)
    rows = _rows_of(request)
    plus = 1.0 if cfg.lora is None else cfg.lora.plus
    groups = stepped_together(model, cfg.optim, plus=plus, freeze=cfg.train.freeze)
    whole_batch = task.collate(rows)
    batch = _fullest_part(task, whole_batch, request.sharing)
    with fake_device(request.device) as device:
        device.place(model)
        tracker = device.tracker
        tracker.watch(model, shorten(model))
        tracker.restart()
        is_offloaded = cfg.train.activation_offload and request.kind == "train"
        recomputation.keep_inputs_in(inputs if is_offloaded else None)
        with _shortened(request, tracker):
            if request.kind == "teach":
                student.likeliest(model.eval(), device.copy_of(batch))
            else:
                _run(request, task, model, device, batch=batch, rows=rows)
        moments, reading = tracker.highest()
        of_one, of_last = _micro_batches(request, forwards_in(tracker.parts()))
        return Measured(
            weights=tracker.live["weights"],
            buffers=tracker.live["buffers"],
            trainable=trainable,
            frozen=sum(size for size, is_trained in sizes if not is_trained),
            largest=max((size for size, is_trained in sizes if is_trained), default=0),
            states=-(-state // 4) + (trainable if cfg.train.ema is not None else 0),
            moments=moments,
            reading=reading,
            scratch=device.scratch,
            shapes={name: list(tensor.shape) for name, tensor in batch.items()},
            tensors=tracker.largest,
            seconds=time.process_time() - started,
            operators=[[*operator, times] for operator, times in of_one.operators.items()],
            calls=dict(of_one.calls),
            operators_of_last=[[*operator, times] for operator, times in of_last.operators.items()],
            calls_of_last=dict(of_last.calls),
            units=int(task.units(whole_batch)),
            sizes=[list(item) for item in Counter(size for size, _ in sizes).items()],
            blocks=blocks,
            offloaded=inputs.most,
            groups=groups,
        )


@contextmanager
def _shortened(request: MeasureRequest, tracker: Tracker) -> Iterator[None]:
    """Inside, what is alike is computed once, and counted as often as a step has it."""
    from trainer.plan.memory.fake_device import equal_chunks_once, exchanges_alone, rows_in_groups

    grouping = rows_in_groups(tracker) if request.groups_rows else nullcontext()
    with grouping, equal_chunks_once(tracker), exchanges_alone():
        yield


def _rows_of(request: MeasureRequest) -> list[dict[str, Any]]:
    """The encoded rows of a request."""
    import numpy as np

    return [
        {field: np.asarray(ids, dtype=np.int64) for field, ids in row.items()}
        for row in request.rows
    ]


def _fullest_part(task: Any, batch: dict[str, Tensor], sharing: int) -> dict[str, Tensor]:
    """Of a batch that so many ranks share, the part with the most labels."""
    from trainer.protocol.abilities import RankPlace, shared

    parts = [shared(task, batch, RankPlace(number, sharing)) for number in range(sharing)]
    return max(parts, key=lambda part: int(task.units(part)))


def stepped_together(
    model: nn.Module, optim: Optim, *, plus: float = 1.0, freeze: Sequence[Freeze] = ()
) -> list[SteppedTogether]:
    """The groups of weights that an optimizer steps, in their order. plus: lora.plus; freeze:
    train.freeze, of which weights that never train are frozen already.
    """
    from trainer.models.optimizers.copies import copies_of_step
    from trainer.models.optimizers.rates import param_groups, places

    found: list[SteppedTogether] = []
    for group in param_groups(model, places(model, optim, plus=plus, freeze=freeze), optim):
        shapes = [parameter.shape for parameter in group["params"]]
        sizes = [shape.numel() for shape in shapes]
        copies = copies_of_step(optim, shapes, rule=group["rule"])
        found.append(SteppedTogether(sum(sizes), max(sizes), **asdict(copies)))
    return found


def _micro_batches(request: MeasureRequest, forwards: list[Ran]) -> tuple[Ran, Ran]:
    """What one micro-batch runs, and what a step's last one runs where that is less.

    forwards: what each forward pass of the model in `_run` ran. Where micro-batches wait for each
    other (models/gradcache.py), there are three for two micro-batches: the first runs, the last
    runs forward and backward, and the first runs again.
    """
    from trainer.plan.memory.tracker import Ran

    if request.kind == "train" and request.accumulates and len(forwards) == 1 + 3:
        before, unseen, last, again = forwards
        return before + unseen + again, last
    return sum(forwards, Ran()), Ran()


def _run(
    request: MeasureRequest, task: Task, model: Any, device: FakeDevice, *, batch: Any, rows: Any
) -> None:
    import torch

    from trainer.plan.memory.fake_device import for_real
    from trainer.protocol.abilities import Answers
    from trainer.runtime import distributed

    if request.kind == "train":
        model.train()
        window = [device.copy_of(batch) for _ in range(1 + request.accumulates)]
        forwards: list[None] = []

        def begin(*_: Any) -> None:
            forwards.append(None)
            device.tracker.begin_forward()

        model.register_forward_pre_hook(begin)
        for loss in task.losses(model, window):
            device.tracker.name_largest()
            (loss / 1.0).backward()
            del loss
            if len(forwards) == 1:
                # micro-batches are independent: the next one would run the same again
                break
        return
    model.eval()
    with torch.no_grad():
        if request.kind == "evaluate":
            task.scores(model, device.copy_of(batch))
            return
        distributed.device = lambda: device.device  # answers() moves its batch there
        task.collate = for_real(task.collate)
        assert isinstance(task, Answers)
        task.answers(model, rows, request.raw, max_tokens=request.answer_tokens)


if __name__ == "__main__":
    main()
