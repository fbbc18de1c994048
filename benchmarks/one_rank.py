"""Our side of the benchmarks that take turns with a reference: the engine and the loop's step on
one rank, without the prefetching thread, so that collation is on the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.config import deepspeed_config
from trainer.data.order import Sharding, StepBatches
from trainer.data.token_store import TokenStore, open_store
from trainer.protocol.task import Batch, Row
from trainer.runtime import distributed
from trainer.runtime.preemption import Preemption
from trainer.telemetry.meter import Meter
from trainer.telemetry.run_record import RunRecord
from trainer.training.engine import Engine
from trainer.training.loop import train_step
from trainer.training.session import Cadence, Session


class OneRank:
    """A task under its own DeepSpeed file, which states what is trained how; steps come from the
    caller.
    """

    def __init__(
        self,
        task: Any,
        store: TokenStore,
        *,
        sharding: Sharding,
        folder: Path,
        model: nn.Module | None = None,
    ) -> None:
        """folder: of the run. model: None is task.model()."""
        distributed.init()
        cfg = task.cfg
        preset = deepspeed_config.read(cfg.deepspeed)
        complete = deepspeed_config.build(
            preset, train=cfg.train, optim=cfg.optim, world=1, source=cfg.deepspeed
        )
        made = task.model() if model is None else model
        self.engine = Engine(made, deepspeed_config.for_engine(complete), cfg.optim)
        self.session = Session(
            cfg=cfg,
            task=task,
            engine=self.engine,
            train=store,
            valid=store,
            sharding=sharding,
            cadence=Cadence(log=1, evaluate=1, save=1),
            record=RunRecord(folder, total=1),
            meter=Meter(),
            preemption=Preemption(),
            save=lambda progress: None,
            export_best=lambda: None,
        )
        self._sound = torch.zeros((), dtype=torch.int64, device=distributed.device())

    def step(
        self, number: int, batches: Sequence[Batch], rows: Sequence[np.ndarray] = (), *, lr: float
    ) -> Tensor:
        """Train on the micro-batches of step `number`; () fp64, the loss, still on the device, as
        in a run.
        """
        self.engine.train()
        units = torch.stack([self.session.task.units(batch) for batch in batches]).sum()
        window = StepBatches(step=number, batches=list(batches), rows=list(rows), units=units)
        return train_step(self.session, window, lr=lr, unsound_before=self._sound).loss

    def close(self) -> None:
        self.session.preemption.close()
        self.session.record.close()
        self.engine.destroy()


def store_of(task: Any, rows: Callable[[], Iterable[Row]], cache_dir: Path) -> TokenStore:
    """The train rows of a task, encoded."""
    return open_store(
        rows,
        task.encode,
        encoding_id=task.encoding_id(),
        split="train",
        cache_dir=cache_dir,
        length=task.length,
    )
