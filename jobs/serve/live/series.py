"""The metrics of a run over its steps and over time, thinned; and the lines that came since."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jobs.record.metrics import numbers
from jobs.report.curves import SIZE_READ_WHOLE, thinned
from jobs.serve.job_view import metric_lines_from

MOST_SERIES = 80
MOST_LINES = 2000  # that a page is told at once; after more it reads the curves anew
Point = tuple[int, float]


@dataclass(frozen=True)
class Place:
    """How far a metrics.jsonl was read: the file, and the byte behind the last whole line."""

    file: int
    end: int


def curves_of(path: Path) -> dict[str, Any]:
    """{"series": metric -> [[step, seconds since the first line, mean, low, high], ...], "place",
    "began": ISO time of the first line}. Empty where there is no file.
    """
    values: dict[str, list[Point]] = {}
    times: dict[str, list[Point]] = {}
    began = None
    try:
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            lines, end = metric_lines_from(file, 0)
    except (FileNotFoundError, NotADirectoryError):
        return {"series": {}, "place": "0.0", "began": None}
    stride = 1 + facts.st_size // SIZE_READ_WHOLE
    for count, line in enumerate(lines):
        began = began or line.get("at")
        if count % stride == 0 or any("/" in name for name in line):
            _add(line, began, values, times)
    return {"series": _thinned(values, times), "place": f"{facts.st_ino}.{end}", "began": began}


def _add(
    line: dict[str, Any],
    began: Any,
    values: dict[str, list[Point]],
    times: dict[str, list[Point]],
) -> None:
    found = numbers(line)
    step = found.pop("step", None)
    if step is None or any(name.startswith("grad_norm/") for name in found):
        return
    at = _seconds(began, line.get("at"))
    for name, value in found.items():
        if name not in values and len(values) >= MOST_SERIES:
            continue
        values.setdefault(name, []).append((int(step), value))
        times.setdefault(name, []).append((int(step), at))


def _thinned(
    values: dict[str, list[Point]], times: dict[str, list[Point]]
) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    for name, points in values.items():
        buckets = zip(thinned(points), thinned(times[name]), strict=True)
        found[name] = [[one.step, at.mean, one.mean, one.low, one.high] for one, at in buckets]
    return found


def _seconds(began: Any, at: Any) -> float:
    """Seconds between two ISO times; 0 where one is none."""
    with suppress(TypeError, ValueError):
        found = (datetime.fromisoformat(at) - datetime.fromisoformat(began)).total_seconds()
        return found if math.isfinite(found) else 0.0
    return 0.0


def place_of(text: str) -> Place:
    """The place that `curves_of` told. ValueError for another text."""
    file, _, end = text.partition(".")
    return Place(int(file), int(end))


def lines_since(path: Path, place: Place) -> tuple[list[dict[str, Any]] | None, Place]:
    """The lines behind a place, and the place behind them. None: the file is another one, or has
    grown by much; its curves are to be read anew.
    """
    try:
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            is_other = facts.st_ino != place.file or facts.st_size < place.end
            if is_other:
                return (None if facts.st_size else []), place
            lines, end = metric_lines_from(file, place.end)
    except (FileNotFoundError, NotADirectoryError):
        return [], place
    if len(lines) > MOST_LINES:
        return None, place
    kept = [
        {**numbers(line), "at": line.get("at")}
        for line in lines
        if not any(name.startswith("grad_norm/") for name in line)
    ]
    return kept, Place(place.file, end)


def answers_of(run: Path, step: int | None) -> dict[str, Any]:
    """{"steps": those at which answers were generated, "step", "rows": of one step, the last unless
    given}. Rows are cut to the first 200, texts to 4,000 letters.
    """
    found: dict[int, Path] = {}
    for path in (run / "answers").glob("step-*.jsonl"):
        with suppress(ValueError):
            found[int(path.stem.removeprefix("step-"))] = path
    chosen = step if step is not None else max(found, default=None)
    rows: list[dict[str, Any]] = []
    if chosen in found:
        with found[chosen].open("rb") as file:
            rows = metric_lines_from(file, 0)[0][:MOST_ROWS]
    cut = [{name: _text(value) for name, value in row.items()} for row in rows]
    return {"steps": sorted(found), "step": chosen, "rows": cut}


MOST_ROWS, LONGEST_TEXT = 200, 4000


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"
