"""ROUGE of one summary against several references, by hand-counted cases and a slow twin."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest

from trainer.tasks.summariser.config import Rouge
from trainer.tasks.summariser.rouge import KINDS, lines, scores

PLAIN = Rouge(stemmer=False)


def f1(hits: int, predicted: int, wanted: int) -> float:
    return 2 * hits / (predicted + wanted) if hits else 0.0


def by_hand(prediction: str, reference: str) -> dict[str, float]:
    """ROUGE-1, -2 and -L of short texts, from their definitions (Lin 2004)."""
    one, two = prediction.lower().split(), reference.lower().split()
    found = {}
    for n, kind in ((1, "rouge1"), (2, "rouge2")):
        grams = [Counter(zip(*(words[i:] for i in range(n)), strict=False)) for words in (one, two)]
        found[kind] = f1((grams[0] & grams[1]).total(), grams[0].total(), grams[1].total())
    common = {picked for size in range(len(one) + 1) for picked in combinations(one, size)}
    longest = max(
        len(picked)
        for size in range(len(two) + 1)
        for picked in combinations(two, size)
        if picked in common
    )
    return found | {"rougel": f1(longest, len(one), len(two))}


@pytest.mark.parametrize(
    ("prediction", "reference"),
    [
        ("the cat sat on the mat", "a cat was on the mat"),
        ("police killed the gunman", "the gunman police killed"),
        ("one two three", "one two three"),
        ("nothing", "in common"),
        ("a a a a", "a a"),
    ],
)
def test_scores_are_those_of_the_definitions(prediction: str, reference: str) -> None:
    found = scores(prediction, [reference], PLAIN)
    for kind, value in by_hand(prediction, reference).items():
        assert found[kind] == pytest.approx(value, abs=1e-12), kind


def test_the_best_reference_is_taken_for_each_kind_or_by_rouge_1() -> None:
    prediction = "red green blue grey"
    in_disorder, in_order = "blue red grey green", "red green blue pink brown"
    alone = [scores(prediction, [reference], PLAIN) for reference in (in_disorder, in_order)]
    assert alone[0]["rouge1"] == 1.0 > alone[1]["rouge1"]
    assert alone[0]["rouge2"] == 0.0 < alone[1]["rouge2"]
    each = scores(prediction, [in_disorder, in_order], PLAIN)
    assert each == {kind: max(alone[0][kind], alone[1][kind]) for kind in KINDS}
    assert (
        scores(prediction, [in_disorder, in_order], Rouge(best="rouge1", stemmer=False)) == alone[0]
    )


def test_stemming_makes_inflected_words_equal() -> None:
    assert scores("training models", ["train model"], PLAIN)["rouge1"] == 0.0
    assert scores("training models", ["train model"], Rouge())["rouge1"] == 1.0


def test_only_lsum_sees_sentences() -> None:
    found = scores("It rains. We stay.", ["We stay. It rains."], PLAIN)
    assert found["rougelsum"] == 1.0  # each sentence is found whole
    assert found["rougel"] == 0.5
    assert found["rouge1"] == 1.0


def test_lines_are_kept_and_sentences_cut() -> None:
    assert lines("One. Two!\nThree? four\n\n") == "One.\nTwo!\nThree?\nfour"


def test_an_empty_summary_scores_nothing() -> None:
    assert set(scores("", ["something"], Rouge()).values()) == {0.0}
