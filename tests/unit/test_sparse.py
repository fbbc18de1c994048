"""A sparse retriever: pooling in chunks, regularisers, metrics, its folder of weights, and what is
refused.
"""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse as scipy_sparse
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForMaskedLM

from tests.facts import LLAMA, TINY_BERT, experiment, write_facts
from tests.wording import refused
from trainer import tasks
from trainer.commands.vectors.forms import search_words, stored, writer_of
from trainer.models import losses
from trainer.models.packed.layout import pack
from trainer.protocol.abilities import Embeds, EmbedsWords
from trainer.protocol.task import DRAW, EPOCH, STEP, Places
from trainer.retrieval import embeddings
from trainer.retrieval.sparse import word_search, word_weights
from trainer.tasks.retriever.config import Sparse
from trainer.tasks.retriever.metrics import retrieval_metrics
from trainer.tasks.retriever.metrics import table_of as dense_table_of
from trainer.tasks.retriever.sparse import metrics, trained
from trainer.tasks.retriever.sparse.loss import regularisers
from trainer.tasks.retriever.sparse.pooling import TextCells, pooled

FORM = "retriever, sparse"
LENGTHS = [5, 70, 33, 1, 40, 64, 2]
WIDTH, VOCABULARY = 6, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def loaded(folder: Path, **changes: Any) -> Any:
    values = {**experiment(FORM, folder), **changes}
    return tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))


# Pooling
# --------------------------------------------------------------------------------------------------


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("positions", [1, 7, 64, 256])
@pytest.mark.parametrize("how", ["max", "sum"])
def test_weights_and_gradients_are_those_of_all_logits_at_once(
    how: Any, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_POSITIONS", positions)
    monkeypatch.setattr(losses, "CHUNK_BYTES", 1)
    inputs = (drawn(sum(LENGTHS), WIDTH), drawn(VOCABULARY, WIDTH, seed=1), drawn(VOCABULARY))
    states_MD, weight_VD, bias_V = inputs
    stream = pack([[1] * length for length in LENGTHS], bucketed=True)
    got = pooled(states_MD, weight_VD, bias_V, TextCells.of_stream(stream), how)
    rows = [(own @ weight_VD.T + bias_V).relu().log1p() for own in states_MD.split(LENGTHS)]
    wanted = torch.stack([row.max(0).values if how == "max" else row.sum(0) for row in rows])
    torch.testing.assert_close(got, wanted)
    factor = drawn(len(LENGTHS), VOCABULARY, seed=2).detach()
    gradients = torch.autograd.grad((got * factor).sum(), inputs)
    for ours, theirs in zip(
        gradients, torch.autograd.grad((wanted * factor).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_logits_of_more_than_a_chunk_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_POSITIONS", 64)
    monkeypatch.setattr(losses, "CHUNK_BYTES", 1)
    largest, linear = 0, torch.nn.functional.linear

    def watched(*given: Any) -> Tensor:
        nonlocal largest
        largest = max(largest, len(given[0]))
        return linear(*given)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    stream = pack([[1] * length for length in LENGTHS], bucketed=True)
    states = drawn(sum(LENGTHS), WIDTH)
    pooled(
        states, drawn(VOCABULARY, WIDTH), None, TextCells.of_stream(stream), "max"
    ).sum().backward()
    assert largest == 64


class Alive(TorchDispatchMode):
    """Counts the tensors of at least so many bytes that are there at the same time."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._nbytes, self._now, self.most = nbytes, dict[int, Any](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().nbytes() >= self._nbytes:
            storage = out.untyped_storage()
            key = storage._cdata
            self._now[key] = weakref.ref(storage, lambda _: self._now.pop(key))
            self.most = max(self.most, len(self._now))
        return out


@pytest.mark.parametrize("how", ["max", "sum"])
def test_the_logits_of_one_chunk_are_freed_before_the_next(
    how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_POSITIONS", 64)
    monkeypatch.setattr(losses, "CHUNK_BYTES", 1)
    places = TextCells.of_stream(pack([[1] * 64 for _ in range(5)], bucketed=True))
    inputs = (drawn(5 * 64, 1), drawn(VOCABULARY, 1, seed=1))
    with Alive(64 * VOCABULARY * 8) as alive:
        pooled(*inputs, None, places, how).sum().backward()
    assert alive.most == 1


def test_a_text_has_the_weights_of_its_logits_by_transformers(folder: Path, tmp_path: Path) -> None:
    task = loaded(folder)
    weights = {name: p.detach() for name, p in task.model().named_parameters()}
    task.export(weights, tmp_path)
    ids = task.ids([{"text": "Ada keeps it in the cellar."}], side="passage")
    with torch.no_grad():
        got = task.embed_words(task.load_export(tmp_path), ids, side="passage")
        logits = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()(torch.tensor(ids)).logits
    torch.testing.assert_close(got[0], logits[0].relu().log1p().max(0).values)


# Loss and metrics
# --------------------------------------------------------------------------------------------------


def some_weights(texts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(texts, VOCABULARY, generator=generator).relu()


def pool_of(queries: Tensor, passages: Tensor, step: int | None = None) -> dict[str, Tensor]:
    """Of two micro-batches, the first of one text less than half."""
    pool: dict[str, Tensor] = {}
    for side, texts in (("queries", queries), ("passages", passages)):
        parts = [texts[: len(texts) // 2 - 1], texts[len(texts) // 2 - 1 :]]
        pool[f"{side}_sum"] = torch.stack([part.sum(0) for part in parts])
        pool[f"{side}_count"] = torch.tensor([len(part) for part in parts])
    return pool if step is None else {**pool, STEP: torch.tensor([step, step])}


def test_regularisers_are_of_the_mean_weights_of_the_whole_pool_and_warm_up_by_the_square() -> None:
    queries, passages = some_weights(6, 1), some_weights(12, 2)
    flops = passages.mean(0).square().sum()
    how = Sparse(query_regulariser="l1", query_weight=0.5, passage_weight=0.25, warmup_steps=4)
    whole = 0.5 * queries.sum(1).mean() + 0.25 * flops
    for step, share in ((1, 1 / 16), (3, 9 / 16), (4, 1.0), (9, 1.0), (None, 1.0)):
        got = regularisers(pool_of(queries, passages, step), how)
        torch.testing.assert_close(got, share * whole)
    both = how.model_copy(update={"anti_zero": 7.0})
    wanted = whole + 7.0 * (1 / queries.sum().square() + 1 / passages.sum().square())
    torch.testing.assert_close(regularisers(pool_of(queries, passages), both), wanted)
    of_tokens = Sparse(queries="tokens", passage_weight=0.25)
    torch.testing.assert_close(regularisers(pool_of(queries, passages), of_tokens), 0.25 * flops)


def test_a_batch_of_training_says_its_step_and_one_of_an_evaluation_does_not(folder: Path) -> None:
    task = loaded(folder)
    row = task.encode(next(iter(task.rows("train"))))
    assert STEP not in task.collate([row])
    draw = {DRAW: np.array([0]), EPOCH: np.array([0]), STEP: np.array([3])}
    assert task.collate([{**row, **draw}])[STEP].tolist() == [3]


def test_metrics_are_those_of_dense_vectors_and_tell_how_many_words_texts_have() -> None:
    queries, passages = some_weights(3, 3), some_weights(6, 4)
    passages[5] = passages[0]  # one passage that two rows bring
    batch = {
        "numbers": torch.tensor([2, 0, 1]),
        "identities": torch.tensor([2**40 + 5, 7, 9, 11, 13, 2**40 + 5]),
        "positive_ids": torch.tensor([2**40 + 5, 9, 11]),
        "positive_counts": torch.tensor([1, 1, 1]),
    }
    table = metrics.table_of(batch, queries, passages)
    got = metrics.sparse_metrics(table, vocabulary=VOCABULARY, temperature=2.0)
    dense = retrieval_metrics(dense_table_of(batch, queries, passages), temperature=2.0)
    words = {"query_words", "passage_words", "flops"}
    assert {name: got[name] for name in got.keys() - words} == pytest.approx(dense)
    asked, held = (texts > 0 for texts in (queries, passages[:5]))
    assert got["query_words"] == pytest.approx(float(asked.sum(1).float().mean()))
    assert got["passage_words"] == pytest.approx(float(held.sum(1).float().mean()))
    shared = (asked[:, None] & held).sum(-1).float().mean()
    assert got["flops"] == pytest.approx(float(shared), rel=1e-6)


# On the disk
# --------------------------------------------------------------------------------------------------


def written(folder: Path, weights: Tensor, *, side: Any = "passage", **how: Any) -> Any:
    rows = [{"id": f"{side}{n}", "text": "x"} for n in range(len(weights))]
    plan = {"model": "m", "texts": "t", "dtype": "float32", "shard_rows": 7, "count": len(rows)}
    places = {row["id"]: n for n, row in enumerate(rows)}

    def encode(of_shard: Any) -> Any:
        return scipy_sparse.csr_matrix(weights[[places[row["id"]] for row in of_shard]].numpy())

    whole = word_weights.WordPlan(**{**plan, "side": side, **how})
    return word_weights.write(folder, lambda: iter(rows), encode, plan=whole)


def test_a_search_finds_what_dense_products_do_in_any_blocks(tmp_path: Path) -> None:
    queries, passages = some_weights(9, 5), some_weights(40, 6)
    queries[4] = 0  # a question without words has no hit
    corpus = written(tmp_path / "p", passages)
    asked = written(tmp_path / "q", queries, side="query")
    assert (tmp_path / "p" / "ids.txt").read_text().split()[:2] == ["passage0", "passage1"]
    assert scipy_sparse.load_npz(tmp_path / "p" / "vectors-00000.npz").shape == (7, VOCABULARY)
    wanted_QK, rows_QK = (queries @ passages.T).sort(dim=1, descending=True, stable=True)
    for passage_block, query_block in ((64, 64), (3, 2)):
        blocks = {"passage_block": passage_block, "query_block": query_block}
        found = word_search.search(asked, [corpus], depth=5, **blocks)
        for number in range(9):
            if number == 4:
                assert found.hits.rows[number].tolist() == [-1] * 5
                continue
            assert found.hits.rows[number].tolist() == rows_QK[number, :5].tolist()
            np.testing.assert_allclose(
                found.hits.scores[number], wanted_QK[number, :5].numpy(), rtol=1e-6
            )
    shared = ((queries > 0)[:, None] & (passages > 0)).sum(-1).double().mean()
    assert found.flops == pytest.approx(float(shared))
    assert corpus.words == pytest.approx(float((passages > 0).sum(1).double().mean()))


def test_weights_of_float16_are_read_again_without_those_that_it_rounds_to_0(
    tmp_path: Path,
) -> None:
    weights = some_weights(9, 7)
    weights[2] = 0
    weights[3, 5] = 1e-9
    corpus = written(tmp_path / "p", weights, dtype="float16")
    got = np.concatenate([matrix.toarray() for matrix in corpus.matrices()])
    assert np.array_equal(got, weights.half().float().numpy())
    assert corpus.stored == (got > 0).sum() < (weights > 0).sum()
    with np.load(tmp_path / "p" / "vectors-00000.npz") as file:
        assert file["data"].dtype == np.float16
        assert len(file["data"]) == len(file["indices"]) == file["indptr"][-1]
    found = word_search.search(written(tmp_path / "q", weights, side="query"), [corpus], depth=1)
    assert found.hits.rows[2].tolist() == [-1]
    weights[0, 0] = 1e5
    with refused("vectors_dtype", dtype="float16", value="1e+05"):
        written(tmp_path / "large", weights, dtype="float16")
    weights[0, 0] = torch.nan
    with refused("not_finite"):
        written(tmp_path / "nan", weights)


def test_a_search_tells_how_many_words_texts_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 0.0]])
    written(tmp_path / "p", weights)
    written(tmp_path / "q", weights[:1], side="query")
    both = stored("sparse", tmp_path / "q", [tmp_path / "p"], verify=True)
    assert search_words(*both, 3).rows.tolist() == [[0, 1, -1]]
    said = "2.0 words of a question, 1.5 of a passage, 1.500 in common"
    assert said in capsys.readouterr().out


def test_an_encoder_keeps_the_order_of_its_rows(folder: Path) -> None:
    task = loaded(folder)
    model = task.model().eval()
    encode = word_weights.encoder_of(task, model, side="query", batch=2)
    texts = ["a key", "map", "where does Ada keep the red key"]  # by length a circle of three
    got = encode([{"id": text, "text": text} for text in texts])
    for number, text in enumerate(texts):
        ids = task.ids([{"text": text}], side="query")
        with torch.no_grad():
            wanted = task.embed_words(model, ids, side="query")[0]
        row = torch.from_numpy(got[number].toarray()[0])
        torch.testing.assert_close(row, wanted, rtol=1e-5, atol=1e-6)


def test_predictions_are_scores_or_the_words_of_a_query(folder: Path) -> None:
    task = loaded(folder)
    model, texts = task.model().eval(), ["a key", "the map"]
    raw = {"query": "where is it", "ctxs": [{"text": text} for text in texts]}
    row = trained.row_to_predict(task, raw, "row 1")
    alone = trained.row_to_predict(task, {"query": "where is it"}, "row 2")
    scores, words = trained.predict(task, model, [row, alone], None)  # type: ignore[arg-type]
    assert len(scores["scores"]) == 2
    values = [*words["words"].values()]
    assert values == sorted(values, reverse=True)
    assert values[-1] > 0


# Bad input
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "block", "form"),
    [
        ({"encoder": {"pooling": "mean"}}, "encoder", "sparse"),
        ({"encoder": {"projection": {"width": 8}}}, "encoder", "sparse"),
        ({"cross": {"loss": "margin"}}, "cross", "sparse"),
        ({"late": {"width": 8}}, "late", "sparse"),
        ({"form": "bi", "loss": {}}, "sparse", "bi"),
    ],
)
def test_a_key_of_another_form_is_refused(
    changes: dict[str, Any], block: str, form: str, folder: Path
) -> None:
    with refused("block_of_other_form", block=block, form=form):
        loaded(folder, **changes)


def test_what_has_no_meaning_for_words_is_refused(folder: Path) -> None:
    with refused("matryoshka_of_words"):
        loaded(folder, loss={"matryoshka": {"dims": [8]}})
    with refused("regulariser_of_tokens", key="query_weight"):
        loaded(folder, sparse={"queries": "tokens", "query_weight": 0.1})


def test_a_base_without_a_masked_lm_head_is_refused(folder: Path, tmp_path: Path) -> None:
    with refused("base_fills_no_masks", family="llama"):
        loaded(folder, base=LLAMA)
    bert = loaded(folder, base=TINY_BERT)
    weights = {name: p.detach() for name, p in bert.model().named_parameters()}
    bert.export(weights, tmp_path / "whole")
    whole: Any = AutoModelForMaskedLM.from_pretrained(tmp_path / "whole")
    whole.bert.save_pretrained(tmp_path / "body")
    with refused("masked_lm_head_absent", base=str(tmp_path / "body")):
        loaded(folder, base=str(tmp_path / "body")).model()


def test_adapters_in_the_output_layer_are_refused(folder: Path) -> None:
    # a layer that shares its matrix with the embedding can have none
    untied = {"config": {**TINY_BERT["config"], "tie_word_embeddings": False}, "seed": 1}
    with refused("adapters_in_output"):
        loaded(folder, base=untied, lora={"r": 2, "targets": ["query", "decoder"]}).model()


def test_an_export_of_another_form_is_refused(folder: Path, tmp_path: Path) -> None:
    task = loaded(folder)
    task.export({name: p.detach() for name, p in task.model().named_parameters()}, tmp_path)
    places = Places(folder, folder / "cache", folder)
    dense = tasks.load(tasks.parse(experiment("retriever", folder)), places)
    with refused("export_of_other_form", folder=tmp_path, form="sparse"):
        dense.load_export(tmp_path)
    (tmp_path / "sparse_config.json").unlink()
    with refused("sparse_export_absent"):
        task.load_export(tmp_path)


def test_an_export_says_what_an_experiment_states_otherwise(folder: Path, tmp_path: Path) -> None:
    first = loaded(folder, sparse={"pooling": "sum", "temperature": 3.0})
    first.export({name: p.detach() for name, p in first.model().named_parameters()}, tmp_path)
    second = loaded(folder, sparse={})
    second.load_export(tmp_path)
    assert (second.words.pooling, second.words.temperature) == ("sum", 3.0)
    described = json.loads((tmp_path / "sparse_config.json").read_text())
    assert described["queries"] == "encoded"


def test_flags_and_folders_of_other_forms_are_refused(folder: Path, tmp_path: Path) -> None:
    task = loaded(folder)
    assert isinstance(task, EmbedsWords)
    assert not isinstance(task, Embeds)
    how: dict[str, Any] = {"side": "passage", "dtype": "float16", "dims": None, "factor": None}
    for flag, given in (("--dims", {"dims": 8}), ("--pool_factor", {"factor": 2.0})):
        with refused("flag_of_other_form", flag=flag, own="sparse"):
            writer_of(task, **{**how, **given})
    with refused("dtype_of_words", dtype="int8"):
        writer_of(task, **{**how, "dtype": "int8"})
    written(tmp_path / "p", some_weights(3, 1))
    assert embeddings.form_of(tmp_path / "p") == "sparse"
    written(tmp_path / "q", some_weights(2, 1), side="query", model="other")
    with refused("vectors_of_two_models"):
        stored("sparse", tmp_path / "q", [tmp_path / "p"], verify=False)
    narrow = written(tmp_path / "narrow", some_weights(2, 1)[:, :9])
    asked = written(tmp_path / "asked", some_weights(2, 1), side="query")
    with refused("words_of_two_widths", width=9, other=VOCABULARY):
        word_search.search(asked, [narrow], depth=3)
    path = tmp_path / "p" / "vectors-00000.npz"
    path.write_bytes(path.read_bytes()[:-30])
    with refused("vectors_torn"):
        next(word_weights.read(tmp_path / "p").matrices())
    (tmp_path / "p" / "meta.json").unlink()
    with refused("vectors_unfinished"):
        word_weights.read(tmp_path / "p")
