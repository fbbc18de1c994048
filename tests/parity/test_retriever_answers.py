"""What the published evaluation of retrievers says of tokens, answers in passages, and a ranking
against a reader.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.parity.recordings import file_params
from trainer.retrieval.answer_recall import has_answer, tokens
from trainer.retrieval.rankings import agreement


@pytest.fixture(params=file_params("fid", "eval_cases.json"))
def cases(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads(request.param.read_text(encoding="utf-8"))


def test_texts_are_cut_into_tokens_as_published(cases: dict[str, Any]) -> None:
    for text, wanted in cases["simple_tokenizer"].items():
        assert tokens(text) == wanted, repr(text)


def test_answers_are_found_where_they_are_published_to_be(cases: dict[str, Any]) -> None:
    for answers, text, wanted in cases["has_answer"]:
        assert has_answer(answers, text) == wanted, (answers, text)


def test_a_ranking_agrees_with_its_reader_as_far_as_published(cases: dict[str, Any]) -> None:
    case = cases["retriever_score"]
    found = agreement(case["perm"], at=[int(k) for k in case["avg_topk"]])
    assert [found["inversions"]] == case["inversions"]
    assert {k: [found[f"overlap@{k}"]] for k in case["avg_topk"]} == case["avg_topk"]
    assert {k: [found[f"reach@{k}"]] for k in case["idx_topk"]} == case["idx_topk"]
