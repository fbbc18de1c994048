"""Late interaction is that of sentence-transformers' MultiVectorEncoder: scores of the same weights,
and losses of the same vectors with their gradients.

Run with -s to see the differences.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.bases import base_of
from tests.facts import experiment
from tests.unit.test_late import PASSAGES, QUERY, exported, loaded, vectors
from tests.unit.test_late import folder as words  # noqa: F401 (a fixture)
from trainer import tasks
from trainer.tasks.retriever.late.pool_loss import LatePoolLoss

if find_spec("sentence_transformers") is None:
    pytest.skip(
        "the optional package sentence-transformers is not installed", allow_module_level=True
    )
# sentence-transformers is imported by each of them, which takes seconds
pytestmark = pytest.mark.long

QUERIES, NEGATIVES, WIDTH, TEMPERATURE = 5, 2, 12, 0.7
QUERY_TOKENS, PASSAGE_TOKENS = 4, 7
NO_PUNCTUATION = {"skip_punctuation": False, "skip": ["a", ","]}
HOWS: dict[str, dict[str, Any]] = {
    "ColBERT": {},
    "attended": {"attend": True},
    "own tokens": {"expand": False, "mean": True},
    "own skip list": NO_PUNCTUATION,
}


@pytest.fixture(scope="module")
def folder(words: Path) -> Path:  # noqa: F811
    return words


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["bert", "modernbert", "roberta", "llama"])
def test_a_multi_vector_encoder_gives_an_export_our_scores(
    name: str, how: str, folder: Path, tmp_path: Path
) -> None:
    from sentence_transformers import MultiVectorEncoder

    prefixes = {"query_prefix": "where ", "passage_prefix": "map "}
    changes: dict[str, Any] = {"data": {**prefixes, "passage_tokens": 10}, "late": HOWS[how]}
    task = loaded(folder, base=base_of("retriever", name), **changes)
    model = exported(task, tmp_path)
    theirs = MultiVectorEncoder(str(tmp_path), device="cpu")
    texts = {"query": [QUERY, "a old , map", "stone"], "passage": PASSAGES}
    encoded = {
        "query": theirs.encode_query(texts["query"]),
        "passage": theirs.encode_document(texts["passage"]),
    }
    worst = 0.0
    for side, of_side in texts.items():
        for got, want in zip(vectors(task, model, of_side, side), encoded[side], strict=True):
            assert got.shape == want.shape
            worst = max(worst, float((got - want).abs().max()))
    lists = task.lists_of(
        [(query, [{"text": one} for one in PASSAGES]) for query in texts["query"]]
    )
    with torch.no_grad():
        ours = task.relevance(model, lists).view(3, -1)
    wanted = theirs.similarity(encoded["query"], encoded["passage"])
    off = float(((ours - wanted) / wanted.abs().clamp(min=1)).abs().max())
    print(f"{name}, {how}: vectors {worst:.1e}, scores {off:.1e}")
    assert worst < 1e-6
    assert off < 1e-6


class Vectors(nn.Module):
    """A model whose texts are vectors already."""

    def forward(self, features: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        mask = features["attention_mask"]
        return {"token_embeddings": features["vectors"], "attention_mask": mask}


Columns = list[tuple[Tensor, Tensor]]  # (Q, L, E) and its mask, of queries, positives, negatives


def columns() -> Columns:
    generator = torch.Generator().manual_seed(3)
    found: Columns = []
    for number in range(NEGATIVES + 2):
        longest = QUERY_TOKENS if number == 0 else PASSAGE_TOKENS
        shape = (QUERIES, longest, WIDTH)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        lengths = torch.randint(1, longest + 1, (QUERIES, 1), generator=generator)
        found.append((drawn.requires_grad_(), torch.arange(longest) < lengths))
    return found


def units(of: Columns) -> Columns:
    return [(F.normalize(drawn, dim=-1), mask) for drawn, mask in of]


def teacher() -> Tensor:
    """(Q, 1 + negatives)"""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(QUERIES, NEGATIVES + 1, generator=generator, dtype=torch.float64)


def ours(of: Columns, loss: dict[str, Any], late: dict[str, Any]) -> Tensor:
    """The mean of our loss, over the queries."""
    values: dict[str, Any] = {**experiment("retriever, late", Path()), "loss": loss, "late": late}
    values["data"] = {**values["data"], "passages": NEGATIVES + 1}
    (queries, mask), *passages = of
    rows = [(own[0][at][own[1][at]]) for at in range(QUERIES) for own in passages]
    pool = {
        "queries": queries[mask],
        "query_lengths": mask.sum(1),
        "passages": torch.cat(rows),
        "passage_lengths": torch.tensor([len(row) for row in rows]),
        "counts": torch.full((QUERIES,), NEGATIVES + 1),
    }
    if "distillation" in loss:
        pool["teacher"] = teacher().float().flatten().view(torch.int32)
    return LatePoolLoss(tasks.parse(values))._of_pool(pool) / QUERIES  # type: ignore[arg-type]


def features(of: Columns) -> list[dict[str, Tensor]]:
    return [{"vectors": drawn, "attention_mask": mask.long()} for drawn, mask in of]


def ranking(of: Columns, **how: Any) -> Tensor:
    from sentence_transformers.multi_vector_encoder import losses

    loss = losses.MultiVectorMultipleNegativesRankingLoss(Vectors(), **how)  # type: ignore[arg-type]
    return loss(features(of))


def mean_ranking(of: Columns) -> Tensor:
    from sentence_transformers.multi_vector_encoder.scoring import mean_colbert_scores

    return ranking(of, scale=1 / TEMPERATURE, similarity_fct=mean_colbert_scores)


def divergence(of: Columns) -> Tensor:
    from sentence_transformers.multi_vector_encoder import losses

    how = {"student_temperature": TEMPERATURE, "teacher_temperature": 2.0}
    loss = losses.MultiVectorDistillKLDivLoss(Vectors(), **how)  # type: ignore[arg-type]
    return loss(features(of), teacher().float().double()) / TEMPERATURE**2


def margins(of: Columns) -> Tensor:
    from sentence_transformers.multi_vector_encoder import losses

    loss = losses.MultiVectorMarginMSELoss(Vectors())  # type: ignore[arg-type]
    return loss(features(of), teacher().float().double())


ALONE: dict[str, Any] = {"contrastive": 0.0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Columns], Tensor]]] = {
    "in batch": ({}, {"temperature": TEMPERATURE}, lambda of: ranking(of, scale=1 / TEMPERATURE)),
    "mean": ({}, {"temperature": TEMPERATURE, "mean": True}, mean_ranking),
    "divergence": (
        {**ALONE, "distillation": {"teacher_temperature": 2.0}},
        {"temperature": TEMPERATURE},
        divergence,
    ),
    "margins": ({**ALONE, "distillation": {"kind": "margin_mse"}}, {}, margins),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_is_that_of_their_class(case: str) -> None:
    loss, late, theirs = CASES[case]
    one, two = columns(), columns()
    got, want = ours(units(one), loss, late), theirs(units(two))
    got.backward()
    want.backward()
    distances = [
        float((mine.grad - other.grad).abs().max())  # type: ignore[operator]
        for (mine, _), (other, _) in zip(one, two, strict=True)
    ]
    got, want = got.detach(), want.detach()
    print(f"{case}: {float(got):.6f}, loss {float(abs(got - want)):.1e}, {max(distances):.1e}")
    assert float(got) > 1e-3
    assert float(got) == pytest.approx(float(want), abs=1e-6)
    assert max(distances) < 1e-6
