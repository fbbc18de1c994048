"""Compares the time of a run with its prediction, and names the part that took longer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.plan.time.run_time import run_time
from trainer.plan.time.text import duration, shares
from trainer.runtime import distributed

if TYPE_CHECKING:
    from trainer.plan.memory.subject import Subject
    from trainer.plan.time.target import Target
    from trainer.telemetry.meter import Meter
    from trainer.telemetry.run_record import RunRecord

logger = logging.getLogger(__name__)

LATE = 1.15  # a run that takes this many times its prediction is late
KEY = "time"  # the key of predicted seconds in memory_plan.json, of measured in status.json
# The parts of a step that a run can time, and the parts of a prediction that each consists of.
_OF_PREDICTION = {
    "forward and backward": ("matmul", "attention", "memory", "launches"),
    "update": ("optimizer", "communication"),
    "input": ("input",),
}


@dataclass(frozen=True)
class Comparison:
    """The mean step of a run, compared with its prediction."""

    predicted_s: float
    measured_s: float
    late_part: str | None  # the part with the largest delay; None: the run was not late
    parts: dict[str, list[float]]  # [predicted, measured] seconds of a step

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def text(self) -> str:
        """The comparison as one line."""
        ratio = self.measured_s / self.predicted_s
        opening = (
            f"time: {duration(self.measured_s)} a step, {duration(self.predicted_s)} predicted "
            f"({ratio - 1:+.0%})"
        )
        if self.late_part is None:
            return opening
        predicted, measured = self.parts[self.late_part]
        return (
            f"{opening}; late is {self.late_part}: {duration(measured)}, {duration(predicted)} "
            "predicted"
        )


def predict_time(subject: Subject, target: Target) -> dict[str, Any] | None:
    """Predict the time of a run on this device, and log it in one line. None if the rates of the
    device are not known. ConfigError for a calibration of another machine.
    """
    rates = target.rates
    if rates is None:
        return None
    if rates.machine:
        from trainer.plan.time.calibration import machine as this_machine

        here = this_machine()
        for key in ("device", "processor"):
            theirs, ours = rates.machine.get(key), here[key]
            if theirs != ours:
                raise ConfigError(
                    f"--device: a calibration of another machine ({rates.name}): its {key} is "
                    f"{theirs!r}, here it is {ours!r}. Calibrate here: python -m trainer "
                    "calibrate-device."
                )
    time = run_time(subject, rates, target.cluster)
    logger.info(
        "time: %s a step predicted (%s), %s in all",
        duration(time.step.total),
        shares(time.step),
        duration(time.total_s),
    )
    return time.plain()


def tell(meter: Meter, record: RunRecord) -> None:
    """Log and record how long the steps took compared with their prediction, if there is one."""
    comparison = compare_time(meter)
    if comparison is None:
        return
    if distributed.is_main():
        (logger.info if comparison.late_part is None else logger.warning)("%s", comparison.text)
    record.time = comparison.plain()


def compare_time(meter: Meter) -> Comparison | None:
    """Compare the timed steps (all but the first) with their prediction. None if there are none."""
    count, prediction = meter.timed_steps, meter.prediction
    if count == 0 or prediction is None:
        return None
    measured = {name: value / count for name, value in meter.parts.items()}
    parts = {
        name: [sum(prediction["step"][one] for one in names), measured[name]]
        for name, names in _OF_PREDICTION.items()
    }
    together, whole = sum(measured.values()), float(prediction["step_s"])
    late = max(parts, key=lambda name: parts[name][1] - parts[name][0])
    return Comparison(whole, together, late if together > LATE * whole else None, parts)


def of_plan(memory: Mapping[str, Any] | None, file: Path) -> Mapping[str, Any] | None:
    """The prediction in the file of a run's memory plan, if there is one."""
    from trainer.files.atomic import read_json

    if memory is None:
        return None
    return (read_json(file) or {}).get(KEY)
