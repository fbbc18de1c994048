"""Differences between two models on the same rows: what is told of them, and what chance explains."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.metrics.intervals import RowSums
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
