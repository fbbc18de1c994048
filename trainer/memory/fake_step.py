"""Steps run under fake tensors, in a process of their own: `measure()` of measure.py starts it.

It reads requests, a line of JSON at a time, from standard input, and writes what was measured to
standard output, until the input ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trainer.memory.measure import Measured, MeasureRequest

if TYPE_CHECKING:
    from trainer.memory.fake_device import FakeDevice
    from trainer.tasks.protocol import Places, Task


def main() -> None:
    """Answer the requests on standard input."""
    answers, sys.stdout = sys.stdout, sys.stderr  # whoever prints must not spoil the answer
    from trainer.tasks.protocol import Places

    for line in sys.stdin:
        job = json.loads(line)
        given = {name: None if path is None else Path(path) for name, path in job["places"].items()}
        places = Places(**cast("dict[str, Any]", given))
        found = [_measured(MeasureRequest(**one), places).plain() for one in job["requests"]]
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    # torch's threads hold Python objects of the fake device, which the interpreter's own way out
    # would meet half freed
    os._exit(0)


def _measured(request: MeasureRequest, places: Places) -> Measured:
    from trainer.memory.fake_device import linear_of_partitioned

    step = _stepped(request, places)
    if request.kind != "train" or not step.frozen:
        return step
    with linear_of_partitioned():  # frozen weights are where it needs more
        partitioned = _stepped(request, places)
    seconds = step.seconds + partitioned.seconds
    return replace(step, partitioned=partitioned.moments, seconds=seconds)


def _stepped(request: MeasureRequest, places: Places) -> Measured:
    import numpy as np

    from trainer import tasks
    from trainer.memory.fake_device import FAKE_GPU, fake_device
    from trainer.models.base_model import DTYPES
    from trainer.training.optimizers import state_shapes

    started = time.process_time()
    cfg = tasks.parse(request.experiment)
    task = tasks.load(cfg, places)
    model = task.skeleton().to(DTYPES[cfg.train.precision])
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    rows = [
        {field: np.asarray(ids, dtype=np.int64) for field, ids in row.items()}
        for row in request.rows
    ]
    batch = task.collate(rows)
    with fake_device(FAKE_GPU) as device:
        device.place(model)
        tracker = device.tracker
        tracker.watch(model)
        tracker.restart()
        _run(request, task, model, device, batch=batch, rows=rows)
        return Measured(
            weights=tracker.live["weights"],
            buffers=tracker.live["buffers"],
            trainable=sum(weight.numel() for weight in weights),
            frozen=sum(weight.numel() for weight in model.parameters() if not weight.requires_grad),
            largest=max((weight.numel() for weight in weights), default=0),
            states=sum(
                shape.numel()
                for w in weights
                for shape in state_shapes(cfg.optim, w.shape).values()
            ),
            moments=tracker.moments,
            scratch=device.scratch,
            shapes={name: list(tensor.shape) for name, tensor in batch.items()},
            tensors=tracker.largest,
            seconds=time.process_time() - started,
        )


def _run(
    request: MeasureRequest, task: Task, model: Any, device: FakeDevice, *, batch: Any, rows: Any
) -> None:
    import torch

    from trainer.memory.fake_device import for_real
    from trainer.runtime import distributed
    from trainer.tasks.abilities import Answers

    if request.kind == "train":
        model.train()
        window = [device.put(batch) for _ in range(1 + request.accumulates)]
        forwards: list[None] = []
        model.register_forward_pre_hook(lambda *_: forwards.append(None))
        for loss in task.losses(model, window):
            device.tracker.name_largest()
            (loss / 1.0).backward()
            del loss
            if len(forwards) == 1:
                # micro-batches do not know of each other: the next one would be the same again
                break
        return
    model.eval()
    with torch.no_grad():
        if request.kind == "evaluate":
            task.scores(model, device.put(batch))
            return
        distributed.device = lambda: device.device  # answers() itself puts its batch there
        task.collate = for_real(task.collate)
        assert isinstance(task, Answers)
        task.answers(model, rows, request.raw, max_tokens=request.answer_tokens)


if __name__ == "__main__":
    main()
