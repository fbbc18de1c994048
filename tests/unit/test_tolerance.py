"""The tolerance of the numerical tests: what it allows, what it refuses, and what it writes
down.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.tolerance import (
    allowed,
    assert_all_close,
    assert_close,
    assert_equal_step,
    assert_same_step,
    depth_of,
    worst,
)

EPS = torch.finfo(torch.float32).eps


def test_the_bound_grows_with_the_magnitude_and_the_root_of_the_depth() -> None:
    assert allowed(3.0, depth=16, margin=2.0) == pytest.approx(2 * 4 * EPS * 3)
    assert allowed(1.0, depth=1, margin=1.0, dtype=torch.float64) == torch.finfo(torch.float64).eps


@pytest.mark.parametrize(("steps", "is_close"), [(0.9, True), (1.1, False)])
def test_a_distance_is_measured_against_the_largest_element(steps: float, is_close: bool) -> None:
    want = torch.tensor([4.0, 0.0], dtype=torch.float64)
    got = want + torch.tensor([0.0, steps * 4 * EPS], dtype=torch.float64)
    if is_close:
        assert_close(got, want, depth=1, margin=1, what="numbers", dtype=torch.float32)
        return
    with pytest.raises(
        AssertionError, match=r"numbers of a kind: 5\.2\d*e-07 apart, rounding allows 4\.7\d*e-07"
    ):
        assert_close(
            got, want, depth=1, margin=1, what="numbers", of="of a kind", dtype=torch.float32
        )


def test_sums_of_as_many_terms_in_another_order_are_close_and_a_dropped_term_is_not() -> None:
    terms = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    backwards = sum(terms.flip(0).tolist())
    inputs = {"depth": len(terms), "margin": 4, "what": "sum", "scale": float(terms.abs().max())}
    assert_close(float(terms.sum()), backwards, **inputs)
    with pytest.raises(AssertionError):
        assert_close(float(terms[1:].sum()), backwards, **inputs)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_is_close_to_itself_at_most(wrong: float) -> None:
    with pytest.raises(AssertionError):
        assert_close([1.0, wrong], [1.0, 2.0], depth=1, margin=1e9, what="numbers")
    with pytest.raises(AssertionError):
        assert_close([1.0, 2.0], [1.0, wrong], depth=1, margin=1e9, what="numbers")


def test_equal_infinities_are_close_and_other_shapes_are_refused() -> None:
    assert_close([math.inf, 1.0], [math.inf, 1.0], depth=1, margin=1, what="numbers")
    with pytest.raises(AssertionError, match=r"got shape \(1,\), want \(2,\)"):
        assert_close([1.0], [1.0, 1.0], depth=1, margin=1, what="numbers")


def test_the_coarser_type_of_two_tensors_counts() -> None:
    one = torch.ones(2, dtype=torch.bfloat16)
    assert_close(one * (1 + 2**-7), one.double(), depth=1, margin=1, what="numbers")


def test_every_comparison_is_written_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATHE_SHOW_ERRORS", str(tmp_path / "errors"))
    for got in (1.0, 1.0 + EPS / 2, 1.0):
        assert_close(got, 1.0, depth=1, margin=2, what="numbers")
    lines = [json.loads(line) for line in (tmp_path / "errors").read_text().splitlines()]
    assert len(lines) == 3
    ((test, what, share, distance),) = worst(lines)
    assert test.endswith("test_every_comparison_is_written_where_the_environment_says")
    assert (what, share, distance) == ("numbers", pytest.approx(0.25), pytest.approx(EPS / 2))


# Tensors by name, and whole steps
# --------------------------------------------------------------------------------------------------

LARGE, SMALL = torch.tensor([100.0, 0.0]), torch.tensor([0.0, 1e-9])


def test_a_tensor_that_cancels_is_held_against_a_share_of_the_largest() -> None:
    want, got = {"a": LARGE, "b": SMALL}, {"a": LARGE, "b": SMALL + 1e-6}
    how = {"what": "gradients", "depth": 1, "margin": 1}
    assert_all_close(got, want, cancels=0.1, **how)
    with pytest.raises(AssertionError, match="gradients of a kind b: "):
        assert_all_close(got, want, of="of a kind", **how)


def test_a_tensor_on_one_side_only_is_named() -> None:
    with pytest.raises(AssertionError, match=r"\['b'\] on one side only"):
        assert_all_close({"a": LARGE}, {"a": LARGE, "b": SMALL}, what="x", depth=1, margin=1)


@pytest.mark.parametrize(("loss", "gradient"), [(1e-4, 0.0), (0.0, 1e-2)])
def test_a_step_is_its_loss_and_its_gradients(loss: float, gradient: float) -> None:
    want, got = (5.0, {"a": LARGE}), (5.0 + loss, {"a": LARGE + gradient})
    how = {"depth": 4, "loss": 1.0, "gradients": 1.0}
    assert_same_step(want, want, **how)
    assert_equal_step(want, want)
    with pytest.raises(AssertionError):
        assert_same_step(got, want, **how)
    with pytest.raises(AssertionError):
        assert_equal_step(got, want)


def test_the_depth_of_a_model_is_the_terms_of_its_matrices() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    assert depth_of(model) == 3 + 5
