"""How a run spent its time since its first start, over all attempts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.files.atomic import read_json

KEY = "goodput"  # of status.json, and of a line of metrics.jsonl
KINDS = ("steps", "lost", "startup", "evaluation", "saving")


def _nothing() -> dict[str, float]:
    return dict.fromkeys(KINDS, 0.0)


@dataclass
class Goodput:
    """Seconds by kind; the remainder counts as waiting: queues, imports, machines that were down.

    steps: training steps that count. lost: steps that a kill made the run repeat. startup: the time
    before the first step of each attempt. saving: the time that the run waited for checkpoints.
    """

    first_start: float  # Unix time
    seconds: dict[str, float] = field(default_factory=_nothing)  # of this attempt and those before
    step: int = 0  # the step after which this attempt began
    # the most seconds that one evaluation, one save or one export took, in all attempts
    longest: dict[str, float] = field(default_factory=dict[str, float])
    _began: float = field(default_factory=lambda: time.monotonic())
    _stepping: float | None = None  # start of the first step of this attempt, moved by pauses

    @classmethod
    def of(cls, folder: Path) -> Goodput:
        """The seconds that earlier attempts wrote to status.json, or a new count."""
        status = read_json(folder / "status.json") or {}
        earlier: Any = status.get(KEY)
        try:
            seconds = {kind: float(earlier["seconds"][kind]) for kind in KINDS}
            longest: dict[str, Any] = earlier.get("longest", {})  # new on 2026-11-27
            return cls(
                float(earlier["first_start"]),
                seconds,
                int(status["step"]),
                {kind: float(value) for kind, value in longest.items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            return cls(time.time())

    def resume(self, step: int) -> None:
        """Continue after `step`: the time of later steps of an earlier attempt counts as lost."""
        if self.step > step:
            lost = self.seconds["steps"] * (self.step - step) / self.step
            self.seconds["steps"] -= lost
            self.seconds["lost"] += lost
        self.step = step

    def begin_steps(self) -> None:
        """End the startup: from now on, time counts as steps."""
        if self._stepping is None:
            self._stepping = time.monotonic()
            self.seconds["startup"] += self._stepping - self._began

    @contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Count the time of a block as `kind`, not as steps."""
        start = time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - start
            self.seconds[kind] += spent
            if self._stepping is not None:
                self._stepping += spent
            self.took(kind, spent)

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """Remember how long a block takes, if it is the longest of its kind. What it counts as is
        left to others: a save is written beside the steps.
        """
        start = time.monotonic()
        yield
        self.took(kind, time.monotonic() - start)

    def took(self, kind: str, spent_s: float) -> None:
        """Remember seconds of one evaluation, save or export, if they are the most so far."""
        self.longest[kind] = max(spent_s, self.longest.get(kind, 0.0))

    def stepped_s(self) -> float:
        """The seconds of all steps so far, in all attempts, with those that a kill undid."""
        steps = self.seconds["steps"] + self.seconds["lost"]
        return steps if self._stepping is None else steps + time.monotonic() - self._stepping

    def used_s(self) -> float:
        """The seconds of all attempts so far, without the time between them."""
        others = self.seconds["startup"] + self.seconds["evaluation"] + self.seconds["saving"]
        starting = 0.0 if self._stepping is not None else time.monotonic() - self._began
        return self.stepped_s() + others + starting

    def now(self) -> dict[str, Any]:
        """The values for status.json: the share of time spent on steps, first_start, and the
        seconds by kind, waiting included.
        """
        current = time.monotonic()
        seconds = dict(self.seconds)
        if self._stepping is None:
            seconds["startup"] += current - self._began
        else:
            seconds["steps"] += current - self._stepping
        wall = max(time.time() - self.first_start, sum(seconds.values()), 1e-9)
        seconds["waiting"] = wall - sum(seconds.values())
        rounded = {kind: round(value, 3) for kind, value in seconds.items()}
        return {
            "share": round(seconds["steps"] / wall, 4),
            "first_start": self.first_start,
            "seconds": rounded,
            "longest": {kind: round(value, 3) for kind, value in sorted(self.longest.items())},
        }
