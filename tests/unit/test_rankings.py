"""Run files come back as they were written, and the measures are trec_eval's."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wording import refused
from trainer.data import left_out
from trainer.data.readers.rankings import Hit, read_qrels, read_run
from trainer.retrieval.rankings import (
    agreement,
    mean_agreement,
    mean_measures,
    of_search,
    question_measures,
    without_query,
    write_run,
)

RUN = {"q1": [Hit("d3", 2.5), Hit("d1", 0.1), Hit("d2", -1e-7)], "q2": [Hit("d9", 80.0)]}


# Files


@pytest.mark.parametrize(
    ("format", "lines"),
    [
        (
            "trec",
            [
                "q1 Q0 d3 1 2.5 dense",
                "q1 Q0 d1 2 0.1 dense",
                "q1 Q0 d2 3 -1e-07 dense",
                "q2 Q0 d9 1 80.0 dense",
            ],
        ),
        ("tevatron", ["q1\td3\t2.5", "q1\td1\t0.1", "q1\td2\t-1e-07", "q2\td9\t80.0"]),
        ("msmarco", ["q1\td3\t1", "q1\td1\t2", "q1\td2\t3", "q2\td9\t1"]),
    ],
)
def test_a_run_is_written_in_the_formats_of_the_field(
    tmp_path: Path, format: Any, lines: list[str]
) -> None:
    write_run(tmp_path / "run", RUN, format=format)
    assert (tmp_path / "run").read_text().splitlines() == lines
    read = read_run(tmp_path / "run")
    order = {name: [hit.passage for hit in hits] for name, hits in RUN.items()}
    assert {name: [hit.passage for hit in hits] for name, hits in read.items()} == order
    if format == "msmarco":
        assert [hit.score for hit in read["q1"]] == [-1.0, -2.0, -3.0]
    else:
        assert [[hit.score for hit in hits] for hits in read.values()] == [
            [2.5, 0.1, -1e-7],
            [80.0],
        ]


@pytest.mark.parametrize("format", ["trec", "tevatron"])
@settings(max_examples=50, deadline=None)
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_score_comes_back_as_the_same_float32(
    tmp_path_factory: pytest.TempPathFactory, format: Any, value: float
) -> None:
    path = tmp_path_factory.mktemp("runs") / "run"
    write_run(path, {"q": [Hit("d", value)]}, format=format)
    assert np.float32(read_run(path)["q"][0].score) == np.float32(value)


def test_a_run_is_read_best_first_and_ties_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("q a 1.0\nq b 2.0\nq c 1.0\n")
    assert [hit.passage for hit in read_run(tmp_path / "run")["q"]] == ["b", "a", "c"]
    (tmp_path / "run").write_text("q a 1.0\nq a 2.0\n")
    with refused("passage_twice", question="q"):
        read_run(tmp_path / "run")


@pytest.mark.parametrize(
    "text",
    [
        "q1 0 d1 1\nq1 0 d2 0\nq2 0 d1 2\n",
        "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td2\t0\n\nq2\td1\t2\n",
    ],
    ids=["trec", "beir"],
)
def test_judgements_are_read_as_trec_and_beir_have_them(tmp_path: Path, text: str) -> None:
    (tmp_path / "qrels").write_text(text)
    assert read_qrels(tmp_path / "qrels") == {"q1": {"d1": 1, "d2": 0}, "q2": {"d1": 2}}


@pytest.mark.parametrize(
    "text",
    [
        "q1\t0\td1 \t1\nq2 \t0\t d7\t1\n",
        "q1\t0 d1\t1\r\nq2\t 0  d7 1 \r\n",
        "query-id\tcorpus-id\tscore\nq1\td1 \t1\n q2\td7\t 1\n",
    ],
)
def test_judgements_are_split_at_any_white_space(tmp_path: Path, text: str) -> None:
    (tmp_path / "qrels").write_text(text, newline="")
    (tmp_path / "run").write_text("q1\tQ0\td1 \t1 2.0 t\nq2 Q0 d7\t1\t2.0\tt\n")
    qrels = read_qrels(tmp_path / "qrels")
    assert qrels == {"q1": {"d1": 1}, "q2": {"d7": 1}}
    assert mean_measures(read_run(tmp_path / "run"), qrels, at=[10])["ndcg@10"] == 1.0


def test_an_id_with_white_space_in_it_is_refused_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "qrels").write_text("query-id\tcorpus-id\tscore\nq1\td 1\t1\n")
    with refused("id_with_white_space", at="qrels, line 2", id="d 1"):
        read_qrels(tmp_path / "qrels")


@pytest.mark.parametrize(
    "header", ["corpus-id\tquery-id\tscore", "docid iter qid rel", "PID\tqid\trelevance"]
)
def test_a_header_of_judgements_in_another_order_is_refused(header: str, tmp_path: Path) -> None:
    (tmp_path / "qrels").write_text(f"{header}\nd1\tq1\t1\n")
    with refused("judgements_header", at="qrels, line 1", value=" ".join(header.split())):
        read_qrels(tmp_path / "qrels")


def test_a_pair_that_is_judged_in_two_ways_is_refused(tmp_path: Path) -> None:
    (tmp_path / "qrels").write_text("q1 0 d1 1\nq1 0 d1 1\nq1 0 d1 0\n")
    told = {"question": "q1", "passage": "d1", "relevance": 0, "before": 1}
    with refused("judged_twice", at="qrels, line 3", **told):
        read_qrels(tmp_path / "qrels")


@pytest.mark.parametrize(
    ("text", "line"),
    [(f"q 0 d {'9' * 5000}\n", 1), ("q 0 d 1\nq 0 d\n", 2), ("q 0 d 0.5\n", 1), ("q d\n", 1)],
)
def test_wrong_judgements_are_refused_with_their_line(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "qrels").write_text(text)
    with refused("judgement_columns", at=f"qrels, line {line}"):
        read_qrels(tmp_path / "qrels")
    (tmp_path / "qrels").write_text("query-id\tcorpus-id\tscore\n")
    with refused("judgements_empty"):
        read_qrels(tmp_path / "qrels")


def test_a_search_becomes_a_run_without_the_question_itself() -> None:
    rows, scores = (
        np.array([[2, 0, 1], [1, -1, -1]]),
        np.array([[3.0, 2.0, 1.0], [5.0, -np.inf, -np.inf]]),
    )
    whole = of_search(["a", "q"], ["a", "b", "c"], rows=rows, scores=scores)
    assert whole == {"a": [Hit("c", 3.0), Hit("a", 2.0), Hit("b", 1.0)], "q": [Hit("b", 5.0)]}
    cut = of_search(
        ["a", "q"], ["a", "b", "c"], rows=rows, scores=scores, is_without_query=True, depth=2
    )
    assert (
        cut == without_query(whole) == {"a": [Hit("c", 3.0), Hit("b", 1.0)], "q": [Hit("b", 5.0)]}
    )


# Measures

PASSAGES = [f"d{n}" for n in range(12)]
NAMES = {"map": "map", "mrr": "recip_rank", "ndcg": "ndcg"}
AT = [1, 3, 10]
judgements = st.dictionaries(st.sampled_from(PASSAGES), st.integers(-1, 3), min_size=1).filter(
    lambda values: max(values.values()) > 0
)
rankings = st.dictionaries(
    st.sampled_from(PASSAGES), st.sampled_from([0.0, 0.5, 1.0, 1.0 + 1e-12, 2.0, -3.25])
)


@settings(max_examples=150, deadline=None)
@given(values=judgements, ranking=rankings)
def test_every_measure_is_trec_evals(values: dict[str, int], ranking: dict[str, float]) -> None:
    pytrec_eval = pytest.importorskip("pytrec_eval", reason="pytrec-eval-terrier is not installed")
    if not ranking:
        return  # trec_eval reads no question without hits; see the next test
    measures = {"map", "recip_rank", "ndcg", "recall.1,3,10", "ndcg_cut.1,3,10", "success.1,3,10"}
    theirs = pytrec_eval.RelevanceEvaluator({"q": values}, measures).evaluate({"q": ranking})["q"]
    ours = question_measures([Hit(*item) for item in ranking.items()], values, at=AT)
    names = {
        **NAMES,
        **{f"recall@{k}": f"recall_{k}" for k in AT},
        **{f"ndcg@{k}": f"ndcg_cut_{k}" for k in AT},
    }
    names |= {f"success@{k}": f"success_{k}" for k in AT}
    for name, their_name in names.items():
        assert ours[name] == pytest.approx(theirs[their_name], abs=1e-12), name
    for k in AT:  # trec_eval has no reciprocal rank with a cut-off
        assert ours[f"mrr@{k}"] == (ours["mrr"] if ours["mrr"] >= 1 / k - 1e-12 else 0.0)


@cache
def recorded() -> dict[str, Any]:
    path = Path(__file__).parents[1] / "fixtures/rankings/measures.json"
    return json.loads(path.read_text())


def hits_of(ranking: dict[str, float]) -> list[Hit]:
    return [Hit(*item) for item in ranking.items()]


def test_measures_of_runs_with_ties_are_those_that_trec_eval_gave() -> None:
    trec_eval = recorded()["pytrec_eval"]
    for question, ranking in recorded()["run"].items():
        ours = question_measures(hits_of(ranking), recorded()["qrels"][question], at=[10])
        theirs = trec_eval[question]
        for name, their_name in (
            ("mrr", "recip_rank"),
            ("ndcg@10", "ndcg_cut_10"),
            ("recall@10", "recall_10"),
        ):
            assert ours[name] == pytest.approx(theirs[their_name], abs=1e-12), question
        cut = theirs["recip_rank"] if theirs["recip_rank"] >= 0.1 - 1e-12 else 0.0
        assert ours["mrr@10"] == pytest.approx(cut, abs=1e-12), question


def test_rr_at_10_of_ir_measures_is_ours_but_for_the_order_of_ties() -> None:
    rankings = {name: hits_of(run) for name, run in recorded()["run"].items()}
    ours = mean_measures(rankings, recorded()["qrels"], at=[10])
    theirs = recorded()["ir_measures"]
    for name in ("mrr", "ndcg@10", "recall@10"):
        assert ours[name] == pytest.approx(theirs[name], abs=1e-12), name
    assert abs(ours["mrr@10"] - theirs["mrr@10"]) > 0.01
    # the first id first among equal scores, as its RR@10 has them; no other score is changed
    untied = {
        question: [
            Hit(hit.passage, -place)
            for place, hit in enumerate(sorted(hits, key=lambda hit: (-hit.score, hit.passage)))
        ]
        for question, hits in rankings.items()
    }
    found = mean_measures(untied, recorded()["qrels"], at=[10])
    assert found["mrr@10"] == pytest.approx(theirs["mrr@10"], abs=1e-12)


def test_what_does_not_meet_the_run_is_noted_on_either_side() -> None:
    run = {"q1": [Hit("d1", 1.0)], "new": [Hit("d1", 1.0)], "zero": [Hit("d1", 1.0)]}
    qrels = {"q1": {"d1": 1, "d9": 1}, "lost": {"d1": 1}, "zero": {"d1": 0}}
    with left_out.reading() as notes:
        mean_measures(run, qrels, at=[1])
    assert notes.counts == {
        "judged questions that the run lacks (they count 0)": 1,
        "ranked questions without a relevant passage (not measured)": 2,
    }
    assert notes.first[0].place == "question 'lost'"


def test_judgements_of_which_no_passage_is_in_the_run_are_doubted() -> None:
    run = {"q1": [Hit("1", 1.0)], "q2": [Hit("2", 1.0)]}
    with left_out.reading() as notes:
        found = mean_measures(run, {"q1": {"d1": 1}, "q2": {"d2": 2, "d3": 0}}, at=[1])
    assert found["mrr"] == 0
    assert [one.place for one in notes.first] == [
        "question 'q1', passage 'd1'",
        "question 'q2', passage 'd2'",
    ]


def test_a_question_that_the_run_lacks_counts_zero_and_one_without_relevance_not_at_all() -> None:
    qrels = {"q1": {"d1": 1}, "lost": {"d1": 1}, "none": {"d1": 0}}
    found = mean_measures(
        {"q1": [Hit("d1", 1.0)], "none": [Hit("d1", 1.0)], "new": []}, qrels, at=[1]
    )
    assert found == dict.fromkeys(
        ("map", "mrr", "ndcg", "recall@1", "success@1", "mrr@1", "ndcg@1"), 0.5
    )


def test_a_run_of_other_questions_is_refused() -> None:
    with refused("ranking_of_others", count=1, ours="a", theirs="q1"):
        mean_measures({"a": [Hit("d1", 1.0)]}, {"q1": {"d1": 1}}, at=[1])


def test_the_measures_of_an_example_worked_by_hand() -> None:
    hits = [Hit("b", 4.0), Hit("x", 3.0), Hit("a", 2.0), Hit("y", 1.0)]
    found = question_measures(hits, {"a": 1, "b": 2, "c": 1, "y": 0}, at=[2])
    ideal = 2 + 1 / math.log2(3)
    assert found["map"] == pytest.approx((1 + 2 / 3) / 3)
    assert found["recall@2"] == pytest.approx(1 / 3)
    assert found["ndcg@2"] == pytest.approx(2 / ideal)
    assert found["ndcg"] == pytest.approx((2 + 1 / 2) / (ideal + 1 / 2))


# Reader and ranking


def test_a_ranking_that_the_reader_shares_has_no_inversions_and_its_reverse_has_all() -> None:
    assert agreement([0, 1, 2, 3], at=[1, 2]) == {
        "inversions": 0,
        "overlap@1": 1,
        "reach@1": 1,
        "overlap@2": 1,
        "reach@2": 2,
    }
    backwards = agreement([3, 2, 1, 0], at=[1, 9])
    assert backwards == {
        "inversions": 6,
        "overlap@1": 0,
        "reach@1": 4,
    }  # nothing is said of more than there are


def test_a_readers_scores_order_the_passages_and_questions_are_averaged() -> None:
    found = mean_agreement([[0.3, 0.9, 0.3], [], [5.0]], at=[1])
    assert found == {"inversions": 0.5, "overlap@1": 0.5, "reach@1": 1.5}
