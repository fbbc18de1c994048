"""Near copies are found exactly, and no training question is one of a held-out question."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.wording import refused, says
from trainer.data import left_out
from trainer.data.readers.questions import Query
from trainer.rounds.leaks import COPIES, POSITIVES, Guard, HeldOut, without_leaks
from trainer.rounds.near_copies import grams, near_copies

WORDS = ["cell", "gene", "mice", "lacks", "binds", "raises", "lowers", "risk", "of", "the", "in"]


def similarity(one: str, other: str) -> float:
    """The slow twin: the Jaccard index of the sets of 4 characters, letters and blanks alone."""
    sets: list[set[str]] = []
    for text in (one, other):
        plain = " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())
        sets.append({plain[at : at + 4] for at in range(len(plain) - 3)} or {plain})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.mark.parametrize("least", [0.3, 0.5, 0.7, 0.8, 1.0])
def test_every_pair_above_the_limit_is_found_and_no_other(least: float) -> None:
    draw = random.Random(3)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 8))) for _ in range(120)]
    others = [" ".join(draw.choices(WORDS, k=draw.randint(1, 8))) for _ in range(60)]
    texts += [f"{other.title()}!" for other in others[::7]]
    found = {copy.text: copy for copy in near_copies(texts, others, least=least)}
    wanted: dict[int, list[float]] = {}
    for number, text in enumerate(texts):
        values = [similarity(text, other) for other in others]
        if max(values) >= least - 1e-12:
            wanted[number] = values
    assert found.keys() == wanted.keys()
    assert len(found) >= 9
    for number, copy in found.items():
        assert copy.similarity == pytest.approx(max(wanted[number]))
        assert copy.other == wanted[number].index(max(wanted[number]))


def test_case_punctuation_and_the_form_of_unicode_make_no_difference() -> None:
    assert grams("Is  ＡＭＰ-kinase active?") == grams("is amp kinase ACTIVE")
    assert grams("is_am\u00adp kin\u200base\ufeff active") == grams("is amp kinase active")
    assert grams("cafe\u0301") == grams("CAFÉ")
    assert grams("ab") == {"ab"}
    assert grams("?!") == {"?!"}


def test_vowels_that_are_marks_on_a_letter_tell_two_questions_apart() -> None:
    # a mark behind the same letters in both, and another one each time
    one, other = "क\u093fल\u0947 क\u0940 द\u0940व\u093eर", "क\u0947ल\u0940 क\u0947 द\u0947व\u0940र"
    assert not near_copies([one], [other], least=0.8)
    assert near_copies([one], [one], least=1.0)


TRAIN = [
    Query("t0", "Mice that lack interferon gamma are resistant.", [], ["a"]),
    Query("t1", "Statins lower the risk of hip fractures.", [], ["b", "c"]),
]
TEST = HeldOut(
    "test",
    [Query("x", "Mice that lack interferon-gamma are resistant!", [], ["c"])],
    {"x": ["c"]},
)
RELEVANT = {query.id: query.positives for query in TRAIN}


def without(train: list[Query], *held_out: HeldOut, **guard: Any) -> list[str]:
    kept = without_leaks(train, RELEVANT, held_out, guard=Guard(**guard))
    return [query.id for query in kept]


def test_a_near_copy_of_a_held_out_question_is_refused_and_named() -> None:
    with refused("near_copies", count=1, all=2) as caught:
        without(TRAIN, TEST)
    says("near_copy_of", caught.value, id="t0", other="x", split="test")
    far = HeldOut("valid", [Query("v", "Is this another question?", [], [])], {"v": []})
    assert without(TRAIN, far) == ["t0", "t1"]


def test_dropped_copies_are_told_and_so_are_passages_that_answer_both() -> None:
    with left_out.reading() as notes:
        assert without(TRAIN, TEST, drops=True) == ["t1"]
    assert notes.counts == {COPIES: 1, POSITIVES: 1}
    first, second = (one.place for one in notes.first)
    assert "'t0'" in first
    assert "'x' of test" in first
    assert second == "passage 'c' of question 'x' of test"


def test_nothing_left_and_a_limit_that_is_none_are_refused() -> None:
    with refused("only_near_copies", count=1):
        without(TRAIN[:1], TEST, drops=True)
    for least in (0.0, 1.5):
        with refused("near_limit", value=least):
            Guard(least)
