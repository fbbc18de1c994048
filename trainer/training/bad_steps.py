"""Steps without an update. fp16's loss scale skips some: a few are normal, many mean that the run
does not learn. Bad steps are those with a loss or gradient that is wrong (train.on_bad_step).
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import DivergedError, ResumeError
from trainer.files.atomic import write_json
from trainer.runtime.distributed import on_main

if TYPE_CHECKING:
    from trainer.config.schema import Train

logger = logging.getLogger(__name__)

FILE = "bad_steps.json"  # in the run folder: the windows that rollbacks leave out

# The median absolute deviation of a normal distribution is its standard deviation over this.
# Source: Rousseeuw & Croux 1993, "Alternatives to the Median Absolute Deviation", section 1.
NORMAL = 1.4826
# If losses hardly vary, rounding would look like a spike. A deviation below this share of the
# median counts as none.
LEAST_SHARE = 1e-3

# A dynamic scale halves at an overflow and doubles after a thousand good steps. If it cannot fall
# any further, or is static, more steps at the same scale help only if the rows caused the overflow.
# After ten windows of other rows they did not.
MOST_IN_A_ROW = 10
# A scale that begins at 2^32 needs 33 skipped steps to fall to 1, so the share of skipped steps
# means nothing before. After that, a run that skips more than half of its steps does not train.
JUDGED_FROM_STEP = 100
LARGEST_SHARE = 0.5


class RolledBack(Exception):
    """The run must go back to its last good checkpoint. FILE holds the window to leave out."""


@dataclass(frozen=True)
class Trouble:
    """What is wrong with a step."""

    kind: str  # "loss" or "gradient": it is not finite; "spike": the loss is far above the others
    loss: float  # over all ranks
    deviations: float | None = None  # a spike's distance from the median of the window
    is_rolled_back: bool = False  # an earlier pass found it, so the window was not computed

    def numbers(self) -> dict[str, float]:
        """The numbers for a line of metrics.jsonl."""
        values = {"bad_loss": self.loss, "deviations": self.deviations}
        return {k: v for k, v in values.items() if v is not None and math.isfinite(v)}

    def text(self) -> str:
        """The trouble in words, for a message."""
        if self.kind == "spike":
            return f"the loss is {self.loss:.6g}, {self.deviations:.1f} deviations above its like"
        return f"the {self.kind} is not finite"


@dataclass
class BadSteps:
    """The bad steps of a run so far, and the losses to compare with. Every checkpoint saves them,
    so that a resumed run judges like an undisturbed one.
    """

    steps: list[int] = field(default_factory=list[int])  # counted from 1
    losses: list[float] = field(default_factory=list[float])  # of the latest good steps

    def judge(self, loss: float, train: Train) -> Trouble | None:
        """What is wrong with the loss of all ranks; None, and it is remembered, if it is good."""
        if not math.isfinite(loss):
            return Trouble("loss", loss)
        if train.spike_z is None:
            return None
        if len(self.losses) == train.spike_window:
            deviations = robust_z(loss, self.losses)
            if deviations > train.spike_z:
                return Trouble("spike", loss, deviations)
        self.losses = [*self.losses, loss][-train.spike_window :]
        return None

    def count(self, step: int, trouble: Trouble, train: Train, *, rows: str) -> None:
        """Count a bad step. DivergedError if the run stops at one, or if there are too many.

        rows: this rank's first rows of the window, for the message.
        """
        if train.on_bad_step == "stop":
            raise DivergedError(
                f"{trouble.text()} at step {step} ({rows}).\nThe last good checkpoint is kept. "
                "Look at these rows, lower optim.lr or clip harder (optim.clip); or let the run "
                'leave such steps out (train.on_bad_step="skip").'
            )
        first = step - train.bad_steps_among
        recent = [*(earlier for earlier in self.steps if earlier > first), step]
        if len(recent) > train.bad_steps_allowed:
            raise DivergedError(
                f"{trouble.text()} at step {step} ({rows}); so were steps "
                f"{', '.join(map(str, recent[:-1]))}: more than train.bad_steps_allowed="
                f"{train.bad_steps_allowed} in {train.bad_steps_among} steps.\n"
                "The last good checkpoint is kept. Look at these rows, lower optim.lr, lengthen "
                "the warm-up, or clip harder (optim.clip)."
            )
        self.steps = [*self.steps, step]

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass
class SkippedSteps:
    """How many updates a run has skipped so far. Every checkpoint saves it."""

    total: int = 0
    in_a_row: int = 0  # the latest steps, if the loss scale cannot fall any further

    def count(self, *, is_skipped: bool, scale: float, least: float) -> None:
        """Count one step. scale: the scale after it; least: the lowest value of the scale."""
        self.total += is_skipped
        self.in_a_row = self.in_a_row + 1 if is_skipped and scale <= least else 0

    def refuse_too_many(self, step: int, *, last: int, scale: float) -> None:
        """DivergedError if so many updates were skipped that the run does not learn.

        step: the steps done so far, of `last`; scale: the present one.
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


def robust_z(value: float, sample: list[float]) -> float:
    """How many standard deviations `value` lies above the median of `sample`, by the median
    absolute deviation, which a few spikes in the sample do not move.
    """
    median = statistics.median(sample)
    spread = NORMAL * statistics.median(abs(one - median) for one in sample)
    return (value - median) / max(spread, LEAST_SHARE * abs(median), 1e-30)


def rolled_back(folder: Path) -> dict[int, str]:
    """{step: kind} of the windows that this run's rollbacks have left out, steps counted from 1.

    ResumeError when the file is there and does not hold what a run writes.
    """
    path = folder / FILE
    try:
        events = json.loads(path.read_text())
        return {int(event["step"]): str(event["kind"]) for event in events}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResumeError(
            f"{path} (the windows that rollbacks left out): got what cannot be read ({error}), "
            'want a list of {"step", "kind"}. Put it back from a copy, or start over with -r 1 '
            "(the old folder is moved aside)."
        ) from None


def leave_out_from_now_on(folder: Path, step: int, kind: str) -> None:
    """Record that the window of `step` is left out, before the run goes back. Rank 0 only."""
    events = {**rolled_back(folder), step: kind}
    write_json(folder / FILE, [{"step": at, "kind": what} for at, what in sorted(events.items())])


def roll_back(folder: Path, step: int, trouble: Trouble) -> None:
    """Leave the window of `step` out from now on. A collective."""
    on_main(lambda: leave_out_from_now_on(folder, step, trouble.kind))
    logger.warning(
        "step %d: %s; back to the last good checkpoint, without that window", step, trouble.text()
    )
