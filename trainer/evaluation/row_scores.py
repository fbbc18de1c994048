"""Scores of answers by row: what each row adds to a mean, how many are exact, equal questions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.metrics import own
from trainer.metrics.intervals import RowSums
from trainer.runtime.distributed import on_main

if TYPE_CHECKING:
    from trainer.protocol.task import Row


def sums_of_answers(scores: Mapping[str, float], rows: Sequence[Row]) -> dict[str, RowSums]:
    """What each answered row adds to those scores that are means of rows' own scores, over all rows
    or over those of a data set (em_nq).
    """
    answerable = [row for row in rows if row["answers"]]
    datasets = {str(row["dataset"]) for row in answerable if "dataset" in row}
    sums: dict[str, RowSums] = {}
    for name in {name for row in answerable for name in row["scores"]}:
        num_N = np.array([row["scores"].get(name, 0.0) for row in answerable], dtype=np.float64)
        sums[name] = RowSums(num_N, np.ones_like(num_N))
        for dataset in datasets:
            of_set_N = np.array([row.get("dataset") == dataset for row in answerable], np.float64)
            sums[f"{name}_{dataset}"] = RowSums(num_N * of_set_N, of_set_N)
    return {
        name: one
        for name, one in sums.items()
        if name in scores and math.isclose(one.value(), scores[name], rel_tol=1e-9, abs_tol=1e-12)
    }


def own_scores(specs: Sequence[str], run_folder: Path, rows: Sequence[Row]) -> dict[str, float]:
    """The user's own metrics (`metrics`) of predicted rows. A collective."""
    predictions = [row["prediction"] for row in rows]
    if not specs:
        return {}
    return on_main(lambda: own.scores(own.load(specs, run_folder), predictions, rows))


def exact_answers(scores: Mapping[str, float], rows: Sequence[Row]) -> tuple[int, int] | None:
    """How many answers of how many are exact, as published results count; None without a score."""
    if "em" not in scores:
        return None
    of = sum(bool(row["answers"]) for row in rows)
    return round(scores["em"] * of), of


def merge_equal_questions(
    raw: Sequence[Row], answers: Sequence[list[str]], rows_of_task: Iterable[Row]
) -> tuple[list[Row], list[list[str]]]:
    """The first row of each group of equal questions, with the references of the whole group, and
    the answers to that row. Two questions are equal when their texts and contexts are.
    """
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(rows_of_task):
        parts = [row.get(name) for name in ("question", "context", "contexts", "ctxs")]
        key = json.dumps(parts, sort_keys=True)
        groups.setdefault(key, []).append(number)
    rows: list[Row] = []
    for numbers in groups.values():
        references = [text for number in numbers for text in raw[number]["answers"]]
        rows.append({**raw[numbers[0]], "answers": references})
    return rows, [answers[first] for first, *_ in groups.values()]
