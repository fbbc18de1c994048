"""What the page reads of a run: its curves, the lines that came after them, generated answers."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from jobs.record.metrics import numbers
from jobs.report.curves import Place, has_gradient_norms, read_curves, thin
from jobs.serve.job_view import metric_lines_from
from trainer.files.atomic import open_file

MOST_LINES = 2000  # in one event of the stream; after more of them the page reads the curves anew
MOST_ROWS, LONGEST_TEXT = 200, 4000  # of generated answers; a text is cut after so many letters


def curves_of(path: Path) -> dict[str, Any]:
    """{"series": metric -> [[step, seconds since the first line, mean, low, high], ...], "place",
    "began": ISO time of the first line}. Empty when there is no file.
    """
    curves = read_curves(path)
    series = {
        name: [list(bucket) for bucket in thin(points)] for name, points in curves.points.items()
    }
    place = f"{curves.place.file}.{curves.place.end}"
    return {"series": series, "place": place, "began": curves.began}


def place_of(text: str) -> Place:
    """The place that a text of `curves_of` means. ValueError for any other text."""
    file, _, end = text.partition(".")
    return Place(int(file), int(end))


def lines_since(path: Path, place: Place) -> tuple[list[dict[str, Any]] | None, Place]:
    """The lines after a place, and the place after them. None instead of lines when the file was
    replaced or has grown by more than MOST_LINES: then the page reads the curves anew.
    """
    try:
        with open_file(path) as file:
            facts = os.fstat(file.fileno())
            is_replaced = facts.st_ino != place.file or facts.st_size < place.end
            if is_replaced:
                return (None if facts.st_size else []), place
            lines, end = metric_lines_from(file, place.end)
    except OSError:
        return [], place
    if len(lines) > MOST_LINES:
        return None, place
    shown_lines = [
        {**numbers(line), "at": line.get("at")} for line in lines if not has_gradient_norms(line)
    ]
    return shown_lines, Place(place.file, end)


def answers_of(run: Path, step: int | None) -> dict[str, Any]:
    """{"steps": at which answers were generated, "step", "rows": the answers of that step}.

    step: None for the last one.
    """
    files: dict[int, Path] = {}
    for path in (run / "answers").glob("step-*.jsonl"):
        with suppress(ValueError):
            files[int(path.stem.removeprefix("step-"))] = path
    if step is None:
        step = max(files, default=None)
    rows: list[dict[str, Any]] = []
    if step in files:
        with suppress(OSError), open_file(files[step]) as file:
            rows = metric_lines_from(file, 0)[0][:MOST_ROWS]
    texts = [{name: _text(value) for name, value in row.items()} for row in rows]
    return {"steps": sorted(files), "step": step, "rows": texts}


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"
