"""The curves of one run: read from metrics.jsonl, thinned, and drawn as SVG without any library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import chain
from typing import TYPE_CHECKING

from jobs.record.metrics import numbers_in
from jobs.report.text import visible

if TYPE_CHECKING:
    from jobs.record.paths import RunFolder

MOST_POINTS = 400
# bytes; of a longer metrics.jsonl only every second, third, ... training line is read
SIZE_READ_WHOLE = 16 << 20
LOG_SCALE_FROM = 40.0  # largest over smallest value
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440.0, 170.0, 42.0, 8.0, 8.0, 20.0
SPARK_WIDTH, SPARK_HEIGHT = 110.0, 26.0
MOST_DOTS = 40  # evaluations that are drawn as dots besides their line

Point = tuple[int, float]


@dataclass(frozen=True)
class Curves:
    """(step, value) of the training loss and of every validation metric."""

    loss: list[Point] = field(default_factory=list[Point])
    scores: dict[str, list[Point]] = field(default_factory=dict[str, list[Point]])


@dataclass(frozen=True)
class Bucket:
    """Neighbouring points as one: their mean, and how far they reach."""

    step: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Scale:
    """From values to places in a picture."""

    first: float
    last: float
    low: float
    high: float
    is_log: bool

    @classmethod
    def around(cls, buckets: Sequence[Bucket]) -> Scale:
        """Wide enough for the means of all `buckets`."""
        means = [bucket.mean for bucket in buckets]
        low, high = min(means), max(means)
        is_log = low > 0 and high / low > LOG_SCALE_FROM
        margin = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
        low, high = (low / 1.1, high * 1.1) if is_log else (low - margin, high + margin)
        steps = [bucket.step for bucket in buckets]
        return cls(min(steps), max(max(steps), min(steps) + 1), low, high, is_log)

    def x(self, step: float) -> float:
        share = (step - self.first) / (self.last - self.first)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        return HEIGHT - BOTTOM - self._share(value) * (HEIGHT - TOP - BOTTOM)

    def _share(self, value: float) -> float:
        if self.is_log:
            low = math.log(self.low)  # a quotient of the values would overflow
            return (math.log(value) - low) / (math.log(self.high) - low)
        return (value - self.low) / (self.high - self.low)


def read(folder: RunFolder, prefix: str = "valid/") -> Curves:
    """The curves of metrics.jsonl; empty ones when there is none. Torn lines are passed over."""
    curves = Curves()
    word = f'"{prefix}'.encode()
    try:
        stride = 1 + folder.metrics.stat().st_size // SIZE_READ_WHOLE
        with folder.metrics.open("rb") as file:
            for count, line in enumerate(file):
                if b'"grad_norm/' not in line and (count % stride == 0 or word in line):
                    _add(curves, numbers_in(line), prefix)
    except (FileNotFoundError, NotADirectoryError):
        pass
    return curves


def _add(curves: Curves, values: dict[str, float], prefix: str) -> None:
    if "step" not in values:
        return
    step = int(values["step"])
    if "loss" in values:
        curves.loss.append((step, values["loss"]))
    for name, value in values.items():
        if name.startswith(prefix):
            curves.scores.setdefault(name, []).append((step, value))


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Bucket]:
    """At most `most` buckets of as many neighbours each.

    Every point is in one, so that no spike is lost.
    """
    size = max(1, math.ceil(len(points) / most))
    groups = [points[begin : begin + size] for begin in range(0, len(points), size)]
    return [_bucket(group) for group in groups]


def _bucket(points: Sequence[Point]) -> Bucket:
    values = [value for _, value in points]
    mean_step = sum(step for step, _ in points) / len(points)
    return Bucket(mean_step, math.fsum(values) / len(values), min(values), max(values))


def chart(curves: Curves) -> str:
    """An SVG of the training loss (mean and range) and the validation loss; "" without either."""
    loss, valid = thinned(curves.loss), thinned(curves.scores.get("valid/loss", []))
    if not loss and not valid:
        return ""
    scale = Scale.around([*loss, *valid])
    parts = [*_axes(scale)]
    if any(bucket.low < bucket.high for bucket in loss):
        outline = chain(((b.step, b.high) for b in loss), ((b.step, b.low) for b in reversed(loss)))
        parts.append(f'<polygon class="band" points="{_places(scale, outline)}"/>')
    parts += [_line(scale, loss, "loss"), _line(scale, valid, "valid/loss")]
    if len(valid) <= MOST_DOTS:
        dots = (
            f'<circle cx="{scale.x(b.step):.1f}" cy="{scale.y(b.mean):.1f}" r="2.2"/>'
            for b in valid
        )
        parts.append(f'<g class="dots">{"".join(dots)}</g>')
    facts = f'data-x="{scale.first:g} {scale.last:g}" data-y="{scale.low!r} {scale.high!r}"'
    label = f"Loss over steps {scale.first:g} to {scale.last:g}"
    box = (
        f'data-box="{LEFT:g} {WIDTH - RIGHT:g} {TOP:g} {HEIGHT - BOTTOM:g}" '
        f'data-log="{int(scale.is_log)}"'
    )
    head = (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{label}" '
        f"{facts} {box}>"
    )
    return f"{head}{''.join(parts)}</svg>"


def _line(scale: Scale, buckets: Sequence[Bucket], name: str) -> str:
    if not buckets:
        return ""
    kind = "valid" if "/" in name else "train"
    places = _places(scale, ((bucket.step, bucket.mean) for bucket in buckets))
    return f'<polyline class="{kind}" data-name="{name}" points="{places}"/>'


def _places(scale: Scale, points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{scale.x(step):.1f},{scale.y(value):.1f}" for step, value in points)


def _axes(scale: Scale) -> Iterable[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for value in ticks(scale.low, scale.high, is_log=scale.is_log):
        y = scale.y(value)
        yield f'<path class="grid" d="M{LEFT:g} {y:.1f}H{right:g}"/>'
        yield f'<text x="{LEFT - 6:g}" y="{y + 3.5:.1f}" text-anchor="end">{value:g}</text>'
    steps = [tick for tick in ticks(scale.first, scale.last, wanted=5) if tick == int(tick)]
    for step in steps:
        anchor = "end" if scale.x(step) > right - 14 else "middle"
        place = f'x="{scale.x(step):.1f}" y="{bottom + 14:g}" text-anchor="{anchor}"'
        yield f"<text {place}>{_brief(step)}</text>"


def ticks(low: float, high: float, *, wanted: int = 4, is_log: bool = False) -> list[float]:
    """Round numbers between `low` and `high`, about `wanted` of them."""
    if is_log:
        exponents = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        decades = [10.0**exponent for exponent in exponents]
        return (
            decades[:: 1 + len(decades) // 6]
            if len(decades) >= 2
            else ticks(low, high, wanted=wanted)
        )
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.75)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{count * step:.12g}") for count in range(first, last + 1)]


def _brief(step: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if step >= size and step / size == round(step / size, 1):
            return f"{step / size:g}{letter}"
    return f"{step:g}"


def sparkline(name: str, points: Sequence[Point]) -> str:
    """A small SVG of one metric with its last value marked."""
    buckets = thinned(points, 60)
    low, high = min(b.mean for b in buckets), max(b.mean for b in buckets)
    first, width = buckets[0].step, max(buckets[-1].step - buckets[0].step, 1)

    def place(bucket: Bucket) -> tuple[float, float]:
        x = 3 + (bucket.step - first) / width * (SPARK_WIDTH - 6)
        share = (bucket.mean - low) / (high - low) if high > low else 0.5
        return x, SPARK_HEIGHT - 4 - share * (SPARK_HEIGHT - 8)

    places = [place(bucket) for bucket in buckets]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dot = f'<circle cx="{places[-1][0]:.1f}" cy="{places[-1][1]:.1f}" r="2.2"/>'
    label = escape(visible(name))
    box = f"0 0 {SPARK_WIDTH:g} {SPARK_HEIGHT:g}"
    return (
        f'<svg class="spark" viewBox="{box}" role="img" aria-label="{label}"><polyline '
        f'points="{line}"/>{dot}</svg>'
    )
