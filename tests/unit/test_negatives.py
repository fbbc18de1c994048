"""Negatives are hits that answer nothing, drawn alike every time; what is written, the readers of
both tasks read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.wording import refused
from trainer.data import left_out
from trainer.data.readers import passages as corpora
from trainer.data.readers import questions, retrieved
from trainer.data.readers.jsonl import read_jsonl
from trainer.data.readers.questions import Query
from trainer.data.readers.rankings import Hit, Rankings
from trainer.errors import DataError
from trainer.protocol.task import Row
from trainer.retrieval.negatives import (
    UNTRAINABLE,
    RankRange,
    bm25,
    positives_of,
    reader_rows,
    training_rows,
    write_rows,
)
from trainer.retrieval.rankings import mean_measures

NQ = Path(__file__).resolve().parents[2] / os.environ.get("LATHE_DATA", "../shared/data") / "nq"
TEXTS = {
    "gold": "Rome is it.",
    "twin": "Rome is it.",
    "hit": "It was Rome!",
    **{f"n{i}": f"no {i}" for i in range(9)},
}
PASSAGES = {name: {"id": name, "title": f"T{name}", "text": text} for name, text in TEXTS.items()}
QUERY = Query("q", "which city", ["rome"], ["gold"])


def run(*ids: str) -> Rankings:
    return {"q": [Hit(name, float(-rank)) for rank, name in enumerate(ids)]}


def negatives(found: Rankings, query: Query = QUERY, **window: Any) -> list[str]:
    chosen = RankRange(**{"count": 50, **window})
    (row,) = training_rows(
        [found], [query], PASSAGES, positives=positives_of([query], None), window=chosen
    )
    return [passage["docid"] for passage in row["negative_passages"]]


def test_a_negative_is_no_positive_nor_its_twin_and_holds_no_answer() -> None:
    assert negatives(run("n1", "gold", "twin", "hit", "n0")) == ["n1", "n0"]
    assert negatives(run("n1", "gold", "twin", "hit", "n0"), may_have_answer=True) == [
        "n1",
        "hit",
        "n0",
    ]


def test_passages_of_titles_alone_are_told_apart_by_these() -> None:
    texts = {"gold": "Rome", "twin": "Rome", "n0": "Paris", "n1": "Oslo"}
    titles = {name: {"id": name, "title": text, "text": " "} for name, text in texts.items()}
    (row,) = training_rows(
        [run("twin", "n0", "gold", "n1")],
        [QUERY],
        titles,
        positives={"q": ["gold"]},
        window=RankRange(9),
    )
    assert [passage["docid"] for passage in row["negative_passages"]] == ["n0", "n1"]


def test_a_positive_that_a_question_names_twice_is_one(tmp_path: Path) -> None:
    path = tmp_path / "queries.jsonl"
    path.write_text('{"query_id": "q", "query": "where", "positive_passages": ["b", "a", "b"]}\n')
    assert [query.positives for query in questions.queries(path)] == [["b", "a"]]


def test_bm25_refuses_passages_without_a_word() -> None:
    pytest.importorskip("bm25s", reason="the extra bm25 is not installed")
    rows = [{"id": "a", "title": "", "text": "the of"}, {"id": "b", "title": "", "text": "?"}]
    with refused("bm25_no_word", count=2):
        bm25([QUERY], rows, depth=3)


def test_negatives_come_out_of_the_window_of_ranks() -> None:
    assert negatives(run("n0", "n1", "gold", "n2", "n3", "n4"), first=2, last=5) == [
        "n1",
        "n2",
        "n3",
    ]


def test_a_sample_is_fixed_by_seed_and_question_and_keeps_the_order_of_the_ranking() -> None:
    found = run(*(f"n{i}" for i in range(9)))
    drawn = {seed: negatives(found, count=4, seed=seed) for seed in range(6)}
    assert all(ids == sorted(ids) and len(set(ids)) == 4 for ids in drawn.values())
    assert len(set(map(tuple, drawn.values()))) > 1
    assert drawn[3] == negatives(found, count=4, seed=3)
    other = Query("other", "which city", ["rome"], ["gold"])
    assert any(
        negatives({"other": found["q"]}, other, count=4, seed=seed) != drawn[seed]
        for seed in range(6)
    )


def test_judgements_come_before_what_the_questions_name() -> None:
    assert positives_of([QUERY], None) == {"q": ["gold"]}
    assert positives_of([QUERY], {"q": {"n0": 2, "n1": 0}}) == {"q": ["n0"]}
    assert positives_of([QUERY], {"another": {"n0": 2}}) == {"q": []}


def test_questions_without_a_positive_or_a_negative_are_left_out() -> None:
    queries = [QUERY, Query("bare", "q", [], []), Query("easy", "q", [], ["gold"])]
    found = {**run("n1"), "bare": [Hit("n1", 1.0)], "easy": [Hit("gold", 1.0)]}
    rows = training_rows(
        [found], queries, PASSAGES, positives=positives_of(queries, None), window=RankRange(3)
    )
    with left_out.reading() as notes:
        assert [row["query_id"] for row in rows] == ["q"]
    assert notes.counts == {UNTRAINABLE: 2}
    assert [one.place for one in notes.first] == ["question 'bare'", "question 'easy'"]
    with refused("no_positive_and_negative"):
        list(
            training_rows(
                [], queries, PASSAGES, positives=positives_of(queries, None), window=RankRange(3)
            )
        )


@pytest.mark.parametrize(
    "values", [{"count": 0}, {"count": 1, "first": 0}, {"count": 1, "first": 5, "last": 4}]
)
def test_an_empty_window_is_refused(values: Any) -> None:
    with refused("rank_range"):
        RankRange(**values)


def test_a_training_row_is_tevatrons(tmp_path: Path) -> None:
    rows = training_rows(
        [run("n1")], [QUERY], PASSAGES, positives=positives_of([QUERY], None), window=RankRange(3)
    )
    assert write_rows(tmp_path / "train.jsonl", rows) == 1
    assert json.loads((tmp_path / "train.jsonl").read_text()) == {
        "query_id": "q",
        "query": "which city",
        "answers": ["rome"],
        "positive_passages": [{"docid": "gold", "title": "Tgold", "text": "Rome is it."}],
        "negative_passages": [{"docid": "n1", "title": "Tn1", "text": "no 1"}],
    }
    assert list(questions.queries(tmp_path / "train.jsonl")) == [QUERY]


@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
def test_the_reader_reads_what_was_found(tmp_path: Path, name: str) -> None:
    queries = [QUERY, Query("lost", "none?", ["a"], [])]
    assert (
        write_rows(tmp_path / name, reader_rows(run("hit", "n1", "n2"), queries, PASSAGES, depth=2))
        == 2
    )
    assert json.loads(
        (tmp_path / name).read_text().splitlines()[0 if name == "train.jsonl" else 1].rstrip(",")
    )["ctxs"] == [
        {"id": "hit", "text": "It was Rome!", "title": "Thit", "score": 0.0, "has_answer": True},
        {"id": "n1", "text": "no 1", "title": "Tn1", "score": -1.0, "has_answer": False},
    ]
    found = list(retrieved.rows(tmp_path, "train", source="fid", contexts=9, sort_by_score=True))
    ctxs: list[Row] = [
        {**PASSAGES[passage], "score": score} for passage, score in (("hit", 0.0), ("n1", -1.0))
    ]
    assert found == [
        {"id": "q", "question": "which city", "answers": ["rome"], "ctxs": ctxs},
        {"id": "lost", "question": "none?", "answers": ["a"], "ctxs": []},
    ]


def test_an_error_on_the_way_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("old")
    with pytest.raises(DataError):
        write_rows(
            tmp_path / "train.jsonl",
            training_rows(
                [], [QUERY], PASSAGES, positives=positives_of([QUERY], None), window=RankRange(1)
            ),
        )
    assert (tmp_path / "train.jsonl").read_text() == "old"
    # what was begun takes no room on a disk that was full
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


# BM25


def test_bm25_ranks_by_words_of_title_and_text_and_leaves_out_what_shares_none() -> None:
    pytest.importorskip("bm25s", reason="the extra bm25 is not installed")
    passages = [
        {"id": "a", "title": "", "text": "green frogs jump"},
        {"id": "b", "title": "Frogs", "text": "frogs"},
        {"id": "c", "title": "", "text": "stones"},
    ]
    found = bm25(
        [Query("1", "where do frogs jump", [], []), Query("2", "xylophone", [], [])],
        passages,
        depth=9,
    )
    assert [hit.passage for hit in found["1"]] == ["a", "b"]
    assert found["2"] == []


def test_bm25_reaches_its_known_numbers_on_natural_questions() -> None:
    pytest.importorskip("bm25s", reason="the extra bm25 is not installed")
    if not (NQ / "corpus.tsv").is_file():
        pytest.skip(f"no corpus.tsv at {NQ}; set LATHE_DATA")
    queries = list(questions.queries(NQ / "queries.jsonl"))
    found = bm25(queries, corpora.passages(NQ / "corpus.tsv"), depth=20)
    published = {
        str(raw["qid"]): [str(name) for name in raw["bm25"]]
        for raw in read_jsonl(NQ / "queries.jsonl")
    }
    equal = sum(
        len(hits) == 20 and _is_ranking(published[name], hits) for name, hits in found.items()
    )
    assert equal == 2652  # of 2,655; to the other three less than 20 passages have a word in common
    qrels = {
        query.id: dict.fromkeys(query.positives, 1) for query in queries
    }  # the gold passage alone is relevant
    ranked = {
        name: [Hit(passage, -rank) for rank, passage in enumerate(passages)]
        for name, passages in published.items()
    }
    wanted = {
        "recall@1": 0.756,
        "recall@5": 0.911,
        "recall@20": 0.954,
        "mrr@10": 0.823,
    }  # ties as bm25s leaves them
    whole = mean_measures(ranked, qrels, at=[1, 5, 10, 20])
    assert {name: round(whole[name], 3) for name in wanted} == wanted
    assert mean_measures(found, qrels, at=[1])["recall@1"] == pytest.approx(
        0.7567, abs=5e-5
    )  # ties as trec_eval has them
    tested = {
        query.id: qrels[query.id] for query in questions.queries(NQ / "queries.jsonl", "test")
    }
    of_test = mean_measures(ranked, tested, at=[1, 5, 10, 20])
    assert len(tested) == 355
    assert [round(of_test[name], 3) for name in wanted] == [0.735, 0.904, 0.955, 0.804]


def _is_ranking(names: list[str], hits: list[Hit]) -> bool:
    """Whether names rank as hits do, but for the order of hits with equal scores, and for which of
    those equal to the last one are in.
    """
    last = hits[-1].score
    score_of = {hit.passage: hit.score for hit in hits}
    scores = [score_of.get(name, last) for name in names]
    return scores == [hit.score for hit in hits]


def test_bm25_puts_equal_scores_in_the_order_of_the_corpus() -> None:
    pytest.importorskip("bm25s", reason="the extra bm25 is not installed")
    passages = [{"id": str(number), "title": "", "text": "frogs jump"} for number in range(300)]
    passages[200] = {"id": "200", "title": "frogs", "text": "frogs"}
    found = bm25([Query("1", "where do frogs jump", [], [])], passages, depth=7)
    assert [hit.passage for hit in found["1"]] == ["0", "1", "2", "3", "4", "5", "6"]
    assert len({hit.score for hit in found["1"]}) == 1
