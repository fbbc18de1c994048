"""The verifier's losses give the published program's numbers: every term, gradient and infinity.

Bounds are those of tests/tolerance.py. A term near 0 is a difference of larger numbers: what it is
held against are the logits and similarities of which it is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
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
from tests.tolerance import CANCELS, assert_all_close, assert_close, depth_of
from trainer.runtime import distributed
from trainer.tasks.vera.losses import Original, Statements, gather, original

# Margins, as tests/tolerance.py means them.
STATES = {"what": "states", "margin": 0.3}
LOGITS = {"what": "logits", "margin": 0.6}
SCORES = {"what": "scores", "margin": 0.3, "scale": 1.0}
SCORING, CONTRASTIVE = 0.3, 0.08
OF_STATES = 2.0  # of these two, where the model that gives the states rounds as well
GRADIENTS = {"what": "gradients", "margin": 1.2}
NORMS = {"what": "norms", "margin": 0.5}
TOTAL_NORM = {"what": "total norm", "margin": 1.5}

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


@cache
def depth() -> int:
    """Operations on the way to a logit. A gradient goes back the same way."""
    return depth_of(Verifier())


def of_term(
    statements: Statements, contrastive_type: int, term: str, *, contrastive: float
) -> dict[str, Any]:
    """What rounding does to a term: depth and scale, with the margins of both terms in the scale.

    A term is a difference of logits, or of similarities over the temperature. A contrastive term
    -log(p) moves by 1 - p of what the similarities do, which is no more than the term itself, and p
    is rounded as a number of about 1.
    """
    num_statements, width = statements.hidden_SD.shape
    if contrastive_type in (1, 2):
        similarity = (statements.hidden_SD @ statements.hidden_SD.T).abs().max().item()
    else:
        similarity = float(contrastive_type != 0)
    scales = {
        "scoring": SCORING * statements.logits_S.abs().max().item(),
        "contrastive": CONTRASTIVE * (1.0 + similarity / TEMPERATURE * min(contrastive, 1.0)),
    }
    scales["loss"] = scales["scoring"] + COEFFICIENT * scales["contrastive"]
    # a product and two norms over the width, and a sum over statements
    return {"depth": 3 * width + num_statements, "scale": scales[term]}


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
    statements = recorded_statements(case.batch)
    ours = loss_of(statements, case)
    contrastive = float(case.recorded["contrastive"])
    for term in TERMS:
        how = of_term(statements, case.contrastive_type, term, contrastive=contrastive)
        got, want = getattr(ours, term).item(), float(case.recorded[term])
        assert_close(got, want, what=f"{term} of recorded states", margin=1.0, **how)


@every_batch
def test_a_stock_encoder_gives_the_recorded_states_logits_and_scores(batch: str) -> None:
    with torch.no_grad():
        ours = Verifier().statements(batch)
    want = recorded_statements(batch)
    assert_close(ours.hidden_SD, want.hidden_SD, depth=depth(), **STATES)
    assert_close(ours.logits_S, want.logits_S, depth=depth(), **LOGITS)
    scores_BC = recorded_vera.tensors()[f"{batch}.scores"]
    recorded = scores_BC[want.group_S, want.column_S]
    assert_close(ours.logits_S.sigmoid(), recorded, depth=depth(), **SCORES)


@every_norm
def test_gradient_norms_equal_the_recorded_ones(case: Loss) -> None:
    ours = gradients_of(case.name)
    if (
        "error" in case.recorded
    ):  # no multiple-choice group: the published loss is a constant, ours has gradient 0
        assert total_norm(ours) == 0
        return
    total = case.recorded["total"]
    assert_close(total_norm(ours), total, depth=2 * depth(), **TOTAL_NORM)
    for name, norm in (case.recorded.get("per_param") or {}).items():
        want = norm or 0.0
        how = {"depth": 2 * depth(), "scale": max(want, CANCELS * total)}
        assert_close(ours[name].norm().item(), want, of=name, **how, **NORMS)


@every_gradient
def test_gradients_equal_the_recorded_ones(case: Loss) -> None:
    ours = gradients_of(case.name)
    assert_all_close(ours, case.recorded, depth=2 * depth(), cancels=CANCELS, **GRADIENTS)


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
    statements = recorded_statements(split.batch)
    for term in TERMS:
        want = split.recorded.get(term)
        if want is None:
            continue
        # a contrastive term may have been recorded before its rank's weight was applied
        weighted = [rank.terms[term] for rank in ranks]
        bare = [
            rank.terms[term] / (rank.weight if term == "contrastive" else 1.0) for rank in ranks
        ]
        readings = (weighted, bare)
        if not isinstance(want, list):
            want = [want]
            readings = tuple([math.fsum(each) / len(each)] for each in readings)
        got = min(readings, key=partial(math.dist, want))
        how = of_term(statements, DEFAULT[1], term, contrastive=1.0)
        how["depth"] += depth()
        assert_close(got, want, what=f"{term} of two ranks", margin=OF_STATES, **how)
    if "grad_norm" in split.recorded:
        norm = total_norm(ranks[0].gradients)
        assert_close(norm, split.recorded["grad_norm"], depth=2 * depth(), **TOTAL_NORM)
    for name, want in recorded_vera.split_gradients(split).items():
        assert_close(ranks[0].gradients[name], want, of=name, depth=2 * depth(), **GRADIENTS)


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
