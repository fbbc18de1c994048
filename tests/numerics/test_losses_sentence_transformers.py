"""A retriever's losses are those of sentence-transformers' classes, on the same vectors: values and
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.facts import experiment
from trainer import tasks
from trainer.tasks.retriever.loss.pool_loss import PoolLoss

if find_spec("sentence_transformers") is None:
    pytest.skip(
        "the optional package sentence-transformers is not installed", allow_module_level=True
    )
# sentence-transformers is imported by each of them, which takes seconds
pytestmark = pytest.mark.long

QUERIES, NEGATIVES, WIDTH, TEMPERATURE = 6, 2, 12, 0.05
Columns = list[Tensor]  # (Q, D) of the queries, of their positives, and of each next negative
ENCODER = {"normalize": True, "temperature": TEMPERATURE, "projection": {"width": WIDTH}}


class Vectors(nn.Module):
    """A model whose texts are vectors already."""

    tokenizer: Any = None
    max_seq_length = 8

    def forward(self, features: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        return {"sentence_embedding": features["vectors"]}

    def get_embedding_dimension(self) -> int:
        return WIDTH


def columns() -> Columns:
    generator = torch.Generator().manual_seed(3)
    shape = (NEGATIVES + 2, QUERIES, WIDTH)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    drawn[1] += drawn[0]  # positives are near, as are some negatives of other queries
    drawn[2, :3] += 0.9 * drawn[1, 1:4]
    return [column.requires_grad_() for column in F.normalize(drawn, dim=-1)]


def units(of: Columns) -> Columns:
    return [F.normalize(column, dim=-1) for column in of]


def scores() -> Tensor:
    """(Q, 1 + negatives) of a teacher."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(QUERIES, NEGATIVES + 1, generator=generator, dtype=torch.float64)


def ours(of: Columns, **loss: Any) -> Tensor:
    """The mean of our loss, over the queries."""
    values: dict[str, Any] = {**experiment("retriever", Path()), "loss": loss, "encoder": ENCODER}
    values["data"] = {**values["data"], "passages": NEGATIVES + 1}
    pool = {
        "queries": of[0],
        "passages": torch.stack(of[1:], 1).flatten(0, 1),
        "counts": torch.full((QUERIES,), len(of) - 1),
        "askers": of[0],
    }
    if "distillation" in loss:
        pool["teacher"] = scores()[:, : len(of) - 1].float().flatten().view(torch.int32)
    return PoolLoss(tasks.parse(values))._of_pool(pool) / QUERIES  # type: ignore[arg-type]


def features(of: Columns) -> list[dict[str, Tensor]]:
    return [{"vectors": column} for column in of]


def ranking(of: Columns, **how: Any) -> Tensor:
    from sentence_transformers.sentence_transformer import losses

    theirs = losses.MultipleNegativesRankingLoss(Vectors(), scale=1 / TEMPERATURE, **how)  # type: ignore
    return theirs.compute_loss_from_embeddings(of, torch.empty(0))


def symmetric(of: Columns) -> Tensor:
    both = ("query_to_doc", "doc_to_query")
    return ranking(of, directions=both, partition_mode="per_direction")


def matryoshka(of: Columns) -> Tensor:
    from sentence_transformers.sentence_transformer import losses

    inner = losses.MultipleNegativesRankingLoss(Vectors(), scale=1 / TEMPERATURE)  # type: ignore
    outer = losses.MatryoshkaLoss(inner.model, inner, [WIDTH, 8, 3], [1.0, 0.5, 0.25])
    return outer(features(of), torch.empty(0))


def triplet(of: Columns) -> Tensor:
    from sentence_transformers.sentence_transformer import losses

    cosine = losses.TripletDistanceMetric.COSINE
    theirs = losses.TripletLoss(Vectors(), distance_metric=cosine, triplet_margin=0.3)  # type: ignore
    parts = [theirs.compute_loss_from_embeddings([*of[:2], one], torch.empty(0)) for one in of[2:]]
    return torch.stack(parts).mean()


def guided(of: Columns, strategy: str, margin: float) -> Tensor:
    """The guide is the model itself."""
    from sentence_transformers.sentence_transformer import losses

    theirs = losses.GISTEmbedLoss.__new__(losses.GISTEmbedLoss)
    nn.Module.__init__(theirs)
    theirs.model = theirs.guide = Vectors()  # type: ignore[assignment]
    theirs.temperature, theirs.must_retokenize = TEMPERATURE, False
    theirs.margin_strategy, theirs.margin = strategy, margin  # type: ignore[assignment]
    theirs.contrast_anchors = theirs.contrast_positives = False
    theirs.gather_across_devices = False
    theirs.similarity_fct = nn.CosineSimilarity(dim=-1)
    theirs.cross_entropy_loss = nn.CrossEntropyLoss()
    return theirs(features(of), torch.empty(0))


def divergence(of: Columns) -> Tensor:
    from sentence_transformers.sentence_transformer import losses

    theirs = losses.DistillKLDivLoss(Vectors(), temperature=2.0)  # type: ignore[arg-type]
    with_scale = [of[0] / TEMPERATURE * 2, *of[1:]]
    return theirs.compute_loss_from_embeddings(with_scale, scores().float().double())


def margins(of: Columns) -> Tensor:
    from sentence_transformers.sentence_transformer import losses

    theirs = losses.MarginMSELoss(Vectors())  # type: ignore[arg-type]
    with_scale = [of[0] / TEMPERATURE, *of[1:]]
    return theirs.compute_loss_from_embeddings(with_scale, scores().float().double())


ALONE: dict[str, Any] = {"contrastive": 0.0}
CASES: dict[str, tuple[dict[str, Any], Callable[[Columns], Tensor], int]] = {
    "in batch": ({}, ranking, NEGATIVES),
    "symmetric": ({"symmetric": True}, symmetric, NEGATIVES),
    "matryoshka": (
        {"matryoshka": {"dims": [WIDTH, 8, 3], "weights": [1.0, 0.5, 0.25]}},
        matryoshka,
        NEGATIVES,
    ),
    "triplet": ({"kind": "triplet", "margin": 0.3}, triplet, NEGATIVES),
    "margin to the positive": (
        {"false_negatives": {"margin": 0.2}},
        lambda of: guided(of, "absolute", 0.2),
        1,
    ),
    "share of the positive": (
        {"false_negatives": {"share": 0.7}},
        lambda of: guided(of, "relative", 0.3),
        1,
    ),
    "divergence": (
        {**ALONE, "distillation": {"teacher_temperature": 2.0, "coefficient": 4.0}},
        divergence,
        NEGATIVES,
    ),
    "margins": ({**ALONE, "distillation": {"kind": "margin_mse"}}, margins, NEGATIVES),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_is_that_of_sentence_transformers(case: str) -> None:
    loss, theirs, negatives = CASES[case]
    one, two = columns()[: negatives + 2], columns()[: negatives + 2]
    # their similarities normalise, so that a gradient across a vector alone is compared
    got, want = ours(units(one), **loss), theirs(units(two))
    got.backward()
    want.backward()
    distances = [
        float((mine.grad - other.grad).abs().max())  # type: ignore[operator]
        for mine, other in zip(one, two, strict=True)
    ]
    got, want = got.detach(), want.detach()
    print(f"{case}: {float(got):.6f}, loss {float(abs(got - want)):.1e}, {max(distances):.1e}")
    assert not math.isclose(float(got), 0.0, abs_tol=1e-3)
    assert float(got) == pytest.approx(float(want), abs=1e-6)
    assert max(distances) < 1e-6
    if case.startswith(("margin to", "share")):
        assert float(got) < 0.999 * float(ours(columns()[:3]).detach()), "nothing was left out"
