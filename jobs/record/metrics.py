"""Reads numbers from metrics.jsonl: from its end, where that is enough, and from single lines."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trainer.files.atomic import bounded_lines, open_file, read_small

if TYPE_CHECKING:
    from jobs.record.paths import RunFolder

TAILS = (
    8 << 10,
    256 << 10,
)  # bytes of metrics.jsonl; the second when one line of gradient norms fills the first
LIMIT = 1e100  # no metric: beyond it sums and squares overflow


def last_metrics(folder: RunFolder) -> dict[str, float]:
    """The last `step` and the last value of every metric that stands near the end of metrics.jsonl.

    Gradient norms by parameter are left out. Evaluations further back are taken from
    score_list.json.
    """
    metrics: dict[str, float] = {}
    is_whole = True
    for size in TAILS:
        lines, is_whole = _tail(folder.metrics, size)
        metrics = _last_values(lines)
        if is_whole or metrics:
            break
    if not is_whole and not any("/" in name for name in metrics):
        with contextlib.suppress(
            FileNotFoundError, ValueError, IndexError, TypeError, KeyError, RecursionError
        ):
            score = json.loads(read_small(folder.path / "score_list.json"))[-1]
            metrics = {
                name: value for name, value in numbers(score).items() if name != "step"
            } | metrics
    return metrics


def _tail(path: Path, size: int) -> tuple[list[bytes], bool]:
    """The whole lines among the last `size` bytes of a file, and whether these are all it has."""
    try:
        with open_file(path) as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(length - size, 0))
            content = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return [], True
    lines = content.split(b"\n")[:-1]  # what follows the last line break is being written
    return (lines, True) if length <= size else (lines[1:], False)


def _last_values(lines: list[bytes]) -> dict[str, float]:
    """The newest training line and the newest evaluation, merged.

    Of a long tail only two lines are parsed.
    """
    metrics: dict[str, float] = {}
    has_loss = has_scores = False
    for line in reversed(lines):
        is_scores = b'"valid/' in line  # that of a set (valid_nq/loss) has it, too
        if (has_scores if is_scores else has_loss) or b'"grad_norm/' in line:
            continue
        values = numbers_in(line)
        metrics = values | metrics
        has_scores, has_loss = (
            has_scores or (is_scores and bool(values)),
            has_loss or "loss" in values,
        )
        if has_loss and has_scores:
            break
    return metrics


def numbers_in(line: bytes) -> dict[str, float]:
    """The finite numbers of one line of metrics.jsonl; empty for a line that cannot be read."""
    try:
        return numbers(json.loads(line))
    except (ValueError, RecursionError):
        return {}


def numbers(values: Any) -> dict[str, float]:
    """The finite numbers among the values of a dictionary; empty for anything else."""
    if not isinstance(values, dict):
        return {}
    items = cast("dict[str, Any]", values).items()
    return {
        name: value
        for name, value in items
        if type(value) in (int, float) and -LIMIT < value < LIMIT
    }


def evaluations(folder: RunFolder) -> Iterable[dict[str, float]]:
    """Every evaluation in order, from score_list.json; when that is absent or malformed, from
    metrics.jsonl.
    """
    try:
        listed: Any = json.loads(read_small(folder.path / "score_list.json"))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        listed = None
    if isinstance(listed, list) and listed:
        return [numbers(entry) for entry in cast("list[Any]", listed)]
    try:
        with open_file(folder.metrics) as file:
            lines = (line for line in bounded_lines(file) if b'"valid' in line)
            return [numbers_in(line) for line in lines]
    except (FileNotFoundError, NotADirectoryError):
        return []
