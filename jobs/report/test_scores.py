"""The scores of the test split (--test), as a run has written them into test.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from jobs.record.paths import RunFolder
from jobs.report.text import number_text
from trainer.config.scores.direction import direction_of
from trainer.files.atomic import read_json
from trainer.metrics.test_record import FILE

PREFIX = "test/"


@dataclass(frozen=True)
class TestScore:
    """One score, with the ends of its 95% interval; None where it is no sum over rows."""

    __test__ = False  # pytest would take it for a test

    value: float
    low: float | None
    high: float | None
    is_least_best: bool | None

    @property
    def text(self) -> str:
        """ "0.5120 [0.4800, 0.5400]"."""
        if self.low is None or self.high is None:
            return number_text(self.value)
        return f"{number_text(self.value)} [{number_text(self.low)}, {number_text(self.high)}]"


@dataclass(frozen=True)
class TestResult:
    """What became of the test split of one run. model: best or final."""

    __test__ = False

    model: str
    rows: int | None
    seconds: float | None
    scores: dict[str, TestScore]  # by "test/em"

    def plain(self) -> dict[str, Any]:
        """It as plain values."""
        return asdict(self)


def read_test(
    folder: RunFolder, directions: Mapping[str, Literal["min", "max"]]
) -> TestResult | None:
    """The test of a run; None where there was none, or its file is not as a run writes it.

    directions: what the experiment says of metrics ("valid/em": "max").
    """
    document: Any = read_json(folder.path / FILE)
    if not isinstance(document, dict):
        return None
    values = cast("dict[str, Any]", document)
    listed: Any = values.get("scores")
    scores: dict[str, TestScore] = {}
    for name, one in cast("dict[str, Any]", listed).items() if isinstance(listed, dict) else ():
        own = cast("dict[str, Any]", one) if isinstance(one, dict) else {}
        value = _number(own.get("value"))
        if value is None:
            continue
        direction = directions.get(f"valid/{name}") or direction_of(name)
        is_least = None if direction is None else direction == "min"
        low, high = _number(own.get("low")), _number(own.get("high"))
        scores[f"{PREFIX}{name}"] = TestScore(value, low, high, is_least)
    rows = _number(values.get("rows"))
    return TestResult(
        str(values.get("model", "")),
        None if rows is None else int(rows),
        _number(values.get("seconds")),
        scores,
    )


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def best_test(tests: Sequence[TestResult | None], metric: str) -> float | None:
    """The best value of a score among several tests; None when fewer than two have it, or when it
    is not known which value is better.
    """
    scores = [test.scores[metric] for test in tests if test is not None and metric in test.scores]
    directions = {score.is_least_best for score in scores}
    if len(scores) < 2 or len(directions) > 1 or None in directions:
        return None
    values = [score.value for score in scores]
    return min(values) if scores[0].is_least_best else max(values)
