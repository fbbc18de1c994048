"""Steps that fp16's loss scale leaves out: a few are normal, many are a run that does not learn."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainer.errors import DivergedError

# A dynamic scale halves at an overflow and doubles after a thousand good steps. When it has no
# lower value left, or is static, another try at the same scale helps only if the rows were to
# blame; ten windows of other rows say that they were not.
MOST_IN_A_ROW = 10
# A scale that begins at 2^32 has fallen to 1 after 33 skipped steps, so the share says nothing
# before; from then on more left out than done is no training.
JUDGED_FROM_STEP = 100
LARGEST_SHARE = 0.5


@dataclass
class SkippedSteps:
    """How many updates a run has left out so far; saved with every checkpoint."""

    total: int = 0
    in_a_row: int = 0  # of the latest steps, at a loss scale that cannot fall any further

    def count(self, *, is_skipped: bool, scale: float, least: float) -> None:
        """Take in one step. scale: after it; least: the value below which the scale never falls."""
        self.total += is_skipped
        self.in_a_row = self.in_a_row + 1 if is_skipped and scale <= least else 0

    def refuse_too_many(self, step: int, *, last: int, scale: float) -> None:
        """DivergedError when the run does not learn.

        step: done so far, of `last`; scale: as it is now.
        """
        is_stuck = self.in_a_row >= MOST_IN_A_ROW
        is_judged = step >= min(JUDGED_FROM_STEP, last)
        if is_stuck or (is_judged and self.total > LARGEST_SHARE * step):
            reason = (
                f"the last {self.in_a_row} at a scale that falls no further"
                if is_stuck
                else "more than half"
            )
            raise DivergedError(
                f"fp16: {self.total} of {step} steps were skipped ({reason}), because gradients "
                f"overflow at a loss scale of {scale:g}: this run does not learn.\n"
                'The last good checkpoint is kept. Use train.precision="bf16", lower optim.lr, '
                "or in the DeepSpeed file let the scale begin lower (fp16.initial_scale_power), "
                "fall further (fp16.min_loss_scale) or change at all (fp16.loss_scale=0)."
            )

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)
