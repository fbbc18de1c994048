"""What an optimizer makes for a step and frees again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from trainer.models.optimizers.lion import CHUNK
from trainer.models.optimizers.rates import ADAMW

if TYPE_CHECKING:
    import torch

    from trainer.config.schema import Optim


@dataclass(frozen=True)
class StepCopies:
    """Bytes that a step of some weights makes, and frees when it ends."""

    of_number: int = 0  # for each number that is stepped
    at_once: int | None = None  # numbers that are stepped at once at most
    of_weight: int = 0  # besides, for one weight at a time
    of_cut_matrix: int = 0  # besides, where ranks hold parts of a matrix


def copies_of_step(optim: Optim, shapes: Sequence[torch.Size], *, rule: str) -> StepCopies:
    """What stepping weights of these shapes makes. rule: of rates.rules.

    Of AdamW, 8-bit AdamW and SGD nothing: their kernels change each number where it lies.
    """
    if rule == ADAMW:
        return StepCopies()
    if optim.name == "adafactor":
        # torch 2.13: the update of a weight, beside that of the weight before; of a vector also its
        # squares
        updates = [0, *(shape.numel() * (1 if len(shape) > 1 else 2) for shape in shapes)]
        return StepCopies(of_weight=4 * max(sum(pair) for pair in pairwise(updates)))
    if optim.name == "lion":
        return StepCopies(of_number=4, at_once=CHUNK)
    if optim.name == "muon":
        # The update in fp32 where it is neither the gradient nor the momentum; then two copies of
        # one matrix in bf16, and two products of it with itself.
        looks_ahead = bool(optim.momentum and optim.nesterov)
        return StepCopies(
            of_number=4 if looks_ahead else 0,
            of_weight=4 * max(shape.numel() + min(shape) ** 2 for shape in shapes),
            of_cut_matrix=4 * max(shape.numel() for shape in shapes),
        )
    return StepCopies()
