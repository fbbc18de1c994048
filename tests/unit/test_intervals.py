"""Intervals by bootstrap over rows, against a slow and obvious twin."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.metrics.intervals import RESAMPLES, SEED, RowSums, intervals


def twin(num: list[float], den: list[float]) -> tuple[float, float]:
    """Every row of every draw, one by one."""
    draws, values = np.random.default_rng([SEED, len(num)]), []
    for _ in range(RESAMPLES):
        rows = [int(row) for row in draws.integers(len(num), size=len(num))]
        count = sum(den[row] for row in rows)
        if count:
            values.append(sum(num[row] for row in rows) / count)
    values.sort()
    ends = []
    for share in (0.025, 0.975):  # between the two values around it
        place = share * (len(values) - 1)
        low = values[int(place)]
        ends.append(low + (values[min(int(place) + 1, len(values) - 1)] - low) * (place % 1))
    return ends[0], ends[1]


def test_an_interval_is_that_of_the_obvious_twin_and_all_scores_share_their_draws() -> None:
    numbers = np.random.default_rng(0)
    num, den = numbers.normal(3.0, 1.0, 40), numbers.integers(0, 5, 40).astype(float)
    loss, twice = RowSums(num * den, den), RowSums(2 * num * den, den)
    found = intervals({"loss": loss, "twice": twice})
    assert found["loss"] == pytest.approx(twin([*loss.num_N], [*den]), rel=1e-12)
    assert found["twice"] == pytest.approx([2 * end for end in found["loss"]], rel=1e-12)
    assert found == intervals({"loss": loss, "twice": twice}), "seeded"
    assert found["loss"][0] < loss.value() < found["loss"][1]


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    numbers, hits = np.random.default_rng(1), 0
    for _ in range(60):
        row = numbers.random(80) < 0.3
        low, high = intervals({"em": RowSums(row.astype(float), np.ones(80))})["em"]
        hits += low <= 0.3 <= high
    assert 51 <= hits <= 60


def test_rows_that_count_for_nothing_have_no_interval_and_a_sure_score_has_no_width() -> None:
    none, sure = np.zeros(5), np.ones(5)
    found = intervals({"none": RowSums(none, none), "sure": RowSums(sure, sure)})
    assert found == {"sure": (1.0, 1.0)}
    one = intervals({"one": RowSums(np.array([1.0, 0.0]), np.array([1.0, 0.0]))})
    assert one == {"one": (1.0, 1.0)}, "draws without that row say nothing"
