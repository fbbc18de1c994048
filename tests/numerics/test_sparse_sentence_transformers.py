"""A sparse retriever is that of sentence-transformers: an export gives the same weights there, and
the losses and gradients of the same weights are those of its classes.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bases import base_of
from tests.facts import experiment, write_facts
from tests.numerics.test_sparse_retriever import BASE
from trainer import tasks
from trainer.protocol.task import Places

if find_spec("sentence_transformers") is None:
    pytest.skip(
        "the optional package sentence-transformers is not installed", allow_module_level=True
    )
# sentence-transformers is imported by each of them, which takes seconds
pytestmark = pytest.mark.long

QUERIES = ["Where does Ada keep the red key?", "Who keeps a blue map in the tower?"]
PASSAGES = ["Ada keeps the red key in the cellar.", "The tower is empty.", "It is far.", "A lamp."]
NEGATIVES = ["The harbour is far from the attic.", "Bruno keeps it."]
FAMILIES = ("bert", "roberta", "distilbert", "modernbert")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def task_of(folder: Path, **changes: Any) -> Any:
    values = {**experiment("retriever, sparse", folder), "loss": {}, "sparse": {}, **changes}
    return tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))


def exported(task: Any, folder: Path) -> Any:
    """Our model of an export whose weights are uneven."""
    generator = torch.Generator().manual_seed(3)
    model = task.model()
    weights = {
        name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator)
        for name, p in model.named_parameters()
    }
    task.export(weights, folder)
    return task.load_export(folder)


def ours(task: Any, model: Any, texts: list[str], side: Any) -> Tensor:
    ids = task.ids([{"text": text} for text in texts], side=side)
    with torch.no_grad():
        return task.embed_words(model, ids, side=side)


@pytest.mark.parametrize("sparse", [{}, {"pooling": "sum"}, {"queries": "tokens"}])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_sparse_encoder_gives_an_export_our_weights(
    name: str, sparse: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    from sentence_transformers import SparseEncoder

    values: Any = experiment("retriever, sparse", folder)
    data = {**values["data"], "query_prefix": "Q: ", "passage_prefix": "passage "}
    base = base_of("retriever", name, vocab_size=384)
    task = task_of(folder, base=base, data=data, sparse=sparse)
    model = exported(task, tmp_path)
    theirs = SparseEncoder(str(tmp_path), device="cpu")
    how: Any = {"convert_to_sparse_tensor": False, "convert_to_tensor": True}
    long = [*PASSAGES, "The map lies in the garden. " * 20]
    for texts, side, encode in (
        (QUERIES, "query", theirs.encode_query),
        (long, "passage", theirs.encode_document),
    ):
        got, wanted = ours(task, model, texts, side), encode(texts, **how)
        assert 0 < int((got > 0).sum()) < got.numel(), "some words have weights, and some none"
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    task.is_packed = False
    padded = ours(task, task.load_export(tmp_path), long, "passage")
    torch.testing.assert_close(padded, got, rtol=1e-5, atol=1e-5)


def texts_of(kind: str) -> list[list[str]]:
    """Columns: queries, positives, and for each next negative."""
    columns = [QUERIES, PASSAGES[:2], PASSAGES[2:]]
    return [*columns, NEGATIVES] if kind == "margins" else columns


def rows_of(columns: list[list[str]], scores: Tensor | None) -> list[dict[str, Any]]:
    rows = []
    for number, (query, *passages) in enumerate(zip(*columns, strict=True)):
        found = [{"text": text} for text in passages]
        if scores is not None:
            pairs = zip(found, scores[number].tolist(), strict=True)
            found = [{**passage, "score": score} for passage, score in pairs]
        row = {"query": query, "positives": found[:1], "negatives": found[1:]}
        rows.append({**row, "item": number})
    return rows


@pytest.mark.parametrize("kind", ["in batch", "margins"])
def test_a_loss_and_its_gradients_are_those_of_a_splade_loss(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder import losses

    columns = texts_of(kind)
    scores = None
    loss: dict[str, Any] = {}
    if kind == "margins":
        scores = torch.randn(2, 3, generator=torch.Generator().manual_seed(5))
        loss = {"contrastive": 0.0, "distillation": {"kind": "margin_mse"}}
    values: Any = experiment("retriever, sparse", folder)
    data = {**values["data"], "passages": len(columns) - 1}
    # weights by which no part of the loss is lost among the others
    weights = {"in batch": (0.02, 0.03), "margins": (2.0, 3.0)}[kind]
    sparse = dict(zip(("query_weight", "passage_weight"), weights, strict=True))
    sparse["temperature"] = 1.0 if kind == "margins" else 50.0
    task = task_of(folder, base=BASE, sparse=sparse, loss=loss, data=data)
    model = exported(task, tmp_path).train()
    batch = task.collate([task.encode(row) for row in rows_of(columns, scores)])
    (summed,) = task.losses(model, [batch])
    (summed / len(QUERIES)).backward()

    theirs = SparseEncoder(str(tmp_path), device="cpu").train()
    if scores is None:
        inner: Any = losses.SparseMultipleNegativesRankingLoss(theirs, scale=1 / 50.0)
    else:
        inner = losses.SparseMarginMSELoss(theirs)
    whole = losses.SpladeLoss(
        theirs,
        inner,
        document_regularizer_weight=weights[1],
        query_regularizer_weight=weights[0],
    )
    features = [theirs.preprocess(column) for column in columns]
    parts = whole(features, scores)
    wanted = sum(parts.values())
    wanted.backward()
    shares = {name: float(part.detach() / wanted.detach()) for name, part in parts.items()}
    apart = float((summed.detach() / len(QUERIES) / wanted.detach() - 1).abs())
    print(f"\n{kind}: {float(wanted.detach()):.4f} of shares {shares}, {apart:.1e} apart")
    assert min(shares.values()) > 0.01
    torch.testing.assert_close(summed / len(QUERIES), wanted, rtol=1e-6, atol=0)
    of_theirs = dict(theirs[0].model.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in of_theirs.values() if p.grad is not None)
    for name, parameter in model.query_model.named_parameters():
        gradient = of_theirs[name].grad
        assert gradient is not None, name
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6 * largest)
