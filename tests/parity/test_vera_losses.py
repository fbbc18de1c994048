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

from tests.parity import vera_recordings
from tests.parity.recordings import known, params
from tests.parity.vera_recordings import (
    COEFFICIENT,
    DEFAULT,
    SYSTEM,
    TEMPERATURE,
    TERMS,
    Batch,
    Loss,
    Recording,
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
    "batch", params(vera_recordings.batches_with_weights(), "batches.safetensors", SYSTEM)
)
every_loss = pytest.mark.parametrize(
    "case", params(vera_recordings.losses(), "terms in an expected.json", SYSTEM)
)
every_norm = pytest.mark.parametrize(
    "case", params(vera_recordings.gradient_norms(), "grad_norms in an expected.json", SYSTEM)
)
every_gradient = pytest.mark.parametrize(
    "case", params(vera_recordings.gradients(), "gradients in batches.safetensors", SYSTEM)
)
every_split = pytest.mark.parametrize(
    "split", params(vera_recordings.splits(), "expected_2rank.json", SYSTEM)
)


@cache
def depth(recording: Recording) -> int:
    """Operations on the way to a logit. A gradient goes back the same way."""
    return depth_of(Verifier(recording))


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


def gradients_of(case: Loss) -> dict[str, Tensor]:
    """{parameter: gradient} of a loss with the recorded weights."""
    return _gradients(case.batch, case.loss_fn, case.contrastive_type)


@cache
def _gradients(batch: Batch, loss_fn: Any, contrastive_type: Any) -> dict[str, Tensor]:
    verifier = Verifier(batch.recording)
    case = Loss(batch, loss_fn, contrastive_type, {})
    loss_of(verifier.statements(batch), case).loss.backward()
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
def test_a_stock_encoder_gives_the_recorded_states_logits_and_scores(batch: Batch) -> None:
    own_depth = depth(batch.recording)
    with torch.no_grad():
        ours = Verifier(batch.recording).statements(batch)
    want = recorded_statements(batch)
    assert_close(ours.hidden_SD, want.hidden_SD, depth=own_depth, **STATES)
    assert_close(ours.logits_S, want.logits_S, depth=own_depth, **LOGITS)
    recorded = batch["scores"][want.group_S, want.column_S]
    assert_close(ours.logits_S.sigmoid(), recorded, depth=own_depth, **SCORES)


@every_norm
def test_gradient_norms_equal_the_recorded_ones(case: Loss) -> None:
    ours = gradients_of(case)
    if (
        "error" in case.recorded
    ):  # no multiple-choice group: the published loss is a constant, ours has gradient 0
        assert total_norm(ours) == 0
        return
    total, twice = case.recorded["total"], 2 * depth(case.batch.recording)
    assert_close(total_norm(ours), total, depth=twice, **TOTAL_NORM)
    for name, norm in (case.recorded.get("per_param") or {}).items():
        want = norm or 0.0
        how = {"depth": twice, "scale": max(want, CANCELS * total)}
        assert_close(ours[name].norm().item(), want, of=name, **how, **NORMS)


@every_gradient
def test_gradients_equal_the_recorded_ones(case: Loss) -> None:
    ours = gradients_of(case)
    assert ours.keys() == case.recorded.keys()
    pairs = {name: known(ours[name], want) for name, want in case.recorded.items()}
    got, want = ({name: pair[side] for name, pair in pairs.items()} for side in (0, 1))
    twice = 2 * depth(case.batch.recording)
    assert_all_close(got, want, depth=twice, cancels=CANCELS, **GRADIENTS)


# Rows split over processes
# ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replay:
    """One rank's terms, its weight, and the gradients averaged over ranks."""

    terms: dict[str, float]
    weight: float
    gradients: dict[str, Tensor]


def replay(batch: Batch, rows: list[list[int]]) -> Replay:
    """What one rank of many computes of its rows."""
    verifier = Verifier(batch.recording)
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
        how["depth"] += depth(split.batch.recording)
        assert_close(got, want, what=f"{term} of two ranks", margin=OF_STATES, **how)
    twice = 2 * depth(split.batch.recording)
    if "grad_norm" in split.recorded:
        norm = total_norm(ranks[0].gradients)
        assert_close(norm, split.recorded["grad_norm"], depth=twice, **TOTAL_NORM)
    for name, want in vera_recordings.split_gradients(split).items():
        assert_close(ranks[0].gradients[name], want, of=name, depth=twice, **GRADIENTS)


MIXED = [entry for entry in vera_recordings.batches_with_weights() if entry.case.name == "mixed"]


# (rows by rank, mean scoring loss, norm of the averaged gradient), to the digits that the
# recording's notes give
@pytest.mark.parametrize(
    ("rows", "scoring", "norm"),
    [
        pytest.param([[0, 1, 2], [3, 4, 5]], "3.309", "25.448", id="as-many-choices-on-each-rank"),
        pytest.param([[0, 2, 4], [1, 3, 5]], "3.270", "34.4", id="more-choices-on-one-rank"),
    ],
)
@pytest.mark.parametrize("batch", params(MIXED, "batch 'mixed'", SYSTEM))
def test_two_ranks_give_the_published_scoring_loss_and_gradient_norm(
    rows: list[list[int]], scoring: str, norm: str, batch: Batch
) -> None:
    ranks = run_on_ranks(2, replay, batch, rows)
    mean = math.fsum(rank.terms["scoring"] for rank in ranks) / len(ranks)
    assert f"{mean:.3f}" == scoring
    assert f"{total_norm(ranks[0].gradients):.{len(norm.partition('.')[2])}f}" == norm
    for rank in ranks[1:]:
        assert all(torch.equal(rank.gradients[name], g) for name, g in ranks[0].gradients.items())
