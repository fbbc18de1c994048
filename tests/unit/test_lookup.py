"""The made-up corpus: what its rows promise, which is that they can be answered by reading alone."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from itertools import islice

import pytest

from tests.wording import refused
from trainer.data import lookup

NAME = re.compile(r"[BDFGHKLMNPRSTVZ][aeiou][lnr] [BDFGHKLMNPRSTVZ][aeiou][lnr]")
FACT = re.compile(r" (?:lives in|was born in|works in|has been to) [A-Z]\w+ [A-Z]\w+\.")
MANY = 300


def held(texts: list[str]) -> set[str]:
    return {name for text in texts for name in NAME.findall(text)}


def texts_of(split: str) -> list[str]:
    rows = islice(lookup.questions(split, passages=20), MANY)
    return [passage["text"] for row in rows for passage in row["ctxs"]]


def test_no_name_of_the_validation_stands_in_training() -> None:
    trained = held(texts_of("train"))
    assert len(trained) > 2000
    for split in ("valid", "test", lookup.CONTROL):
        assert not trained & held(texts_of(split)), split


@pytest.mark.parametrize("passages", [1, 2, 20])
def test_exactly_one_passage_answers_at_any_place(passages: int) -> None:
    places: Counter[int] = Counter()
    for row in islice(lookup.questions("valid", passages=passages), MANY):
        (answer,) = row["answers"]
        assert len(row["ctxs"]) == passages
        holding = [place for place, each in enumerate(row["ctxs"]) if answer in each["text"]]
        assert len(holding) == 1
        places[holding[0]] += 1
    assert len(places) == passages
    assert max(places.values()) < 3 * MANY / passages + 10


def test_training_rows_are_of_all_lengths_and_texts_mostly_short() -> None:
    told: Counter[int] = Counter()
    for row in islice(lookup.contexts("train"), 4 * MANY):
        told[row["context"].count(".")] += 1
        assert row["answers"][0] in row["context"]
    assert set(told) == set(range(1, 9))
    assert 0.4 * MANY < min(told.values()) <= max(told.values()) < 0.6 * MANY
    asked = Counter(row["text"].count("?") for row in islice(lookup.texts("train"), 4 * MANY))
    assert set(asked) == set(range(1, 9))
    assert asked[1] + asked[2] > 1.8 * MANY


def test_only_training_has_more_contexts_where_they_hold_many_facts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [lookup.num_contexts(facts) for facts in (1, 2, 8)] == [60_000, 60_000, 200_000]
    monkeypatch.setattr(lookup, "num_contexts", lambda facts: 3 * facts)
    rows = {split: list(lookup.contexts(split, facts=4)) for split in ("train", "valid")}
    assert {split: len(found) for split, found in rows.items()} == {"train": 12, "valid": 500}


@pytest.mark.parametrize("split", ["train", "valid", lookup.CONTROL])
def test_no_text_tells_more_facts_than_asked_for(split: str) -> None:
    for rows, field in (
        (lookup.contexts(split, facts=3), "context"),
        (lookup.texts(split, facts=3), "text"),
        (lookup.summaries(split, facts=3), "document"),
    ):
        told = Counter(len(FACT.findall(row[field])) for row in islice(rows, MANY))
        assert max(told) == 3
        assert split == "train" or min(told) == 3


def test_another_passage_is_about_the_same_person() -> None:
    for row in islice(lookup.questions("valid", passages=4), MANY):
        person = NAME.findall(row["question"])[0]
        assert sum(person in passage["text"] for passage in row["ctxs"]) == 2


def test_training_alone_is_told_what_is_asked_for_of_everybody() -> None:
    for split, is_training in (("train", True), ("valid", False)):
        others_alike = []
        for row in islice(lookup.questions(split, passages=20), MANY):
            (person,) = NAME.findall(row["question"])
            texts = [passage["text"] for passage in row["ctxs"]]
            (answering,) = [text for text in texts if row["answers"][0] in text]
            asked = answering.removeprefix(person).removesuffix(f"{row['answers'][0]}.")
            others = [text for text in texts if not text.startswith(person)]
            assert len(others) == 18
            others_alike += [asked in text for text in others]
        share = sum(others_alike) / len(others_alike)
        assert share == 1 if is_training else 0.2 < share < 0.3, split


def test_a_fragment_is_of_one_passage_and_of_no_question() -> None:
    kinds: Counter[str] = Counter()
    for row in islice(lookup.fragments("train", passages=5), MANY):
        texts, (whole,) = [passage["text"] for passage in row["ctxs"]], row["answers"]
        assert len(texts) <= 5
        assert [text for text in texts if row["question"] in text] == [whole]
        assert "?" not in row["question"]
        kinds["beginning" if whole.startswith(row["question"]) else "place"] += 1
        kinds[f"of {len(texts)}"] += 1
    assert min(kinds["beginning"], kinds["place"]) > MANY / 3
    assert kinds["of 1"] > MANY / 3
    lengths = {len(row["ctxs"]) for row in islice(lookup.fragments("valid", passages=5), MANY)}
    assert lengths == {5}


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
    by_chance = 0
    for row, without in pairs:
        assert row["answers"][0] in row["context"]
        assert row["question"] == without["question"]
        by_chance += row["answers"][0] in without["context"]
    assert by_chance <= 3
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
def test_one_statement_of_a_group_is_true_by_what_it_says(kind: str) -> None:
    for group in lookup.statements(kind, "valid"):
        assert [_is_true(kind, text) for text in group["golds"]] == [True]
        assert group["distractors"]
        assert not any(_is_true(kind, text) for text in group["distractors"])
    control = [_is_true(kind, *group["golds"]) for group in lookup.statements(kind, lookup.CONTROL)]
    assert 0.15 < sum(control) / len(control) < 0.6


def _is_true(kind: str, statement: str) -> bool:
    if kind == "arithmetic":
        first, second, total = map(int, re.findall(r"\d+", statement))
        return first + second == total
    told, said = statement.split(" So ")
    if kind == "membership":
        return NAME.findall(said)[0] in told
    came, hour = map(int, re.findall(r"\d+", statement))
    assert NAME.findall(said) == NAME.findall(told)
    return came < hour


def test_rows_are_the_same_on_every_machine() -> None:
    row = next(lookup.questions("valid", passages=2))
    assert row == {
        "id": "0",
        "question": "Where does Val Son work?",
        "answers": ["Sar Nun"],
        "ctxs": [
            {"id": "0-0", "title": "", "text": "Val Son works in Sar Nun."},
            {"id": "0-1", "title": "", "text": "Val Son lives in Hin Vun."},
        ],
    }


def test_no_row_changes_while_the_version_stays() -> None:
    """Tokenizers are cached by it, and what was measured on the corpus is of these rows."""
    assert lookup.VERSION == 1
    kinds = {
        "questions": lookup.questions("valid", passages=20),
        "questions that train": lookup.questions("train", passages=5),
        "fragments": lookup.fragments("train", passages=5),
        "texts": lookup.texts("train"),
        "contexts": lookup.contexts("train"),
        "summaries": lookup.summaries("train"),
    }
    made = {kind: json.dumps(list(islice(rows, 50))).encode() for kind, rows in kinds.items()}
    assert {kind: hashlib.sha256(text).hexdigest()[:12] for kind, text in made.items()} == {
        "questions": "1277aeab10f1",
        "questions that train": "bf17cc2a3ad8",
        "fragments": "d911fc9dedef",
        "texts": "ff7ce48f3e23",
        "contexts": "7f67fe60eccc",
        "summaries": "3891ed9b4604",
    }


def test_an_unknown_split_is_refused() -> None:
    with refused("split_unknown", split="dev", choices="train, valid, test, control"):
        next(lookup.texts("dev"))
