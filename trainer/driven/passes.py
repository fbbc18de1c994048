"""Forward and backward over the rows of an operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.driven.losses import DrivenLoss
from trainer.driven.packs import TARGETS, batch_of, deal, inputs_of, split_outputs
from trainer.operations.rows import DrivenRow
from trainer.runtime import distributed
from trainer.runtime.batch import name_batch_when_out_of_memory, to_device
from trainer.training.engine import Engine


@dataclass(frozen=True)
class PassLayout:
    """How rows become micro-batches. most_tokens: of one; pad: the id that fills padded rows."""

    most_tokens: int
    is_packed: bool
    pad: int


@dataclass(frozen=True)
class PassResult:
    """What a pass over rows gave, the same on all ranks. loss: the sum over all targets; logps: of
    each row, shaped as its target_tokens, fp32.
    """

    loss: float
    logps: list[np.ndarray]


@dataclass(frozen=True)
class RowsPass:
    """A pass over rows that were checked. with_backward: its gradient is wanted."""

    rows: Sequence[DrivenRow]
    loss: DrivenLoss
    config: Mapping[str, float]
    with_backward: bool

    def result(self, logps: Sequence[Tensor]) -> PassResult:
        """logps: of each row, flat, on the CPU. One sum in one order, whatever the ranks and
        micro-batches.
        """
        inputs = {name: values.double() for name, values in inputs_of(self.rows).items()}
        total = self.loss.tokens(torch.cat([*logps]).double(), inputs, self.config).sum()
        shaped = [
            values.numpy().reshape(row.inputs[TARGETS].shape)
            for values, row in zip(logps, self.rows, strict=True)
        ]
        return PassResult(float(total), shaped)


def run(engine: Engine, of: RowsPass, layout: PassLayout) -> PassResult:
    """The log-probabilities of all targets, and the loss; with_backward adds its gradient to what
    the engine has accumulated. A collective.
    """
    rows, with_backward = of.rows, of.with_backward
    world, rank = distributed.world(), distributed.rank()
    dealt = deal([len(row.tokens) for row in rows], world=world, most_tokens=layout.most_tokens)
    shortest = min(range(len(rows)), key=lambda number: len(rows[number].tokens))
    outputs: list[Tensor] = []
    (engine.train if with_backward else engine.eval)()
    for numbers in dealt[rank]:
        # a rank without rows makes the same calls: under ZeRO-3 all gather the weights
        own = [rows[number] for number in numbers or [shortest]]
        batch = batch_of(own, is_packed=layout.is_packed, pad=layout.pad)
        with torch.set_grad_enabled(with_backward), name_batch_when_out_of_memory([batch]):
            logps_N = engine.model(**to_device(batch))["logprobs"]
            if with_backward:
                inputs = to_device(inputs_of(own))
                losses_N = of.loss.tokens(logps_N, inputs, of.config) if numbers else 0.0 * logps_N
                engine.backward(losses_N.sum())
        if numbers:
            outputs.append(logps_N.detach())
    of_rank = torch.cat(outputs) if outputs else torch.zeros(0, device=distributed.device())
    counts = {number: int(row.inputs[TARGETS].size) for number, row in enumerate(rows)}
    logps = split_outputs(distributed.gather_rows(of_rank.float().cpu()), dealt, counts)
    return of.result(logps)
