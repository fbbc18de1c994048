"""What a dictionary says of the comparison at the end of a run: against what, and what must hold.
Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config.block import Strict
from trainer.config.scores.direction import Direction

KEPT_LOSS, WORSE_SLICES = "keep/loss", "slices"  # what a gate may name besides scores of the split


class Bound(Strict):
    """What must hold of one score."""

    gain: float | None = None
    """How much better than the other model it is, at least: by the worse end of the interval of the
    difference. Below 0: how much worse it may be.
    """
    at_least: float | None = None
    """The least that the score of the trained model may be."""
    at_most: float | None = None
    """The most that it may be."""
    best_is: Direction | None = None
    """Whether a higher or a lower score is better; None: as its name says."""

    @model_validator(mode="after")
    def _something_is_asked(self) -> Bound:
        if self.gain is None and self.at_least is None and self.at_most is None:
            raise ValueError("nothing must hold: give gain, at_least or at_most")
        return self


class Judging(Strict):
    """The comparison of a trained model with another one."""

    against: str = "base"
    """The other model: "base", what the run began with, or the id of a run in --savedir_base."""
    split: Literal["test", "valid"] = "test"
    """The rows. On the valid split best/ was chosen, so its scores flatter the trained model."""
    overlap: Literal["refuse", "leave_out"] = "refuse"
    """What happens to rows of the split that are training rows, too."""
    answers: Annotated[int, Field(ge=0)] = 200
    """Rows of conversations and completions that both language models answer, the first ones; their
    answers are compared with the references. 0: none.
    """
    keep: str | None = "stdlib_docs"
    """Texts by which it is measured what a language model forgot: a file of rows with "text" below
    --data_path, or "stdlib_docs", the embedded corpus. None: it is not measured.
    """
    slices_by: str | None = None
    """The score by which slices of the rows are compared; None: one that says right or wrong by
    row, else the loss.
    """
    gate: dict[str, Bound] = {}  # noqa: RUF012 (the block is frozen)
    """By score, what must hold before the trained model becomes final/: {"em": {"gain": 0.01},
    "keep/loss": {"gain": -0.1}, "slices": {"at_most": 0}}; "slices" is the number of slices that
    are worse. {}: nothing.
    """

    @model_validator(mode="after")
    def _the_gate_fits(self) -> Judging:
        slices = self.gate.get(WORSE_SLICES)
        if slices is not None and (slices.gain is not None or slices.at_most is None):
            raise ValueError(
                f'gate: "{WORSE_SLICES}" is a number of slices: want {{"at_most": 0}} or more'
            )
        if KEPT_LOSS in self.gate and self.keep is None:
            raise ValueError(f'gate: "{KEPT_LOSS}" with keep=None: no text is read. Name a file')
        return self
