"""Scores of answers: every recorded row, and the rules that the recordings are about."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.parity.recordings import files
from trainer.metrics.mergeable import (
    Ratio,
    answer_scores,
    exact_match,
    f1,
    normalise,
    precision,
    recall,
    recall_em,
)

MEASURES = {
    "em": exact_match,
    "f1": f1,
    "precision": precision,
    "recall": recall,
    "recallem": recall_em,
}


def recorded_rows() -> list[Any]:
    places = files("cross_attention", "text/metrics.json")
    rows = [row for path in places for row in json.loads(path.read_text())]
    return [pytest.param(row, id=f"{index}") for index, row in enumerate(rows)]


@pytest.mark.parametrize("row", recorded_rows())
def test_every_recorded_answer_gets_its_recorded_scores(row: dict[str, Any]) -> None:
    found = {
        name: measure(row["prediction"], row["references"]) for name, measure in MEASURES.items()
    }
    assert found == pytest.approx({name: row[name] for name in MEASURES}, abs=1e-12)


def test_normalising_leaves_words_without_case_ascii_punctuation_articles_and_extra_spaces() -> (
    None
):
    assert normalise(" The  U.S.A.'s\tan-a thesis, a\n theme! ") == "usas ana thesis theme"


def test_each_score_takes_the_reference_that_is_best_for_it() -> None:
    references = ["Obama", "Barack Hussein Obama"]
    assert precision("Barack Obama", references) == recall("Barack Obama", references) == 1.0
    assert f1("Barack Obama", references) == pytest.approx(0.8)
    assert exact_match("Barack Hussein Obama", references) == 1.0


def test_words_in_common_are_counted_as_often_as_both_have_them() -> None:
    assert precision("new york new york", ["new york"]) == 0.5
    assert recall("new york", ["new york new york"]) == 0.5
    assert precision("new york new york", ["york new york new city"]) == 1.0


def test_empty_texts_score_as_published() -> None:
    both_empty = {name: measure("", [""]) for name, measure in MEASURES.items()}
    assert both_empty == {"em": 1.0, "f1": 1.0, "precision": 0.0, "recall": 1.0, "recallem": 1.0}
    assert {measure("", ["Paris"]) for measure in MEASURES.values()} == {0.0}


@pytest.mark.parametrize("reference", ["A", "The The", "?"])
def test_an_answer_that_is_an_article_or_a_mark_is_not_in_every_prediction(reference: str) -> None:
    assert recall_em("nothing at all", [reference]) == 0.0
    assert recall_em("the", [reference]) == 1.0
    assert recall_em("nothing at all", [reference, "nothing"]) == 1.0
    assert recall_em("nothing at all", [""]) == 1.0  # as published


def test_scores_of_answers_merge_to_the_mean_over_all_of_them() -> None:
    predictions, references = (
        ["in Paris", "Rome", "Oslo"],
        [["Paris"], ["rome", "Roma"], ["Bergen"]],
    )
    whole = answer_scores(predictions, references)
    first, rest = (
        answer_scores(predictions[:1], references[:1]),
        answer_scores(predictions[1:], references[1:]),
    )
    assert list(whole) == ["em", "f1", "precision", "recall", "recall_em"]
    assert whole["em"].value() == pytest.approx(1 / 3)
    for name, score in whole.items():
        assert (first[name] + rest[name]).value() == pytest.approx(score.value(), abs=1e-15)


def test_a_ratio_of_values_is_their_mean_in_fp64() -> None:
    ratio = Ratio.of([0.1, 0.2, 0.4])
    assert ratio.num.dtype == torch.float64
    assert ratio.value() == pytest.approx(0.7 / 3, abs=1e-16)
