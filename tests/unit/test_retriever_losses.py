"""A retriever's losses against plain formulas, query by query; and what is refused of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.facts import experiment, write_facts
from tests.unit.test_retriever_rows import CORPUS, data, read, write_lines
from tests.unit.test_retriever_task import exported, loaded, texts, training_rows
from tests.wording import Fault, fault, refused
from trainer import tasks
from trainer.config.block import validate
from trainer.data import left_out
from trainer.protocol.task import DRAW, Places
from trainer.retrieval import reranking
from trainer.tasks.retriever import export, selection, sentence_folder
from trainer.tasks.retriever.config import Data, Loss
from trainer.tasks.retriever.loss import distillation, losses, teacher_scores

# Three queries with three, two and three passages, of which two, one and one are positives.
COUNTS, TARGETS, TEMPERATURE = [3, 2, 3], [2, 1, 1], 0.5
IDENTITIES = [1, 2, 3, 4, 5, 6, 1, 7]  # the first passage is also a negative of the last query
KNOWN, KNOWN_COUNTS = [1, 2, 4, 6, 1], [2, 1, 2]
TEACHER = [2.0, 1.0, 1.9, 0.5, 0.4, 1.0, math.nan, 3.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def pool() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randn(3 + sum(COUNTS), 4, generator=generator, dtype=torch.float64)
    return {
        "queries": drawn[:3],
        "askers": drawn[:3],
        "passages": drawn[3:],
        "counts": torch.tensor(COUNTS),
        "targets": torch.tensor(TARGETS),
        "identities": torch.tensor(IDENTITIES),
        "positive_ids": torch.tensor(KNOWN),
        "positive_counts": torch.tensor(KNOWN_COUNTS),
        "asker_ids": torch.tensor(KNOWN),
        "asker_counts": torch.tensor(KNOWN_COUNTS),
        "teacher": torch.tensor(TEACHER),
    }


def products() -> list[list[float]]:
    found = pool()
    return (found["queries"] @ found["passages"].T).tolist()


def own(query: int) -> tuple[list[int], list[int]]:
    """(positives, negatives) of a query's own passages, by their places in the pool."""
    first = sum(COUNTS[:query])
    places = [*range(first, first + COUNTS[query])]
    return places[: TARGETS[query]], places[TARGETS[query] :]


def slow(positives: str, out: Any = lambda query, place: False) -> float:
    """The sum over queries; out: whether a passage that is no own positive stays away."""
    total = 0.0
    for query, row in enumerate(products()):
        targets, _ = own(query)
        exps = [math.exp(value / TEMPERATURE) for value in row]
        others = [
            one for place, one in enumerate(exps) if place not in targets and not out(query, place)
        ]
        of_targets = [exps[place] for place in targets]
        if positives == "marginal":
            total -= math.log(sum(of_targets) / (sum(of_targets) + sum(others)))
            continue
        for one in of_targets:
            beside = sum(of_targets) if positives == "supcon" else one
            total -= math.log(one / (beside + sum(others))) / len(targets)
    return total


def fast(**loss: Any) -> float:
    return float(losses.in_batch(pool(), Loss(**loss), temperature=TEMPERATURE))


@pytest.mark.parametrize("positives", ["each", "supcon", "marginal"])
def test_several_positives_are_counted_as_published(positives: str) -> None:
    assert fast(positives=positives) == pytest.approx(slow(positives), rel=1e-12)


def is_known(query: int, place: int) -> bool:
    first = sum(KNOWN_COUNTS[:query])
    return IDENTITIES[place] in KNOWN[first : first + KNOWN_COUNTS[query]]


def is_near(query: int, place: int) -> bool:
    row = products()[query]
    return row[place] > max(row[target] for target in own(query)[0]) - 0.4


def is_taught(query: int, place: int) -> bool:
    targets, negatives = own(query)
    return place in negatives and TEACHER[place] > max(TEACHER[one] for one in targets) - 0.2


@pytest.mark.parametrize(
    ("loss", "out"),
    [
        ({"mask_duplicates": True}, is_known),
        ({"false_negatives": {"above": 0.6}}, lambda q, p: products()[q][p] > 0.6),
        ({"false_negatives": {"margin": 0.4}}, is_near),
        ({"false_negatives": {"by": "teacher", "margin": 0.2}}, is_taught),
    ],
    ids=["by id", "by score", "by the margin", "by the teacher"],
)
def test_false_negatives_leave_the_softmax(loss: dict[str, Any], out: Any) -> None:
    hidden = [(q, p) for q in range(3) for p in range(8) if p not in own(q)[0] and out(q, p)]
    assert hidden, "some are left out"
    assert fast(**validate(Loss, loss).model_dump()) == pytest.approx(slow("each", out), rel=1e-12)


def test_a_positive_chooses_its_query_without_those_that_know_it_as_well() -> None:
    table, back = products(), 0.0
    for query in range(3):
        for target in own(query)[0]:
            exps = {one: math.exp(table[one][target] / TEMPERATURE) for one in range(3)}
            rest = sum(v for one, v in exps.items() if one == query or not is_known(one, target))
            back -= math.log(exps[query] / rest) / TARGETS[query]
    want = (slow("each", is_known) + back) / 2
    assert fast(symmetric=True, mask_duplicates=True) == pytest.approx(want, rel=1e-12)


def test_a_margin_of_the_softmax_is_taken_from_positives_alone() -> None:
    whole = pool()
    one = {"queries": whole["queries"][:1], "passages": whole["passages"]}
    one["counts"] = torch.tensor([8])
    row = products()[0]
    exps = [math.exp((value - 0.3 * (place == 0)) / TEMPERATURE) for place, value in enumerate(row)]
    got = float(losses.in_batch(one, Loss(margin=0.3), temperature=TEMPERATURE))
    assert got == pytest.approx(-math.log(exps[0] / sum(exps)), rel=1e-12)


def test_a_triplet_is_a_mean_over_the_pairs_of_a_query() -> None:
    want = 0.0
    for query, row in enumerate(products()):
        targets, negatives = own(query)
        pairs = [max(0.0, 0.7 - row[p] + row[n]) for p in targets for n in negatives]
        want += sum(pairs) / len(pairs)
    assert float(losses.triplet(pool(), margin=0.7)) == pytest.approx(want, rel=1e-12)


def test_margins_of_a_teacher_are_learnt_where_both_passages_have_a_score() -> None:
    want = 0.0
    for query, row in enumerate(products()):
        (first, *_), negatives = own(query)
        squares = [
            ((row[first] - row[n]) / TEMPERATURE - (TEACHER[first] - TEACHER[n]) / 2) ** 2
            for n in negatives
            if math.isfinite(TEACHER[n])
        ]
        want += sum(squares) / len(squares)
    how = {"temperature": TEMPERATURE, "teacher_temperature": 2.0}
    assert float(distillation.margin_mse(pool(), **how)) == pytest.approx(want, rel=1e-6)


def test_a_window_in_pieces_has_the_gradients_of_one_batch(folder: Path) -> None:
    form = {"symmetric": True, "matryoshka": {"dims": [16, 5], "weights": [1.0, 0.25]}}
    task = loaded(folder, loss={**form, "query_chunk": None, "passage_chunk": None})
    model, rows = task.model(), training_rows(task, 6)
    windows = [task.collate(rows[:4]), task.collate(rows[4:])]
    for summed in task.losses(model, windows):
        summed.backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    vectors, total = model(**texts(task.collate(rows))), torch.zeros(())
    for dims, weight in ((16, 1.0), (5, 0.25)):
        queries, passages = (
            torch.nn.functional.normalize(vectors[side][:, :dims], dim=-1)
            for side in ("queries", "passages")
        )
        whole = {"queries": queries, "askers": queries, "passages": passages}
        whole["counts"] = torch.tensor([2] * 6)
        total = total + weight * losses.in_batch(whole, task.cfg.loss, temperature=0.1)
    total.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert (got[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + 1e-5, name


# Rows
# --------------------------------------------------------------------------------------------------


def test_a_query_takes_as_many_positives_as_it_has_and_fills_up_with_negatives(
    folder: Path,
) -> None:
    task = loaded(folder, data={"passages": 3, "positives": 2})
    rows = training_rows(task, 8)
    batch = task.collate(rows)
    had = [int(row["num_positives"][0]) for row in rows]
    assert batch["counts"].tolist() == [3] * 8
    assert batch["targets"].tolist() == [min(2, number) for number in had]
    assert {*had} == {1, 2}
    turn = selection.Turn(item=3, epoch=0, seed=42, draw=0)
    assert sorted(selection.targets(3, 5, turn, "by_epoch")) == [0, 1, 2]
    evaluated = {key: value for key, value in rows[had.index(2)].items() if key != DRAW}
    assert task.collate([evaluated])["targets"].tolist() == [2]


def test_each_source_of_a_mix_has_its_instruction(folder: Path) -> None:
    rest = {"valid": "queries/dev.jsonl"}
    of_other = {"files": {"train": "queries/train.jsonl"}, "query_prefix": "find: "}
    mix = {"queries/train.jsonl": 0.5, "other": {"weight": 0.5, **of_other}}
    values = experiment("retriever", folder, data={"query_prefix": "query: ", "mix": mix})
    values["data"] = {**values["data"], "files": rest}  # type: ignore[dict-item]
    task: Any = tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))
    starts = {
        task.tokenizer.decode(task.encode(row)["query"]).split(":")[0] for row in task.rows("train")
    }
    assert starts == {"query", "find"}


def scores_of(row: dict[str, Any]) -> list[float | None]:
    return [one.get("score") for one in (*row["positives"], *row["negatives"])]


def tevatron_row(**more: Any) -> dict[str, Any]:
    passages = {"positive_passages": CORPUS[:1], "negative_passages": CORPUS[1:3]}
    return {"query_id": "q", "query": "who?", **passages, **more}


def test_scores_of_a_teacher_stand_in_the_row_positives_first(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [tevatron_row(scores=[3, 0.5, None]), tevatron_row()])
    first, second = read(data("tevatron"), "train", tmp_path)
    assert scores_of(first) == [3.0, 0.5, None]
    assert scores_of(second) == [None] * 3
    of_passages, number = fault("scores_of_passages"), fault("number_wanted", key="scores")
    for scores, words in (([1.0], of_passages), ("high", of_passages), ([1.0, 2.0, "x"], number)):
        write_lines(tmp_path / "train.jsonl", [tevatron_row(scores=scores)])
        with refused(words):
            read(data("tevatron"), "train", tmp_path)


def test_scores_of_a_file_replace_those_of_the_rows(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [tevatron_row(scores=[9, 9, 9])])
    (tmp_path / "reranked.trec").write_text("q Q0 0 1 2.5 cross\nq Q0 2 2 -1.5 cross\n")
    reader = {"id": "q", "question": "who?", "answers": ["a"]}
    reader["ctxs"] = [{**CORPUS[0], "id": "0", "score": 2.5}, {"id": "2", "score": -1.5}]
    write_lines(tmp_path / "reader.jsonl", [reader])
    for name in ("reranked.trec", "reader.jsonl"):
        (row,) = read(data("tevatron", scores=name), "train", tmp_path)
        assert scores_of(row) == [2.5, None, -1.5], name
    (tmp_path / "ranks.tsv").write_text("q\t0\t1\nq\t2\t2\n")
    with refused("scores_are_ranks"):
        read(data("tevatron", scores="ranks.tsv"), "train", tmp_path)
    (tmp_path / "twice.trec").write_text("q Q0 0 1 2.5 cross\nq Q0 0 2 -1.5 cross\n")
    with refused("passage_twice", question="q"):
        read(data("tevatron", scores="twice.trec"), "train", tmp_path)


def test_what_a_reranker_writes_for_training_rows_is_read(tmp_path: Path) -> None:
    scores = np.array([1.5, -2.0, 0.25])
    write_lines(tmp_path / "train.jsonl", [*reranking.with_scores([tevatron_row()], [scores])])
    (row,) = read(data("tevatron"), "train", tmp_path)
    assert scores_of(row) == scores.tolist()


def test_rows_without_any_score_teach_nothing() -> None:
    row = {"id": "q", "query": "x", "positives": [CORPUS[0]], "negatives": [CORPUS[1]]}
    with refused("no_teacher_scores"):
        list(teacher_scores.required([row]))
    scored = {**row, "negatives": [{**CORPUS[1], "score": 1.0}]}
    assert list(teacher_scores.required([row, scored])) == [row, scored]


def test_queries_of_which_a_teacher_scored_no_positive_are_told() -> None:
    """Scores of other ids, and NaN for a positive, which JSON reads as none, taught in silence."""
    whole = [{**passage, "score": 1.0} for passage in CORPUS[:2]]
    sides: list[Any] = [
        (whole[:1], whole[1:]),
        (CORPUS[:1], whole),  # no positive
        (whole[:1], CORPUS[1:2]),  # nothing beside it
    ]
    rows = [
        {"id": str(number), "query": "x", "positives": positives, "negatives": negatives}
        for number, (positives, negatives) in enumerate(sides)
    ]
    with left_out.reading() as notes:
        assert list(teacher_scores.required(rows)) == rows
    assert [(one.place, one.why) for one in notes.first] == [
        ("query '1'", teacher_scores.UNTAUGHT),
        ("query '2'", teacher_scores.UNTAUGHT),
    ]


# Models
# --------------------------------------------------------------------------------------------------


def test_a_learnt_temperature_is_in_the_export_and_in_no_other_file(
    folder: Path, tmp_path: Path
) -> None:
    task = loaded(folder, encoder={"learn_temperature": True})
    model = task.model()
    with torch.no_grad():
        model.log_scale.log_scale.fill_(math.log(40))
    task.export({name: p.detach() for name, p in model.named_parameters()}, tmp_path / "final")
    described = json.loads((tmp_path / "final" / export.DESCRIPTION).read_text())
    assert described["temperature"] == pytest.approx(1 / 40, rel=1e-6)
    again = loaded(folder)
    assert again.load_export(tmp_path / "final").log_scale is None
    assert again.how.temperature == described["temperature"]
    with torch.no_grad():
        model.log_scale.log_scale.fill_(math.log(1000))
    scale = model.log_scale(2)
    scale.sum().backward()
    assert scale.exp().tolist() == pytest.approx([100, 100], rel=1e-5)
    assert model.log_scale.log_scale.grad.tolist() == [2.0], "it can come back"


def test_first_numbers_have_length_1_where_whole_vectors_have_it(folder: Path) -> None:
    rows = [[5, 6, 7], [8, 9]]
    for normalize in (True, False):
        task = loaded(folder, encoder={"normalize": normalize})
        model = task.model().eval()
        whole = task.embed(model, rows, side="query")
        task.shorten(model, 5)
        short = task.embed(model, rows, side="query")
        length = whole[:, :5].norm(dim=1, keepdim=True) if normalize else 1.0
        assert (short - whole[:, :5] / length).abs().max() < 1e-6
        with refused("dims_of_vectors", dims=17, has=16):
            task.shorten(model, 17)


def test_one_encoder_with_two_projections_is_not_written_for_sentence_transformers(
    folder: Path, tmp_path: Path
) -> None:
    half = {"tied": True, "projection": {"width": 16, "tied": False}}
    task = loaded(folder, encoder=half)
    model = exported(task, tmp_path / "final")
    assert not (tmp_path / "final" / sentence_folder.MODULES).exists()
    again = task.load_export(tmp_path / "final")
    vectors = [task.embed(model, [[5, 6]], side=side) for side in ("query", "passage")]
    assert (vectors[0] - vectors[1]).abs().max() > 0.01
    for side, vector in zip(("query", "passage"), vectors, strict=True):
        assert torch.equal(again_vector := task.embed(again, [[5, 6]], side=side), vector)
        assert np.isfinite(again_vector.detach()).all()


# What is refused
# --------------------------------------------------------------------------------------------------


def test_more_dimensions_than_the_model_has_are_refused(folder: Path) -> None:
    with refused("matryoshka_width", got=17, has=16):
        loaded(folder, loss={"matryoshka": {"dims": [17, 8]}}).model()
    with refused("matryoshka_width", got=33, has=32):
        encoder = {"projection": None}
        loaded(folder, encoder=encoder, loss={"matryoshka": {"dims": [33]}}).model()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": {"kind": "triplet"}}, fault("triplet_without_margin")),
        (
            {"loss": {"kind": "triplet", "margin": 0.2, "symmetric": True}},
            fault("triplet_alone", key="symmetric"),
        ),
        (
            {"loss": {"kind": "triplet", "margin": 0.2}, "data": {"passages": 1}},
            fault("triplet_without_negatives", passages=1, positives=1),
        ),
        ({"loss": {"false_negatives": {}}}, fault("false_negatives_of_nothing")),
        (
            {"loss": {"matryoshka": {"dims": [8, 4], "weights": [1.0]}}},
            fault("matryoshka_weights", got=1),
        ),
        ({"loss": {"matryoshka": {"dims": [8, 8]}}}, fault("matryoshka_twice")),
        (
            {"loss": {"distillation": {}}, "data": {"source": "nq", "files": {}}},
            fault("teacher_without_scores", asks="distillation"),
        ),
        (
            {
                "loss": {"false_negatives": {"by": "teacher", "above": 1.0}},
                "data": {"source": "nq", "files": {}},
            },
            fault("teacher_without_scores", asks='false_negatives.by="teacher"'),
        ),
    ],
)
def test_a_loss_that_would_not_mean_what_it_says_is_refused(
    changes: dict[str, Any], words: Fault, folder: Path
) -> None:
    values: dict[str, Any] = {**experiment("retriever", folder), "loss": {}}
    merged = {key: {**values[key], **block} for key, block in changes.items()}
    with refused(words):
        tasks.parse({**values, **merged})


def test_more_positives_than_passages_are_refused() -> None:
    with refused("positives_above_passages", positives=3, passages=2):
        validate(Data, {"source": "nq", "passages": 2, "positives": 3})


def test_a_reranker_refuses_a_file_of_scores(folder: Path) -> None:
    values: dict[str, Any] = {**experiment("retriever", folder), "form": "cross"}
    del values["encoder"], values["loss"]
    values["data"] = {**values["data"], "scores": "x.trec"}
    with refused("block_of_other_form", block="data.scores", form="cross"):
        tasks.parse(values)
