"""The verifier's losses give the published program's numbers: every term, gradient and infinity.

Bounds are relative. A term near 0 is a difference of larger numbers in fp32, so NOISE is allowed on
top; a tensor is held against its largest element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity import recorded_vera
from tests.parity.recorded_vera import (
    COEFFICIENT,
    DEFAULT,
    TEMPERATURE,
    TERMS,
    Loss,
    Split,
    Verifier,
    recorded_statements,
)
from tests.ranks import run_on_ranks
from trainer.runtime import distributed
from trainer.tasks.vera.losses import Original, Statements, gather, original

LOSS, STATE, GRADIENT = 1e-5, 1e-5, 1e-4
NOISE = 1e-6
# A gradient that cancels to nothing is left with the rounding of its parts, which are as large as
# its parameter's gradients elsewhere: 1 to 10.
GRADIENT_NOISE = 1e-6

every_batch = pytest.mark.parametrize(
    "batch", recorded_vera.cases(recorded_vera.batches(), "batches.safetensors")
)
every_loss = pytest.mark.parametrize(
    "case", recorded_vera.cases(recorded_vera.losses(), "terms in an expected.json")
)
every_norm = pytest.mark.parametrize(
    "case", recorded_vera.cases(recorded_vera.gradient_norms(), "grad_norms in an expected.json")
)
every_gradient = pytest.mark.parametrize(
    "case", recorded_vera.cases(recorded_vera.gradients(), "gradients in batches.safetensors")
)
every_split = pytest.mark.parametrize(
    "split", recorded_vera.cases(recorded_vera.splits(), "expected_2rank.json")
)


def close(want: Any) -> Any:
    return pytest.approx(float(want), rel=LOSS, abs=NOISE)


def assert_close(got: Tensor, want: Tensor, bound: float, noise: float = 0.0) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max().item() <= bound * want.abs().max().item() + noise


def loss_of(statements: Statements, case: Loss) -> Original:
    return original(
        statements,
        loss_fn=case.loss_fn,
        contrastive_type=case.contrastive_type,
        temperature=TEMPERATURE,
        coefficient=COEFFICIENT,
    )


@cache
def gradients_of(name: str) -> dict[str, Tensor]:
    """{parameter: gradient} of a loss by its name, with the recorded weights."""
    case = recorded_vera.loss_named(name, {})
    verifier = Verifier()
    loss_of(verifier.statements(case.batch), case).loss.backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in verifier.named_parameters()
    }


def total_norm(gradients: dict[str, Tensor]) -> float:
    return torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm().item()


@every_loss
def test_every_term_of_a_loss_equals_the_recorded_one(case: Loss) -> None:
    ours = loss_of(recorded_statements(case.batch), case)
    assert {term: getattr(ours, term).item() for term in TERMS} == {
        term: close(case.recorded[term]) for term in TERMS
    }


@every_batch
def test_a_stock_encoder_gives_the_recorded_states_logits_and_scores(batch: str) -> None:
    with torch.no_grad():
        ours = Verifier().statements(batch)
    want = recorded_statements(batch)
    assert_close(ours.hidden_SD, want.hidden_SD, STATE)
    assert_close(ours.logits_S, want.logits_S, STATE)
    scores_BC = recorded_vera.tensors()[f"{batch}.scores"]
    assert_close(ours.logits_S.sigmoid(), scores_BC[want.group_S, want.column_S], STATE)


@every_norm
def test_gradient_norms_equal_the_recorded_ones(case: Loss) -> None:
    ours = gradients_of(case.name)
    if (
        "error" in case.recorded
    ):  # no multiple-choice group: the published loss is a constant, ours has gradient 0
        assert total_norm(ours) == 0
        return
    assert total_norm(ours) == pytest.approx(case.recorded["total"], rel=GRADIENT)
    for name, norm in (case.recorded.get("per_param") or {}).items():
        assert ours[name].norm().item() == pytest.approx(
            norm or 0.0, rel=GRADIENT, abs=GRADIENT_NOISE
        ), name


@every_gradient
def test_gradients_equal_the_recorded_ones(case: Loss) -> None:
    ours = gradients_of(case.name)
    assert case.recorded.keys() == ours.keys()
    for name, want in case.recorded.items():
        assert_close(ours[name], want, GRADIENT, GRADIENT_NOISE)


# Rows split over processes
# ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replay:
    """One rank's terms, its weight, and the gradients averaged over ranks."""

    terms: dict[str, float]
    weight: float
    gradients: dict[str, Tensor]


def replay(batch: str, rows: list[list[int]]) -> Replay:
    """What one rank of many computes of its rows."""
    verifier = Verifier()
    statements = verifier.statements(batch, rows[distributed.rank()])
    everyone = gather(statements)
    ours = original(
        statements,
        loss_fn=DEFAULT[0],
        contrastive_type=DEFAULT[1],
        temperature=TEMPERATURE,
        coefficient=COEFFICIENT,
        gathered=everyone,
    )
    ours.loss.backward()
    world = distributed.world()
    parameters = {n: p.grad for n, p in verifier.named_parameters() if p.grad is not None}
    gradients = {
        n: (distributed.total(gradient) / world).float() for n, gradient in parameters.items()
    }
    return Replay({term: getattr(ours, term).item() for term in TERMS}, everyone.weight, gradients)


@every_split
def test_terms_and_averaged_gradients_of_split_rows_equal_the_recorded_ones(split: Split) -> None:
    ranks = run_on_ranks(len(split.rows), replay, split.batch, [list(rows) for rows in split.rows])
    for term in TERMS:
        want = split.recorded.get(term)
        got = [rank.terms[term] for rank in ranks]
        bare = [
            rank.terms[term] / (rank.weight if term == "contrastive" else 1.0) for rank in ranks
        ]
        if isinstance(
            want, list
        ):  # a contrastive term may have been recorded before its rank's weight was applied
            close_want = [close(value) for value in want]
            assert got == close_want or bare == close_want, term
        elif want is not None:
            assert math.fsum(got) / len(got) == close(want) or math.fsum(bare) / len(bare) == close(
                want
            ), term
    if "grad_norm" in split.recorded:
        assert total_norm(ranks[0].gradients) == pytest.approx(
            split.recorded["grad_norm"], rel=GRADIENT
        )
    for name, want in recorded_vera.split_gradients(split).items():
        assert_close(ranks[0].gradients[name], want, GRADIENT, GRADIENT_NOISE)


# (rows by rank, mean scoring loss, norm of the averaged gradient), to the digits that the
# recording's notes give
@pytest.mark.parametrize(
    ("rows", "scoring", "norm"),
    [
        pytest.param([[0, 1, 2], [3, 4, 5]], "3.309", "25.448", id="as-many-choices-on-each-rank"),
        pytest.param([[0, 2, 4], [1, 3, 5]], "3.270", "34.4", id="more-choices-on-one-rank"),
    ],
)
def test_two_ranks_give_the_published_scoring_loss_and_gradient_norm(
    rows: list[list[int]], scoring: str, norm: str
) -> None:
    if "mixed" not in recorded_vera.batches():
        pytest.skip("no batch 'mixed' in $LATHE_PARITY/vera (default ../shared/parity)")
    ranks = run_on_ranks(2, replay, "mixed", rows)
    mean = math.fsum(rank.terms["scoring"] for rank in ranks) / len(ranks)
    assert f"{mean:.3f}" == scoring
    assert f"{total_norm(ranks[0].gradients):.{len(norm.partition('.')[2])}f}" == norm
    for rank in ranks[1:]:
        assert all(torch.equal(rank.gradients[name], g) for name, g in ranks[0].gradients.items())
