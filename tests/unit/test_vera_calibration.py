"""Calibration error against the reference library, and temperatures found again after scores were
spoilt by them.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.wording import refused
from trainer.tasks.vera.calibration import (
    Objective,
    calibrate,
    ece,
    fit_temperature,
    nll,
    quantile_bins,
    scores_of,
)

each_objective = pytest.mark.parametrize("objective", ["ece", "nll"])
few = settings(max_examples=10, deadline=None)  # a fit takes a tenth of a second
statements = st.lists(
    st.tuples(
        st.one_of(st.floats(-30, 30, width=32), st.sampled_from([-1.0, 0.0, 1.0])),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=40,
)


def calibrated(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and labels that are true exactly as often as the logits say."""
    chance = np.random.default_rng(seed)
    logits = chance.normal(-0.5, 2.0, rows)
    return logits, (chance.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.int64)


def apart(rows: list[tuple[float, int]]) -> tuple[list[float], list[int]]:
    return [logit for logit, _ in rows], [label for _, label in rows]


def error(
    objective: Objective, logits: list[float], labels: list[int], temperature: float
) -> float:
    if objective == "nll":
        return nll(logits, labels, temperature=temperature)
    return ece(scores_of(logits, temperature=temperature), labels)


def test_equal_logits_have_equal_scores_wherever_they_stand() -> None:
    logits = np.linspace(-12, 12, 997)
    scores = [scores_of(np.full(count, logit)) for logit in logits for count in (20, 37)]
    assert all(len(set(of_one.tolist())) == 1 for of_one in scores)


# Errors
# --------------------------------------------------------------------------------------------------


@given(statements, st.integers(1, 12))
def test_ece_is_that_of_the_reference_library(rows: list[tuple[float, int]], bins: int) -> None:
    logits, labels = apart(rows)
    scores = scores_of(logits)
    share, score = calibration_curve(labels, scores, n_bins=bins, strategy="quantile", pos_label=1)
    assert ece(scores, labels, bins) == pytest.approx(
        float(np.mean(np.abs(share - score))), abs=1e-12
    )


def test_ece_by_hand() -> None:
    assert ece([0.1, 0.2, 0.7, 0.9], [0, 1, 1, 1], bins=2) == pytest.approx((0.35 + 0.2) / 2)


def test_bins_that_ties_leave_empty_are_dropped() -> None:
    bins = quantile_bins([0.5] * 9 + [0.9], [1, 0, 1, 0, 1, 0, 1, 0, 1, 1])
    assert bins.count.tolist() == [9, 1]
    assert bins.share_true.tolist() == pytest.approx([5 / 9, 1.0])
    assert bins.mean_score.tolist() == pytest.approx([0.5, 0.9])


def test_weights_count_a_statement_as_often_as_they_say() -> None:
    assert ece([0.2, 0.4], [1, 0], 1, weights=[3.0, 1.0]) == pytest.approx(
        abs(3 / 4 - (0.6 + 0.4) / 4)
    )
    assert nll([0.5, -1.0], [1, 0], weights=[3.0, 1.0]) == pytest.approx(
        nll([0.5] * 3 + [-1.0], [1, 1, 1, 0])
    )


@given(statements, st.floats(0.5, 5.0))
def test_nll_is_that_of_the_reference_library(
    rows: list[tuple[float, int]], temperature: float
) -> None:
    logits, labels = (torch.tensor(values, dtype=torch.float64) for values in apart(rows))
    wanted = float(binary_cross_entropy_with_logits(logits / temperature, labels))
    assert nll(logits, labels, temperature=temperature) == pytest.approx(wanted, abs=1e-12)


def test_nll_of_an_extreme_logit_is_finite() -> None:
    assert nll([-1e4], [1]) == 1e4


# Temperatures
# --------------------------------------------------------------------------------------------------


@each_objective
@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.7])
def test_a_known_temperature_is_found_again(objective: Objective, temperature: float) -> None:
    logits, labels = calibrated(20_000)
    found = fit_temperature(logits * temperature, labels, objective=objective)
    assert found == pytest.approx(temperature, rel=0.05)


@each_objective
@few
@given(statements)
def test_the_objective_is_never_worse_than_at_1(
    objective: Objective, rows: list[tuple[float, int]]
) -> None:
    logits, labels = apart(rows)
    found = fit_temperature(logits, labels, objective=objective)
    assert found > 0
    assert error(objective, logits, labels, found) <= error(objective, logits, labels, 1.0) + 1e-12


@each_objective
@few
@given(statements, st.data())
def test_the_order_of_rows_does_not_matter(
    objective: Objective, rows: list[tuple[float, int]], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(rows))
    assert fit_temperature(*apart(shuffled), objective=objective) == fit_temperature(
        *apart(rows), objective=objective
    )


def test_the_order_of_rows_does_not_matter_even_where_rounding_decides() -> None:
    logits, labels = calibrated(40)
    weights = np.ones(40)
    logits[0], weights[0] = 0.0, 1e15  # beside it, all other rows weigh as much as its last bits
    orders = [np.random.default_rng(seed).permutation(40) for seed in range(10)]
    found = {
        fit_temperature(logits[o], labels[o], objective="nll", weights=weights[o]) for o in orders
    }
    assert len(found) == 1


def test_where_one_bin_gains_what_another_loses_the_temperature_nearest_to_1_is_taken() -> None:
    logits = [1.5] * 10 + [-1.5] * 10  # scores of 0.82 and 0.18, of which 0.9 and 0.4 are true
    labels = [1] * 9 + [0] + [1] * 4 + [0] * 6
    assert fit_temperature(logits, labels) == 1.0


@few
@given(statements)
def test_no_other_temperature_has_a_lower_nll(rows: list[tuple[float, int]]) -> None:
    logits, labels = apart(rows)
    least = min(
        nll(logits, labels, temperature=temperature) for temperature in np.geomspace(0.01, 100, 500)
    )
    assert (
        nll(logits, labels, temperature=fit_temperature(logits, labels, objective="nll"))
        <= least + 1e-6
    )


def test_weights_move_the_temperature_as_repeated_rows_do() -> None:
    logits, labels = calibrated(400)
    weights = np.where((logits > 0) == labels, 1.0, 3.0)
    repeated = np.repeat(np.arange(400), weights.astype(int))
    found = fit_temperature(logits, labels, objective="nll", weights=weights)
    assert found == pytest.approx(
        fit_temperature(logits[repeated], labels[repeated], objective="nll"), rel=1e-4
    )
    assert found != pytest.approx(fit_temperature(logits, labels, objective="nll"), rel=1e-2)


@each_objective
def test_where_all_temperatures_do_alike_1_is_taken(objective: Objective) -> None:
    assert fit_temperature([0.0, 0.0], [1, 0], objective=objective) == 1.0


def test_a_temperature_at_the_edge_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert fit_temperature([1.0, -1.0], [0, 1], objective="nll") == pytest.approx(100.0)
    assert "edge" in caplog.text


def test_a_calibration_says_what_was_fitted_where_and_what_it_brought() -> None:
    logits, labels = calibrated(2_000)
    found = calibrate(
        torch.from_numpy(logits * 3).float(), torch.from_numpy(labels), split="dev", objective="nll"
    )
    assert (found.split, found.rows, found.objective) == ("dev", 2_000, "nll")
    assert found.temperature == pytest.approx(3.0, rel=0.1)
    assert found.ece_after < found.ece_before / 2
    assert found.nll_after < found.nll_before


def test_ranks_of_scores_survive_any_temperature() -> None:
    logits = np.linspace(-4, 4, 33)
    assert (np.diff(scores_of(logits, temperature=7.3)) > 0).all()


# Refusals
# --------------------------------------------------------------------------------------------------


def test_no_statements_are_refused() -> None:
    with refused("nothing_to_calibrate"):
        fit_temperature([], [])


def test_a_logit_that_is_not_finite_is_refused() -> None:
    with refused("logits_not_finite", bad=1, count=2):
        fit_temperature([1.0, float("inf")], [1, 0])


def test_labels_of_another_number_are_refused() -> None:
    with refused("label_count", statements=2, labels=1):
        ece([0.1, 0.2], [1])
