"""Where a run's time went since it was first started, over all its attempts."""

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
    """Seconds by kind; what is none of them is waiting: queues, imports, machines that were down.

    steps: training steps that count. lost: steps done again after a kill. startup: until the first
    step of each attempt. saving: what the run waited for.
    """

    first_start: float  # Unix time
    seconds: dict[str, float] = field(default_factory=_nothing)  # of this attempt and those before
    step: int = 0  # that this attempt began behind
    _began: float = field(default_factory=lambda: time.monotonic())
    _stepping: float | None = None  # when the first step of this attempt began, later for pauses

    @classmethod
    def of(cls, folder: Path) -> Goodput:
        """What earlier attempts left in status.json, to go on from."""
        status = read_json(folder / "status.json") or {}
        earlier: Any = status.get(KEY)
        try:
            seconds = {kind: float(earlier["seconds"][kind]) for kind in KINDS}
            return cls(float(earlier["first_start"]), seconds, int(status["step"]))
        except (KeyError, TypeError, ValueError):
            return cls(time.time())

    def resume(self, step: int) -> None:
        """The run goes on behind `step`: steps that an earlier attempt made beyond it are lost."""
        if self.step > step:
            lost = self.seconds["steps"] * (self.step - step) / self.step
            self.seconds["steps"] -= lost
            self.seconds["lost"] += lost
        self.step = step

    def begin_steps(self) -> None:
        """The start-up is over."""
        if self._stepping is None:
            self._stepping = time.monotonic()
            self.seconds["startup"] += self._stepping - self._began

    @contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Time inside belongs to `kind`, not to steps."""
        start = time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - start
            self.seconds[kind] += spent
            if self._stepping is not None:
                self._stepping += spent

    def now(self) -> dict[str, Any]:
        """As status.json has it: first_start, seconds by kind, waiting among them, and their share
        that was steps.
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
        }
