"""An answer is found token by token, whatever the case, and the first passage that has one
counts.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wording import refused
from trainer.data.readers.questions import Query
from trainer.data.readers.rankings import Hit
from trainer.retrieval.answer_recall import AnswerFinder, answer_recall, has_answer, tokens

PASSAGES = {
    name: {"id": name, "title": "Paris", "text": text}
    for name, text in {"a": "Nothing here.", "b": "It is PARIS, France!", "c": "Paris"}.items()
}


@pytest.mark.parametrize(
    ("answers", "text", "is_there"),
    [
        (["art"], "the arts", False),
        (["U.S."], "in the u.s. today", True),
        (["u s"], "in the u.s. today", False),
        (["caf\u00e9"], "a cafe\u0301", True),
        (["cafe"], "a caf\u00e9", False),
        (["no", "Yes!"], "oh YES !", True),
        (["5,000"], "5000", False),
        (["b\u0000c"], "a b c", True),  # control characters are in no token
        ([], "anything", False),
        (["a b"], "a", False),
    ],
)
def test_an_answer_is_in_a_text_when_its_tokens_are_in_a_row(
    answers: list[str], text: str, is_there: bool
) -> None:
    assert has_answer(answers, text) == is_there


def slowly(answer: list[str], text: list[str]) -> bool:
    return any(
        text[start : start + len(answer)] == answer for start in range(len(text) - len(answer) + 1)
    )


@given(
    text=st.text("ab .\u0301\u00e4", max_size=12), answer=st.text("ab .\u0301\u00e4", max_size=4)
)
def test_looking_for_a_text_is_looking_for_a_run_of_tokens(text: str, answer: str) -> None:
    import unicodedata

    parts = [tokens(unicodedata.normalize("NFD", one)) for one in (answer, text)]
    assert has_answer([answer], text) == slowly(*parts)


def test_recall_counts_questions_by_the_first_passage_with_an_answer() -> None:
    queries = [
        Query("1", "q", ["paris"], []),
        Query("2", "q", ["Rome", "france"], []),
        Query("3", "q", ["x"], []),
    ]
    queries += [
        Query("4", "q", [], ["a"]),
        Query("5", "q", ["paris"], []),
    ]  # the 4th has no answers, the 5th no hits
    run = {
        name: [Hit(passage, 1.0) for passage in order]
        for name, order in {"1": "cab", "2": "acb", "3": "abc"}.items()
    }
    found = answer_recall(run, queries, PASSAGES, at=[1, 2, 3])
    assert found == {"answer_recall@1": 1 / 4, "answer_recall@2": 1 / 4, "answer_recall@3": 2 / 4}
    with refused("no_answers"):
        answer_recall(run, queries[3:4], PASSAGES, at=[1])


def test_titles_are_not_looked_at() -> None:
    assert AnswerFinder(PASSAGES).having(["paris"], "abc") == {"b", "c"}
