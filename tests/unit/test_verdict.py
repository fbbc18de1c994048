"""Differences between two models on the same rows: what is told of them, and what chance explains."""

from __future__ import annotations

import time
import tracemalloc
from statistics import NormalDist

import numpy as np
import pytest

from trainer.metrics.intervals import RowSums
from trainer.verdict import student
from trainer.verdict.paired import compare, holm, mcnemar
from trainer.verdict.slices import worse_slices


def means(values: np.ndarray) -> list[RowSums]:
    return [RowSums(values.astype(float), np.ones(len(values)))]


def right(share: float, num: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).random(num) < share).astype(float)


def test_a_difference_has_the_interval_of_paired_rows() -> None:
    """Rows are drawn for both models together: equal results cancel."""
    before = right(0.5, 400, 0)
    after = before.copy()
    wrong = np.flatnonzero(before == 0)
    after[wrong[:20]] = 1  # 5 points, of which 20 rows alone are uncertain
    outcome = compare(means(before), means(after))
    assert outcome.effect == pytest.approx(0.05)
    # the standard error of 20 gains in 400 rows is sqrt(.05 * .95 / 400) = .0109
    assert outcome.low == pytest.approx(0.05 - 1.96 * 0.0109, abs=0.004)
    assert outcome.high == pytest.approx(0.05 + 1.96 * 0.0109, abs=0.004)
    assert outcome.p < 0.002
    assert outcome.mcnemar is not None
    assert (outcome.mcnemar.broken, outcome.mcnemar.mended) == (0, 20)


def test_the_test_of_swapped_rows_is_rarely_wrong_about_equal_models() -> None:
    small = [
        compare(means(right(0.7, 150, 2 * k)), means(right(0.7, 150, 2 * k + 1))).p
        for k in range(60)
    ]
    assert sum(p < 0.05 for p in small) <= 8  # 3 are expected; more than 8 once in 250 times
    assert sum(p < 0.5 for p in small) >= 15  # 30 are expected: it is no test that never speaks


def test_a_loss_over_tokens_is_compared_by_tokens() -> None:
    """The score of several rows is their sum by their tokens, not the mean of their means."""
    tokens = np.array([1.0, 99.0] * 50)
    before = [RowSums(2 * tokens, tokens)]
    after = [RowSums(np.where(tokens == 1, 3.0, 99.0), tokens)]
    assert compare(before, after).effect == pytest.approx((3 + 99) / 100 - 2)


def test_seeds_widen_the_interval() -> None:
    rng = np.random.default_rng(5)
    before = [RowSums(rng.normal(0, 0.1, 500), np.ones(500)) for _ in range(4)]
    shifted = [RowSums(rng.normal(shift, 0.1, 500), np.ones(500)) for shift in (0, 0.2, 0.4, 0.6)]
    alone = compare(before[:1], shifted[1:2])
    together = compare(before, shifted)
    assert together.high - together.low > 5 * (alone.high - alone.low)


def test_seeds_of_one_recipe_are_not_said_to_differ_by_what_seeds_differ() -> None:
    """Three seeds against three of the same recipe, whose results all differ by their seeds."""
    shown = 0
    for case in range(12):
        rng = np.random.default_rng([case, 3])
        rows = rng.normal(0, 1, 150)
        sides = [
            [RowSums(rows + rng.normal(0, 0.1), np.ones(150)) for _ in range(3)] for _ in range(2)
        ]
        outcome = compare(*sides)
        shown += outcome.p < 0.05
        assert (outcome.low > 0 or outcome.high < 0) == (outcome.p < 0.05)
    assert shown <= 2  # by the rows alone it is nearly always


def test_the_interval_of_few_rows_is_that_of_few_rows() -> None:
    """Of five rows the percentiles alone hold the truth in 8 of 10 cases."""
    inside = 0
    for case in range(40):
        rng = np.random.default_rng([case, 5])
        outcome = compare(means(np.zeros(5)), means(rng.normal(0, 1, 5)))
        inside += outcome.low <= 0 <= outcome.high
    assert inside >= 34


def test_of_few_rows_every_deal_is_looked_at() -> None:
    """Of 5 rows that all gained, 2 of the 32 deals are as far from 0."""
    assert compare(means(np.zeros(5)), means(np.arange(1.0, 6.0))).p == 2 / 32


def test_rows_that_do_not_count_change_nothing() -> None:
    before, after = right(0.5, 60, 1), right(0.7, 60, 2)
    alone = compare(means(before), means(after))
    nothing = np.zeros(500)
    padded = [
        [RowSums(np.append(one, nothing), np.append(np.ones(60), nothing))]
        for one in (before, after)
    ]
    assert compare(*padded) == alone
    assert alone.mcnemar is not None
    assert alone.num_rows == 60


def test_mcnemar_of_a_hundred_thousand_rows_takes_no_time() -> None:
    before = np.arange(100_000) % 2
    begun = time.process_time()
    assert mcnemar(before, 1 - before).p == 1.0
    fewer = np.where(np.arange(100_000) < 49_000, 1 - before, before)
    outcome = mcnemar(before, np.where(np.arange(100_000) < 400, 1, fewer))
    # the normal distribution, with the correction for continuity
    z = (outcome.mended - outcome.broken - 1) / (outcome.mended + outcome.broken) ** 0.5
    assert outcome.p == pytest.approx(2 - 2 * NormalDist().cdf(z), rel=1e-3)
    assert time.process_time() - begun < 2


def test_the_t_distribution_is_that_of_the_tables() -> None:
    for degrees, t in ((1, 12.706), (2, 4.3027), (5, 2.5706), (30, 2.0423), (100_000, 1.960)):
        assert student.quantile(0.95, degrees) == pytest.approx(t, rel=2e-3 if t < 2 else 1e-4)
        assert student.within(t, degrees) == pytest.approx(0.95, abs=5e-4)


def test_mcnemar_counts_rows_that_changed() -> None:
    """Of 10 rows that changed 9 broke: p = 2 (1 + 10) / 2**10, as printed in tables."""
    before = np.array([1.0] * 9 + [0.0] + [1.0] * 50)
    after = np.array([0.0] * 9 + [1.0] + [1.0] * 50)
    assert mcnemar(before, after).p == pytest.approx(22 / 1024)
    assert mcnemar(before, before).p == 1.0


def test_holm_multiplies_the_smallest_by_all_of_them() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06}
    )


def test_rows_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="same rows"):
        compare(means(right(0.5, 10, 0)), means(right(0.5, 11, 0)))
    with pytest.raises(ValueError, match="every row"):
        worse_slices(right(0.5, 10, 0), right(0.5, 10, 1), {"source": ["a"] * 9})


def features(num: int, seed: int) -> dict[str, list]:
    rng = np.random.default_rng(seed)
    return {
        "question length": rng.integers(5, 300, num).tolist(),
        "source": rng.choice(["nq", "wq", "own"], num, p=[0.6, 0.35, 0.05]).tolist(),
        "label": [f"l{k}" for k in rng.integers(0, 30, num)],
    }


def test_a_slice_that_broke_is_named_with_its_size() -> None:
    table = features(2000, 3)
    before, after = right(0.8, 2000, 4), right(0.8, 2000, 5)
    of_slice = np.array(table["source"]) == "own"
    after[of_slice] = right(0.3, int(of_slice.sum()), 6)
    (slice,) = worse_slices(before, after, table)
    assert slice.conditions == ("source = own",)
    assert slice.num_rows == of_slice.sum()
    assert slice.low < -0.5 < slice.high < 0


@pytest.mark.long
def test_many_rows_and_conditions_need_little_memory() -> None:
    """Of 20,000 rows: the masks of all pairs of 300 slices would be 900 MB."""
    rng = np.random.default_rng(1)
    table: dict[str, list] = {
        f"column {k}": [f"v{v}" for v in rng.integers(0, 3, 20_000)] for k in range(40)
    }
    changed = np.zeros(20_000)
    changed[:400] = 1
    tracemalloc.start()
    named = worse_slices(changed, np.zeros(20_000), table)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert named == [] or named[0].effect < 0
    assert peak < 400e6


def test_a_value_of_many_lines_is_a_short_condition() -> None:
    labels = ["a |\n" + "very long " * 50 if k % 4 == 0 else "b" for k in range(400)]
    before, after = np.ones(400), np.array([float(label == "b") for label in labels])
    (slice, *_) = worse_slices(before, after, {"label": labels})
    assert slice.num_rows == 100
    assert "\n" not in slice.conditions[0]
    assert len(slice.conditions[0]) < 100


def test_two_conditions_together_are_found() -> None:
    table = features(2000, 7)
    before, after = right(0.9, 2000, 8), right(0.9, 2000, 9)
    both = (np.array(table["source"]) == "nq") & (np.array(table["question length"]) > 240)
    after[both] = right(0.3, int(both.sum()), 10)
    named = worse_slices(before, after, table)
    assert any("source = nq" in " ".join(one.conditions) for one in named) or any(
        "question length" in " ".join(one.conditions) for one in named
    )


def test_equal_models_seldom_have_a_slice_named() -> None:
    """At most one in thirty, and of models that agree in nearly every row no more."""
    alarms = 0
    for seed in range(12):
        before = right(0.8, 600, 100 + seed)
        after = before.copy()
        again = np.random.default_rng(seed).random(600) < 0.1
        after[again] = right(0.8, int(again.sum()), 300 + seed)
        alarms += bool(worse_slices(before, after, features(600, seed)))
    assert alarms <= 2


def test_a_model_that_is_worse_nowhere_names_nothing() -> None:
    before = right(0.5, 300, 1)
    assert worse_slices(before, np.ones(300), features(300, 1)) == []
    assert worse_slices(before, before, features(300, 1)) == []


@pytest.mark.parametrize("num", [45, 55, 69, 83])
def test_a_loss_that_chance_reaches_more_often_than_its_level_is_not_named(num: int) -> None:
    """Five rows that broke all lie in one half: of 32 deals one gives as much, more than one in 50.
    Rounding must not make the sum of the rows larger than that of the deal.
    """
    after = np.ones(num)
    after[:5] = 0
    halves = ["left" if row < num // 2 else "right" for row in range(num)]
    assert worse_slices(np.ones(num), after, {"half": halves}) == []
