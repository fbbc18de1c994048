"""The learning rate as a pure function of the step, so that resuming needs no scheduler object."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config.schema import Schedule

DEFAULT_EVERY = 1000  # steps between two evaluations, and two checkpoints
_INVERSE_SQRT_STEPS = 10_000  # of inverse_sqrt without a warm-up, as transformers has it


def factor(schedule: Schedule, step: int, total: int) -> float:
    """What the base rate is multiplied with at 0-based optimizer step `step` of `total`.

    The first warm-up step has factor 0, as published recipes were trained. Source:
    transformers.get_scheduler.
    """
    warmup = schedule.warmup_of(total)
    if step < warmup:
        return step / warmup
    if schedule.shape in ("constant", "reduce_on_plateau"):
        return 1.0
    if schedule.shape == "inverse_sqrt":
        scale = warmup or _INVERSE_SQRT_STEPS
        return 1.0 / math.sqrt((step - warmup + scale) / scale)
    start = warmup
    if schedule.shape == "wsd":
        start = max(warmup, total - math.ceil(schedule.decay_ratio * total))
    progress = max(0.0, min(1.0, (step - start) / max(1, total - start)))
    return schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * _fallen(schedule, progress)


def _fallen(schedule: Schedule, progress: float) -> float:
    """The factor, 1 to 0, once this share of the steps in which the rate falls is done."""
    shape = schedule.decay if schedule.shape == "wsd" else schedule.shape
    if shape == "linear":
        return 1.0 - progress
    if shape == "polynomial":
        return (1.0 - progress) ** schedule.power
    if shape == "1-sqrt":
        return 1.0 - math.sqrt(progress)
    assert shape == "cosine", f"no factor for {shape}"
    return 0.5 * (1.0 + math.cos(math.pi * (schedule.cycles * progress % 1.0)))


@dataclass
class Plateau:
    """The memory of reduce_on_plateau: the rate falls by `factor` after more than `patience` bad
    evaluations.

    Source: torch.optim.lr_scheduler.ReduceLROnPlateau, mode "min", relative threshold 1e-4.
    """

    factor: float = 1.0
    best: float = math.inf
    bad: int = 0

    def update(self, value: float, schedule: Schedule) -> None:
        """Take in one evaluation's loss."""
        if schedule.shape != "reduce_on_plateau":
            return
        if value < self.best * (1.0 - 1e-4):
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        if self.bad > schedule.patience:
            self.factor, self.bad = self.factor * schedule.factor, 0

    def state(self) -> dict[str, Any]:
        """As JSON; infinity is not JSON, so "no evaluation yet" is None."""
        return {**asdict(self), "best": None if math.isinf(self.best) else self.best}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Plateau:
        return cls(**{**state, "best": math.inf if state["best"] is None else state["best"]})


def log_interval(steps: int) -> int:
    """Every how many of `steps` steps a line is logged by default: 1, 2 or 5 times a power of ten,
    a hundred to two hundred and fifty lines in all.
    """
    most = min(steps // 100, DEFAULT_EVERY)
    fitting = [n * 10**power for power in range(4) for n in (1, 2, 5) if n * 10**power <= most]
    return max(fitting, default=1)
