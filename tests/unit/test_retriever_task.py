"""A retriever's tokens, choices, files and metrics."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.bases import base_of
from tests.facts import LLAMA, TINY_BASE, TINY_BERT, experiment, write_facts
from tests.wording import refused
from trainer import tasks
from trainer.protocol.abilities import Embeds
from trainer.protocol.task import DRAW, EPOCH, Places
from trainer.tasks.retriever import metrics, selection
from trainer.tasks.retriever.config import Loss
from trainer.tasks.retriever.loss import distillation, losses
from trainer.tasks.retriever.model import pooled
from trainer.tasks.retriever.tokens import Tokens

DECODER: dict[str, Any] = {
    "base": LLAMA,
    "encoder": {"pooling": "eos"},
    "data": {"append_eos": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def loaded(folder: Path, **changes: Any) -> Any:
    return tasks.load(
        tasks.parse(experiment("retriever", folder, **changes)),
        Places(folder, folder / "cache", folder),
    )


def training_rows(task: Any, count: int, epoch: int = 0) -> list[dict[str, Any]]:
    found = [task.encode(row) for _, row in zip(range(count), task.rows("train"), strict=False)]
    return [
        {**row, DRAW: np.array([3 + n]), EPOCH: np.array([epoch])} for n, row in enumerate(found)
    ]


def texts(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in batch.items() if name.startswith(("query_", "passage_"))}


# Tokens
# --------------------------------------------------------------------------------------------------


def test_passages_are_title_separator_and_text_behind_their_prefix(folder: Path) -> None:
    task = loaded(
        folder, data={"passage_prefix": "passage: ", "separator": " | ", "query_prefix": "query: "}
    )
    (passage,) = task.ids([{"title": "Ada", "text": "the key"}], side="passage")
    assert task.tokenizer.decode(passage) == "passage: Ada | the key"
    (query,) = task.ids([{"text": "the key"}], side="query")
    assert task.tokenizer.decode(query) == "query: the key"


def test_a_separator_that_names_a_special_token_is_that_token(folder: Path) -> None:
    task = loaded(folder, data={"separator": "eos_token"})
    (passage,) = task.ids([{"title": "Ada", "text": "key"}], side="passage")
    assert task.tokenizer.decode(passage) == "Ada<|endoftext|>key"


def test_an_end_is_appended_once_within_the_limit(folder: Path) -> None:
    task = loaded(folder, data={"append_eos": True, "query_tokens": 6})
    short, long = task.ids(
        [{"text": "a"}, {"text": "where does Ada keep the key " * 5}], side="query"
    )
    assert short[-1] == long[-1] == task.tokenizer.eos_token_id
    assert len(long) == 6
    assert short.count(task.tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("side", ["query", "passage"])
def test_a_limit_that_special_tokens_fill_is_refused(side: str, folder: Path) -> None:
    task = loaded(folder, data={"append_eos": True})
    around = len(task.tokens.before) + len(task.tokens.after)
    data = task.cfg.data.model_copy(update={f"{side}_tokens": around})
    with refused("limit_without_room", side=side, limit=around, least=around + 1):
        Tokens(task.tokenizer, data)


def test_batches_are_padded_to_a_multiple_but_never_beyond_the_limit(folder: Path) -> None:
    base = base_of("retriever", "mpnet", vocab_size=384)
    task = loaded(folder, base=base, data={"query_tokens": 13, "pad_to_multiple_of": 8})
    assert not task.is_packed, "an MPNet has biases of positions: it is padded"
    assert task._batches.lay_out([[5] * 3], "query")["query_ids"].shape == (1, 8)
    made = task._batches.lay_out([[5] * 12, [5]], "query")
    assert made["query_ids"].shape == (2, 13)
    assert made["query_mask"].sum(-1).tolist() == [12, 1]


# Choices
# --------------------------------------------------------------------------------------------------


def test_every_epoch_walks_on_through_the_same_shuffled_negatives() -> None:
    chosen = [
        selection.negatives(6, 2, selection.Turn(item=3, epoch=epoch, seed=42, draw=0), "by_epoch")
        for epoch in range(3)
    ]
    assert sorted(place for places in chosen for place in places) == list(range(6)), (
        "three epochs of two see all six"
    )


def test_too_few_negatives_are_repeated_and_the_draw_can_be_repeated() -> None:
    turn = selection.Turn(item=3, epoch=1, seed=42, draw=0)
    chosen = selection.negatives(2, 5, turn, "by_epoch")
    assert len(chosen) == 5
    assert set(chosen) <= {0, 1}
    assert chosen == selection.negatives(2, 5, turn, "by_epoch")


@pytest.mark.parametrize("how", ["drawn", "first"])
def test_other_ways_of_choosing_have_distinct_negatives(how: Any) -> None:
    turns = [selection.Turn(item=3, epoch=0, seed=42, draw=draw) for draw in range(20)]
    chosen = [tuple(selection.negatives(9, 4, turn, how)) for turn in turns]
    assert all(len(set(places)) == 4 for places in chosen)
    assert (len(set(chosen)) > 10) == (how == "drawn")
    assert (len({selection.positive(5, turn, how) for turn in turns}) > 2) == (how == "drawn")


def test_training_takes_one_positive_and_evaluation_all(folder: Path) -> None:
    task = loaded(folder)
    (row,) = [row for row in training_rows(task, 2) if int(row["num_positives"][0]) == 2]
    first, second = (
        selection.choose({**row, EPOCH: np.array([epoch])}, task.cfg.data, seed=42)[0]
        for epoch in (0, 1)
    )
    assert {first, second} == {0, 1}
    evaluated = {key: value for key, value in row.items() if key != DRAW}
    assert selection.choose(evaluated, task.cfg.data, seed=42) == [0, 1, 2]


# Model
# --------------------------------------------------------------------------------------------------


def test_every_pooling_ignores_padding() -> None:
    states = torch.arange(24.0).view(2, 4, 3)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    assert pooled(states, mask, "cls").tolist() == states[:, 0].tolist()
    assert pooled(states, mask, "eos").tolist() == [states[0, 1].tolist(), states[1, 3].tolist()]
    assert torch.equal(
        pooled(states, mask, "mean"), torch.stack([states[0, :2].mean(0), states[1].mean(0)])
    )


def test_a_decoder_pools_its_last_token_whatever_the_padding(folder: Path) -> None:
    task = loaded(folder, **DECODER)
    model = task.model().eval()
    rows = task.ids(
        [{"text": "a key"}, {"text": "the attic of the tower by the harbour"}], side="passage"
    )
    together = task.embed(model, rows, side="passage")
    assert isinstance(task, Embeds)
    for row, vector in zip(rows, together, strict=True):
        assert (task.embed(model, [row], side="passage")[0] - vector).abs().max() < 1e-6


def test_the_first_token_of_a_decoder_is_refused_as_its_vector(folder: Path) -> None:
    with refused("pooling_of_decoder", pooling='"cls"'):
        loaded(folder, base=TINY_BASE, encoder={"pooling": "cls"})


def test_a_projection_of_another_width_than_the_base_is_refused(folder: Path) -> None:
    with refused("projection_width", width=31, has=32):
        loaded(folder, encoder={"projection": {"in_width": 31}}).model()


# Losses
# --------------------------------------------------------------------------------------------------


def pool_of(queries: int, passages: int, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "queries": torch.randn(queries, 5, generator=generator, dtype=torch.float64),
        "passages": torch.randn(queries * passages, 5, generator=generator, dtype=torch.float64),
        "counts": torch.full((queries,), passages),
    }


def test_a_temperature_divides_the_scores_with_chunks_as_without(folder: Path) -> None:
    values = []
    for loss in ({}, {"query_chunk": 1, "passage_chunk": 3}):
        task = loaded(folder, encoder={"temperature": 0.02}, loss=loss)
        model = task.model()
        batch = task.collate(training_rows(task, 4))
        (summed,) = task.losses(model, [batch])
        found = model(**texts(batch))
        scores = found["queries"] @ found["passages"].T / 0.02
        values += [
            float(summed.detach()),
            float(F.cross_entropy(scores, torch.arange(4) * 2, reduction="sum").detach()),
        ]
    assert values == pytest.approx([values[0]] * 4, rel=1e-6)


def test_known_positives_of_other_queries_are_no_negatives_when_masked() -> None:
    pool = pool_of(3, 2)
    pool |= {
        "identities": torch.tensor([7, 1, 8, 2, 7, 3])
    }  # the first and the third query want the same passage
    pool |= {"positive_ids": torch.tensor([7, 8, 1, 7]), "positive_counts": torch.tensor([1, 2, 1])}
    got = losses.in_batch(pool, Loss(mask_duplicates=True), temperature=0.5)
    scores = pool["queries"] @ pool["passages"].T / 0.5
    for query, passage in ((0, 4), (2, 0), (1, 1)):
        scores[query, passage] = -math.inf
    assert float(got) == pytest.approx(
        float(F.cross_entropy(scores, torch.tensor([0, 2, 4]), reduction="sum"))
    )


def test_distillation_is_the_divergence_from_the_teacher_over_the_scored_passages() -> None:
    pool = pool_of(3, 3)
    nan = math.nan
    pool["teacher"] = torch.tensor([1.0, 0.5, -1.0, 2.0, nan, 0.0, 1.0, nan, nan])
    pool["queries"].requires_grad_()
    got = distillation.distil(pool, temperature=0.7, teacher_temperature=2.0)
    scores = (pool["queries"][:, None] * pool["passages"].view(3, 3, 5)).sum(-1) / 0.7
    wanted = 0.0
    for query, places in ((0, [0, 1, 2]), (1, [0, 2])):
        teacher = (pool["teacher"].view(3, 3)[query, places].double() / 2.0).softmax(-1)
        wanted += float(
            F.kl_div(scores[query, places].log_softmax(-1), teacher, reduction="sum").detach()
        )
    assert float(got.detach()) == pytest.approx(wanted, rel=1e-6)
    (gradient,) = torch.autograd.grad(got, pool["queries"])
    assert gradient.isfinite().all()
    assert gradient[2].abs().max() == 0


@pytest.mark.long
def test_a_retriever_learns_from_a_readers_scores(folder: Path, tmp_path: Path) -> None:
    rows = []
    for n in range(4):
        ctxs = [
            {"title": "t", "text": f"passage {n} {k}", "score": float(k == n % 3)} for k in range(3)
        ]
        rows.append({"question": f"question {n}", "answers": ["a"], "ctxs": ctxs})
    (tmp_path / "train.json").write_text(json.dumps(rows))
    changes: dict[str, Any] = {
        "loss": {"contrastive": 0.0, "distillation": {"teacher_temperature": 0.5}},
        "tokenizer": str(folder / "tokenizer"),
    }
    values = experiment("retriever", folder, **changes)
    values["data"] = {"source": "fid", "passages": 3}
    task = tasks.load(tasks.parse(values), Places(tmp_path, tmp_path, tmp_path))
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch, seen = task.collate(training_rows(task, 4)), []
    for _ in range(40):
        (summed,) = task.losses(model, [batch])
        optimizer.zero_grad()
        summed.backward()
        optimizer.step()
        seen.append(float(summed.detach()))
    assert seen[-1] < 0.05 * seen[0]


# Metrics
# --------------------------------------------------------------------------------------------------


def table_of(scores: list[list[float]], relevant: list[list[int]]) -> torch.Tensor:
    """A table whose dot products are these scores: queries are unit vectors, passages the
    columns.
    """
    width, number = len(scores), torch.arange(len(scores))
    ids = torch.arange(len(scores[0])) * 12345678901234567 % (1 << 62)
    pairs = [(query, place) for query, places in enumerate(relevant) for place in places]
    owner, column = (
        torch.tensor([pair[0] for pair in pairs]),
        torch.tensor([pair[1] for pair in pairs]),
    )
    rows = [
        (metrics.QUERY, number, torch.zeros_like(number), torch.eye(width)),
        (metrics.PASSAGE, torch.zeros_like(ids), ids, torch.tensor(scores).T),
        (metrics.RELEVANT, owner, ids[column], torch.zeros(len(pairs), width)),
    ]
    made = [
        metrics.rows_of(kind, numbers=n, ids=i, vectors=vectors) for kind, n, i, vectors in rows
    ]
    return torch.cat(made)


def test_metrics_are_those_of_the_ranking() -> None:
    scores = [[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]]
    table = table_of(scores, [[0], [2, 0]])
    found = metrics.retrieval_metrics(table, temperature=1.0)
    assert found["mrr@10"] == (1 + 1 / 2) / 2
    assert found["recall@1"] == 0.5
    assert found["recall@5"] == 1.0
    one = -math.log(math.exp(3) / sum(map(math.exp, scores[0])))
    rest = math.exp(1) + math.exp(3)
    two = -(math.log(math.exp(2) / (math.exp(2) + rest)) + math.log(1 / (1 + rest))) / 2
    assert found["loss"] == pytest.approx((one + two) / 2, rel=1e-6)
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(1))
    assert (
        metrics.retrieval_metrics(torch.cat([table[order], table[2:4]]), temperature=1.0) == found
    )


@pytest.mark.parametrize(("place", "reciprocal"), [(1, 1.0), (10, 0.1), (11, 0.0)])
def test_mrr_at_10_counts_ten_places(place: int, reciprocal: float) -> None:
    falling = [[float(-column) for column in range(12)]]
    found = metrics.retrieval_metrics(table_of(falling, [[place - 1]]), temperature=1.0)
    assert found["mrr@10"] == reciprocal


def test_vectors_that_are_all_alike_find_nothing() -> None:
    found = metrics.retrieval_metrics(table_of([[1.0] * 30] * 2, [[0], [1]]), temperature=1.0)
    assert (found["mrr@10"], found["recall@20"]) == (0.0, 0.0)


# Folders
# --------------------------------------------------------------------------------------------------


def exported(task: Any, folder: Path) -> Any:
    model = task.model()
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(3)
    for name, values in weights.items():
        weights[name] = values + 0.1 * torch.randn(values.shape, generator=generator)
    task.export(weights, folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
    return model.eval()


KINDS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"encoder": {"tied": False}},
    "untied with one projection": {
        "encoder": {"tied": False, "projection": {"width": 16, "tied": True}}
    },
    "no projection": {"encoder": {"projection": None}},
    "decoder": DECODER,
    "adapters": {**DECODER, "lora": {"r": 4, "dropout": 0.0}},
    "untied adapters": {
        **DECODER,
        "encoder": {"pooling": "eos", "tied": False},
        "lora": {"r": 4, "dropout": 0.0},
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_embeds_as_the_trained_one(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    if "adapters" in kind:
        pytest.importorskip("peft", reason="the optional package peft is not installed")
    task = loaded(folder, **KINDS[kind])
    model = exported(task, tmp_path / "final")
    again = task.load_export(tmp_path / "final")
    rows = task.ids([{"text": "where is the key"}, {"text": "the map"}], side="query")
    for side in ("query", "passage"):
        assert torch.equal(task.embed(model, rows, side=side), task.embed(again, rows, side=side))
    trained = {name for name, p in task.model().named_parameters() if p.requires_grad}
    assert ("adapters" in kind) == all("lora_" in name or "pooler" in name for name in trained)


def test_training_goes_on_from_an_untied_folder_with_its_pooler(
    folder: Path, tmp_path: Path
) -> None:
    model = exported(loaded(folder, encoder={"tied": False}), tmp_path / "final")
    assert (tmp_path / "final" / "query_model" / "config.json").is_file()
    next_task = loaded(
        folder, base=str(tmp_path / "final"), tokenizer=None, encoder={"tied": False}
    )
    for one, two in zip(model.parameters(), next_task.model().parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_folder_as_tevatron_writes_it_is_read_without_our_description(
    folder: Path, tmp_path: Path
) -> None:
    task = loaded(folder, encoder={"tied": False})
    model = exported(task, tmp_path / "final")
    (tmp_path / "final" / "retriever_config.json").unlink()
    (tmp_path / "final" / "config.json").unlink()
    other = loaded(folder, encoder={"tied": True, "projection": None, "normalize": False})
    again = other.load_export(tmp_path / "final")
    rows = task.ids([{"text": "the map"}], side="passage")
    assert torch.equal(
        task.embed(model, rows, side="passage"), other.embed(again, rows, side="passage")
    )


def test_a_tied_pooler_is_written_under_both_names_of_tevatron(
    folder: Path, tmp_path: Path
) -> None:
    exported(loaded(folder), tmp_path / "final")
    found = torch.load(tmp_path / "final" / "pooler.pt", weights_only=True)
    assert sorted(found) == ["linear_p.bias", "linear_p.weight", "linear_q.bias", "linear_q.weight"]
    assert torch.equal(found["linear_p.weight"], found["linear_q.weight"])
    said = json.loads((tmp_path / "final" / "pooler_config.json").read_text())
    assert said == {"input_dim": 32, "output_dim": 16, "tied": True, "normalize": True}


def test_a_missing_pooler_is_an_error_and_no_new_one(folder: Path, tmp_path: Path) -> None:
    task = loaded(folder)
    exported(task, tmp_path / "final")
    (tmp_path / "final" / "pooler.pt").unlink()
    with refused("pooler_absent"):
        task.load_export(tmp_path / "final")
    with refused("retriever_absent"):
        task.load_export(tmp_path)


def test_adapters_on_another_base_are_refused(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the optional package peft is not installed")
    exported(loaded(folder, **KINDS["adapters"]), tmp_path / "final")
    other = loaded(folder, **{**KINDS["adapters"], "base": {**LLAMA, "seed": 2}})
    with refused("adapters_of_other_base", base=re.compile("random:.*")):
        other.load_export(tmp_path / "final")
    with refused("targets_unknown", targets=["c_attn"], layers=re.compile(".*q_proj.*")):
        loaded(folder, **DECODER, lora={"targets": ["c_attn"]}).model()


def test_peft_itself_reads_the_adapters(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the optional package peft is not installed")
    from trainer.models import base_model

    task = loaded(
        folder, **{**KINDS["adapters"], "encoder": {"pooling": "eos", "projection": None}}
    )
    model = exported(task, tmp_path / "final")
    body = base_model.load(task.cfg.base, task.places, precision="fp32", kind="encoder")
    theirs = peft.PeftModel.from_pretrained(body, tmp_path / "final").eval()
    ids = torch.tensor([[5, 6, 7]])
    mine = model.query_model(input_ids=ids).last_hidden_state
    assert torch.equal(theirs(input_ids=ids).last_hidden_state, mine)


def test_the_texts_of_a_model_hold_against_another_experiment(folder: Path, tmp_path: Path) -> None:
    exported(loaded(folder, data={"query_prefix": "query: "}), tmp_path / "final")
    other = loaded(folder)
    other.load_export(tmp_path / "final")
    (ids,) = other.ids([{"text": "key"}], side="query")
    assert other.tokenizer.decode(ids) == "query: key"
    assert TINY_BERT["config"]["model_type"] == "bert"
