"""The made-up corpus: what its rows promise, which is that they can be answered by reading alone."""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice

import pytest

from trainer.data import lookup
from trainer.errors import DataError

NAME = re.compile(r"[BDGKMPRSTV][aeiou][lnrsx] [BDGKMPRSTV][aeiou][lnrsx]")
MANY = 300


def held(texts: list[str]) -> set[str]:
    return {name for text in texts for name in NAME.findall(text)}


def texts_of(split: str) -> list[str]:
    rows = islice(lookup.questions(split, passages=20), MANY)
    return [passage["text"] for row in rows for passage in row["ctxs"]]


def test_no_name_of_the_validation_stands_in_training() -> None:
    trained = held(texts_of("train"))
    assert len(trained) > 5000
    for split in ("valid", "test", lookup.CONTROL):
        assert not trained & held(texts_of(split)), split


@pytest.mark.parametrize("passages", [1, 2, 20])
def test_exactly_one_passage_answers_at_any_place(passages: int) -> None:
    places: Counter[int] = Counter()
    for row in islice(lookup.questions("train", passages=passages), MANY):
        (answer,) = row["answers"]
        assert len(row["ctxs"]) == passages
        holding = [place for place, each in enumerate(row["ctxs"]) if answer in each["text"]]
        assert len(holding) == 1
        places[holding[0]] += 1
    assert len(places) == passages
    assert max(places.values()) < 3 * MANY / passages + 10


def test_another_passage_is_about_the_same_person() -> None:
    for row in islice(lookup.questions("valid", passages=4), MANY):
        person = NAME.findall(row["question"])[0]
        assert sum(person in passage["text"] for passage in row["ctxs"]) == 2


def test_the_control_asks_the_same_and_answers_nothing() -> None:
    valid, control = (
        list(lookup.questions(split, passages=5)) for split in ("valid", lookup.CONTROL)
    )
    for row, without in zip(valid, control, strict=True):
        assert (row["question"], row["answers"]) == (without["question"], without["answers"])
        left = [passage["text"] for passage in without["ctxs"]]
        assert len(left) == 4
        assert not any(row["answers"][0] in text for text in left)
    pairs = zip(lookup.contexts("valid"), lookup.contexts(lookup.CONTROL), strict=True)
    for row, without in pairs:
        assert row["answers"][0] in row["context"]
        assert row["question"] == without["question"]
        assert row["answers"][0] not in without["context"]
    documents = zip(lookup.summaries("valid"), lookup.summaries(lookup.CONTROL), strict=True)
    for row, without in documents:
        assert row["summaries"] == without["summaries"]
        assert row["document"] != without["document"]


def test_a_summary_holds_what_the_document_says_of_the_first_person() -> None:
    for row in islice(lookup.summaries("valid"), MANY):
        (summary,), document = row["summaries"], row["document"]
        person, *places = NAME.findall(summary)
        assert document.startswith(f"About {person}: ")
        assert len(places) == 2
        assert document.index(places[0]) < document.index(places[1])
        assert document.count(person) == 3


def test_a_text_asks_for_everything_that_it_told() -> None:
    for row in islice(lookup.texts("valid"), MANY):
        names = Counter(NAME.findall(row["text"]))
        assert set(names.values()) <= {2, 4}
        assert row["text"].count("?") == row["text"].count(" in ") + row["text"].count(" to ")


@pytest.mark.parametrize("kind", lookup.STATEMENTS)
def test_every_second_statement_is_true_by_what_it_says(kind: str) -> None:
    groups = list(lookup.statements(kind, "valid"))
    truths = [_is_true(kind, *group["golds"], *group["distractors"]) for group in groups]
    assert truths == [bool(group["golds"]) for group in groups]
    assert truths == [number % 2 == 0 for number in range(len(groups))]
    shuffled = [bool(group["golds"]) for group in lookup.statements(kind, lookup.CONTROL)]
    agreeing = sum(one == other for one, other in zip(truths, shuffled, strict=True))
    assert 0.4 < agreeing / len(truths) < 0.6


def _is_true(kind: str, statement: str) -> bool:
    if kind == "arithmetic":
        first, second, total = map(int, re.findall(r"\d+", statement))
        return first + second == total
    told, said = statement.split(" So ")
    if kind == "membership":
        return NAME.findall(said)[0] in told
    older = dict(re.findall(f"({NAME.pattern}) is older than ({NAME.pattern})", told))
    one, other = NAME.findall(said)
    return older.get(older.get(one)) == other


def test_rows_are_the_same_on_every_machine() -> None:
    row = next(lookup.questions("valid", passages=2))
    assert row == {
        "id": "0",
        "question": "Where does San Bas work?",
        "answers": ["Pus Rin"],
        "ctxs": [
            {"id": "0-0", "title": "", "text": "San Bas works in Pus Rin."},
            {"id": "0-1", "title": "", "text": "San Bas lives in Gin Gel."},
        ],
    }


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(DataError, match=r"split=.dev. does not exist.*Use train, valid, test, con"):
        next(lookup.texts("dev"))
