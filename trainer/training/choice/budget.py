"""The time that a run may take (train.hours), and when it has to end to keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.schema import Train
    from trainer.telemetry.goodput import Goodput

# What comes after the last step. An evaluation may export the best weights, too.
ENDING = ("evaluation", "saving", "export", "export")
_MARGIN = 1.25  # an ending may take so many times as long as the longest one that was measured
_UNMEASURED = 0.05  # the share of the whole time that each part gets before it was measured


class Budget:
    """Whether a run has to end now. Its seconds count over all its starts, without the time in
    between.
    """

    def __init__(self, hours: float, goodput: Goodput) -> None:
        self._goodput, self.all_s = goodput, hours * 3600.0
        self._stepped_s, self._longest_step_s = goodput.stepped_s(), 0.0

    @classmethod
    def of(cls, train: Train, goodput: Goodput) -> Budget | None:
        """That of train.hours; None: the run may take any time."""
        return None if train.hours is None else cls(train.hours, goodput)

    def is_spent(self) -> bool:
        """Whether the step that comes now has to be the last one, so that the run still has time
        for its evaluation, its checkpoint and its export. Called once a step, on rank 0.
        """
        before, self._stepped_s = self._stepped_s, self._goodput.stepped_s()
        self._longest_step_s = max(self._longest_step_s, self._stepped_s - before)
        # this step, and those that a GPU still computes while the host has gone on
        return self._goodput.used_s() + 2 * self._longest_step_s + self.ending_s() > self.all_s

    def ending_s(self) -> float:
        """The seconds that are kept for what comes after the last step."""
        longest = self._goodput.longest
        unmeasured = self.all_s * _UNMEASURED
        return sum(longest.get(part, unmeasured) * _MARGIN for part in ENDING)

    def text(self, step: int, steps: int) -> str:
        """Why the run ends after `step`."""
        return (
            f"step {step} of {steps} is the last: train.hours={self.all_s / 3600:g}, of which "
            f"{self._goodput.used_s() / 3600:.4g} h were used; to evaluate, save and export took "
            f"up to {self.ending_s() / _MARGIN:.3g} s"
        )
