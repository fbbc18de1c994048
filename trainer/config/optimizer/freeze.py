"""Weights that stand still for a part of a run: the list `train.freeze`. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from trainer.config.block import Positive, Strict


class Freeze(Strict):
    """Weights that take no part in some steps: no gradient, no decay, no moments, no count of steps
    changes in them.
    """

    match: Annotated[str, Field(min_length=1)]
    """Names of weights, with * for any text and ? for any character. A weight that several entries
    name follows the first.
    """
    since: Annotated[int, Field(ge=0)] = 0
    """Steps that are taken before they stand still; 0: they do from the first step on."""
    until: Positive | None = None
    """The last step in which they stand still; None: they do to the end of the run. With since 0
    they then belong to the frozen part of the model, which has no gradients and no moments.
    """

    @property
    def is_whole(self) -> bool:
        """Whether these weights never train."""
        return self.since == 0 and self.until is None

    def holds(self, step: int) -> bool:
        """Whether they stand still in this step; the first step is 1."""
        return self.since < step and (self.until is None or step <= self.until)

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Freeze:
        if self.until is not None and self.until <= self.since:
            raise ValueError(
                f"until={self.until} with since={self.since}: no step would be left out. Give an "
                "until above since, or leave it out"
            )
        return self
