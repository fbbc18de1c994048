"""The learning rate over a run: the block `schedule`. Imports no torch."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config.block import Fraction, Positive, Strict

# The keys of a schedule that only some shapes read.
_OF_SHAPE = {
    "min_lr_ratio": ("linear", "cosine", "polynomial", "wsd"),
    "cycles": ("cosine",),
    "power": ("polynomial",),
    "decay_ratio": ("wsd",),
    "decay": ("wsd",),
}


class Schedule(Strict):
    """Learning rate over the run: warm-up from 0, then a shape. `reduce_on_plateau` follows
    `valid/loss`.
    """

    shape: Literal[
        "constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd", "reduce_on_plateau"
    ] = "linear"
    """What follows the warm-up. linear, cosine, polynomial and wsd (warm-up, stable, decay) end at
    `min_lr_ratio` with the last step; inverse_sqrt falls with the root of the step.
    """
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps over which the rate rises from 0; None: none, or `warmup_ratio` of them."""
    warmup_ratio: Fraction | None = None
    """The same as a share of train.steps, rounded up."""
    min_lr_ratio: Fraction = 0.0
    """The lowest rate after the warm-up, as a share of the highest."""
    cycles: Positive = 1
    """cosine: so many falls from the highest rate, each followed by a restart."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """polynomial: the exponent of the share of steps that is left."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.1
    """wsd: the last part of the run, in which the rate falls; before, it is constant."""
    decay: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """wsd: how it falls."""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """reduce_on_plateau: the rate is multiplied by it."""
    patience: Annotated[int, Field(ge=0)] = 10
    """reduce_on_plateau: evaluations without improvement before that."""

    def warmup_of(self, total: int) -> int:
        """Steps of warm-up in a run of `total`; a ratio is rounded up, as the Hugging Face Trainer
        does.
        """
        if self.warmup_ratio is not None:
            return math.ceil(self.warmup_ratio * total)
        return self.warmup_steps or 0

    @model_validator(mode="after")
    def _keys_are_of_the_shape(self) -> Schedule:
        foreign = [
            key
            for key, shapes in _OF_SHAPE.items()
            if key in self.model_fields_set and self.shape not in shapes
        ]
        if foreign:
            owners = "; ".join(f"{key} of {', '.join(_OF_SHAPE[key])}" for key in foreign)
            raise ValueError(f'shape="{self.shape}" does not read {", ".join(foreign)} ({owners})')
        return self

    @model_validator(mode="after")
    def _one_warmup(self) -> Schedule:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio} are both "
                "set; keep one"
            )
        return self
