"""The metrics of one run over its steps and over time, read from metrics.jsonl and thinned."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from jobs.record.metrics import numbers
from trainer.files.atomic import bounded_lines, open_file

MOST_POINTS = 400  # of one metric, after thinning
MOST_METRICS = 80  # of one run; further ones are left out
# bytes; of a longer metrics.jsonl only every second, third, ... training line is read
SIZE_READ_WHOLE = 16 << 20


class Point(NamedTuple):
    """One value of a metric. seconds: since the first line of the file."""

    step: int
    seconds: float
    value: float


class Bucket(NamedTuple):
    """Neighbouring points as one: the mean of each number, and the range of their values."""

    step: float
    seconds: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Place:
    """How far a metrics.jsonl was read. file: its inode. end: where its last whole line ends."""

    file: int = 0
    end: int = 0


@dataclass
class Curves:
    """The points of every metric. began: the ISO time of the first line."""

    points: dict[str, list[Point]] = field(default_factory=dict[str, list[Point]])
    place: Place = Place()
    began: str | None = None

    def add(self, line: dict[str, Any]) -> None:
        """Add the numbers of one line, unless they are gradient norms."""
        at: Any = line.get("at")
        self.began = self.began or at
        values = numbers(line)
        step = values.pop("step", None)
        if step is None or has_gradient_norms(line):
            return
        seconds = 0.0
        with suppress(TypeError, ValueError):  # a time is missing or malformed
            interval = datetime.fromisoformat(at) - datetime.fromisoformat(self.began or "")
            seconds = interval.total_seconds()
        for name, value in values.items():
            if name in self.points or len(self.points) < MOST_METRICS:
                self.points.setdefault(name, []).append(Point(int(step), seconds, value))


def has_gradient_norms(line: dict[str, Any]) -> bool:
    """Whether a line of metrics.jsonl holds the gradient norm of each parameter."""
    return any(name.startswith("grad_norm/") for name in line)


def read_curves(path: Path) -> Curves:
    """The curves of a metrics.jsonl; empty when there is no such file, or none that can be read.
    Skips malformed lines, and a last line that is still being written.

    Of a very long file, every evaluation is read but only some training lines (SIZE_READ_WHOLE).
    """
    curves = Curves()
    end = 0
    with suppress(OSError), open_file(path) as file:
        facts = os.fstat(file.fileno())
        stride = 1 + facts.st_size // SIZE_READ_WHOLE
        for count, text in enumerate(bounded_lines(file)):
            if not text.endswith(b"\n"):
                break
            end += len(text)
            is_evaluation = b"/" in text  # names such as "valid/loss"
            if is_evaluation or count % stride == 0:
                with suppress(ValueError, RecursionError):
                    line: Any = json.loads(text)
                    if isinstance(line, dict):
                        curves.add(cast("dict[str, Any]", line))
        curves.place = Place(facts.st_ino, end)
    return curves


def thin(points: Sequence[Point], limit: int = MOST_POINTS) -> list[Bucket]:
    """At most `limit` buckets of equally many neighbours; each point is in one, so that no spike is
    lost.
    """
    size = max(1, math.ceil(len(points) / limit))
    buckets: list[Bucket] = []
    for begin in range(0, len(points), size):
        group = points[begin : begin + size]
        values = [point.value for point in group]
        bucket = Bucket(
            step=sum(point.step for point in group) / len(group),
            seconds=math.fsum(point.seconds for point in group) / len(group),
            mean=math.fsum(values) / len(values),
            low=min(values),
            high=max(values),
        )
        buckets.append(bucket)
    return buckets
