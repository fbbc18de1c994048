"""Matryoshka over layers is sentence-transformers' AdaptiveLayerLoss and Matryoshka2dLoss of all
layers, on the same weights; and a model of fewer blocks gives the vectors that were trained.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from exp_configs import vary
from tests.facts import LLAMA, TINY_BERT, write_facts
from tests.unit.test_retriever_task import loaded, texts, training_rows
from tests.wording import refused, says
from trainer import tasks

BLOCKS, TEMPERATURE, QUERIES = 3, 0.05, 6
BERT = vary(TINY_BERT, config={"num_hidden_layers": BLOCKS})
DECODER = vary(LLAMA, config={"num_hidden_layers": BLOCKS})
ENCODER: dict[str, Any] = {"projection": None, "normalize": True, "temperature": TEMPERATURE}
ALL = list(range(BLOCKS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def task_of(folder: Path, nested: dict[str, Any], base: Any = BERT, **encoder: Any) -> Any:
    chunks: dict[str, Any] = {"query_chunk": None, "passage_chunk": None}
    return loaded(
        folder,
        base=base,
        encoder={**ENCODER, **encoder},
        loss={**chunks, "matryoshka": nested},
        data={"passages": 3},
    )


def ours(task: Any, model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss of six queries, and the gradients of the encoder."""
    batch = task.collate(training_rows(task, QUERIES))
    (loss,) = task.losses(model, [batch])
    (loss / QUERIES).backward()
    named = model.query_model.named_parameters()  # type: ignore[union-attr]
    return loss / QUERIES, {name: one.grad for name, one in named if one.grad is not None}


def columns(task: Any) -> list[dict[str, Tensor]]:
    """The same texts as sentence-transformers takes them: queries, positives, and two negatives."""
    described = task.describe(task.collate(training_rows(task, QUERIES)))
    ids = [described[f"passage {number}"].ids for number in range(1, 3 * QUERIES + 1)]
    lengths = task.collate(training_rows(task, QUERIES))["query_0_starts"].diff().tolist()
    queries = list(described["query"].ids.split(lengths))
    found = []
    for column in (queries, ids[::3], ids[1::3], ids[2::3]):
        padded = pad_sequence(column, batch_first=True, padding_value=1)
        mask = pad_sequence([torch.ones_like(one) for one in column], batch_first=True)
        found.append({"input_ids": padded, "attention_mask": mask})
    return found


@pytest.mark.long
@pytest.mark.parametrize("dims", [[], [32, 8]], ids=["layers", "layers and dims"])
def test_the_loss_of_all_layers_is_that_of_sentence_transformers(
    dims: list[int], folder: Path, tmp_path: Path
) -> None:
    if find_spec("sentence_transformers") is None:
        pytest.skip("the optional package sentence-transformers is not installed")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses

    task = task_of(folder, {"layers": ALL, **({"dims": dims} if dims else {})})
    model = task.model().double().train()
    task.export(dict(model.state_dict()), tmp_path / "final")
    theirs = SentenceTransformer(str(tmp_path / "final"), device="cpu").double().train()
    inner = losses.MultipleNegativesRankingLoss(theirs, scale=1 / TEMPERATURE)
    if dims:
        wanted = losses.Matryoshka2dLoss(
            theirs, inner, dims, n_layers_per_step=-1, n_dims_per_step=-1
        )
    else:
        wanted = losses.AdaptiveLayerLoss(theirs, inner, n_layers_per_step=-1)
    loss = wanted(columns(task), torch.empty(0))
    loss.backward()
    found, gradients = ours(task, model)
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    named: Any = theirs[0].auto_model.named_parameters()
    wanted_gradients = {name: one.grad for name, one in named if one.grad is not None}
    assert len(wanted_gradients) > 40
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("base", [BERT, DECODER], ids=["bert", "llama"])
def test_a_model_of_fewer_blocks_gives_the_vectors_that_were_trained(
    base: Any, folder: Path
) -> None:
    task = task_of(folder, {"layers": [2, 1]}, base=base, pooling="mean")
    model = task.model().train()
    batch = texts(task.collate(training_rows(task, 4)))
    found = model(**batch)
    assert {*found} == {"queries", "queries_2", "queries_1", "passages", "passages_2", "passages_1"}
    assert {*model.eval()(**batch)} == {"queries", "passages"}, "evaluation has the whole model's"
    assert not model.keep_layers(BLOCKS), "all of them are the whole model"
    for layers in (2, 1):
        task.keep_layers(model, layers)
        short = model(**batch)
        for side in ("queries", "passages"):
            torch.testing.assert_close(short[side], found[f"{side}_{layers}"])


def test_vectors_that_were_not_trained_are_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = task_of(folder, {"layers": [1], "dims": [32, 8]})
    model = task.model()
    task.keep_layers(model, BLOCKS)
    task.shorten(model, 8)
    assert not caplog.records
    task.keep_layers(model, 2)
    says("vectors_untrained", caplog.messages[-1], flag="--layers 2", key="layers", is_="[1]")
    task.shorten(model, 16)
    says("vectors_untrained", caplog.messages[-1], flag="--dims 16", key="dims", is_="[32, 8]")
    plain = loaded(folder, base=BERT)
    plain.keep_layers(plain.model(), 1)
    says("vectors_untrained", caplog.messages[-1], flag="--layers 1", is_="not set")


def test_padded_rows_have_the_layers_of_streams(folder: Path) -> None:
    found = []
    for is_packed in (True, False):
        task = task_of(folder, {"layers": ALL})
        task.is_packed = is_packed
        found.append(ours(task, task.model().train()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=0)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], rtol=1e-3, atol=1e-5)


def test_layers_that_a_base_does_not_have_are_refused(folder: Path) -> None:
    with refused("layers_beyond_base", got=3, blocks=3, most=2):
        task_of(folder, {"layers": [3]}).model()
    task = task_of(folder, {"layers": [1]})
    with refused("layers_beyond_base", got=4, blocks=3, most=3):
        task.keep_layers(task.model(), 4)
    with refused("nested_in_nothing"):
        task_of(folder, {})
    with refused("layers_compiled"):
        values = task.cfg.model_dump(mode="json", exclude_unset=True)
        tasks.parse(vary(values, train={"compile": True}))


def test_the_blocks_of_a_t5_are_refused(folder: Path) -> None:
    from tests.facts import TINY_T5

    with refused("layers_unheard", family="t5"):
        task_of(folder, {"layers": [1]}, base=TINY_T5, pooling="mean").model()
