"""Which negatives a judge takes for positives, and hits of several rankings in turn."""

from __future__ import annotations

from typing import Any

import pytest

from tests.wording import refused
from trainer.data import left_out
from trainer.data.readers.rankings import Hit, Rankings
from trainer.protocol.task import Row
from trainer.retrieval.false_negatives import FALSE, JudgeLimits, checked, judged_rows
from trainer.retrieval.negatives import UNTRAINABLE, RankRange, in_turn


def row(name: str, positives: list[float], negatives: list[float]) -> Row:
    def passages(kind: str, scores: list[float]) -> list[dict[str, str]]:
        return [{"docid": f"{kind}{at}", "text": "t"} for at in range(len(scores))]

    return {
        "query_id": name,
        "positive_passages": passages("p", positives),
        "negative_passages": passages("n", negatives),
        "scores": [*positives, *negatives],
    }


def kept(rows: list[Row], **verdict: Any) -> dict[str, list[str]]:
    return {
        one["query_id"]: [passage["docid"] for passage in one["negative_passages"]]
        for one in judged_rows(rows, JudgeLimits(**verdict))
    }


def test_a_negative_above_the_limit_or_near_the_best_positive_is_left_out() -> None:
    rows = [row("a", [2.0, 5.0], [4.5, 5.0, 1.0]), row("b", [1.0], [-3.0, 0.75])]
    assert kept(rows, above=4.5) == {"a": ["n0", "n2"], "b": ["n0", "n1"]}
    # a margin is of the best positive; a negative at the limit stays
    assert kept(rows, margin=0.5) == {"a": ["n0", "n2"], "b": ["n0"]}
    assert kept(rows, margin=-0.5) == {"a": ["n0", "n1", "n2"], "b": ["n0", "n1"]}
    assert kept(rows, above=0.5, margin=0.5) == {"b": ["n0"]}


def test_scores_go_with_their_passages_and_what_is_left_out_is_told() -> None:
    rows = [row("a", [3.0], [9.0, 1.0, 8.0]), row("b", [0.0], [7.0])]
    with left_out.reading() as notes:
        (one,) = judged_rows(rows, JudgeLimits(above=5.0))
    assert [passage["docid"] for passage in one["negative_passages"]] == ["n1"]
    assert one["scores"] == [3.0, 1.0]
    assert notes.counts == {FALSE: 3, UNTRAINABLE: 1}
    assert [one.place for one in notes.first if one.why == UNTRAINABLE] == ["question 'b'"]


def test_a_judge_that_leaves_no_negative_is_refused() -> None:
    with refused("no_negative_left", count=1):
        list(judged_rows([row("a", [0.0], [7.0])], JudgeLimits(above=5.0)))


def test_a_limit_that_is_no_number_is_refused() -> None:
    assert checked(None, 0.5, ("--a", "--b")) == JudgeLimits(None, 0.5)
    with refused("limit_finite", flag="--b", value="nan"):
        checked(1.0, float("nan"), ("--a", "--b"))


def ranking(ids: str) -> Rankings:
    return {"q": [Hit(name, 0.0) for name in ids]}


def test_rankings_are_taken_in_turn_and_a_passage_once() -> None:
    def turn(*runs: Rankings, **window: int) -> str:
        merged = in_turn(runs, RankRange(**{"count": 9, **window}))
        return "".join(hit.passage for hit in merged["q"])

    one, other = ranking("abcd"), ranking("xbya")
    assert turn(one, other) == "axbcyd"
    assert turn(other, one) == "xabycd"
    assert turn(one, other, first=2, last=3) == "bcy"
    assert turn(one, {"another": []}) == "abcd"
    assert turn(one) == "abcd"


@pytest.mark.parametrize("count", [1, 3])
def test_a_question_that_one_ranking_lacks_keeps_the_hits_of_the_others(count: int) -> None:
    merged = in_turn([ranking("ab"), {"r": [Hit("c", 1.0)]}], RankRange(count))
    assert [hit.passage for hit in merged["r"]] == ["c"]
