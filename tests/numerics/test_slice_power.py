"""How often slices are named of models that are equal, and how often a slice that broke is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainer.metrics.intervals import RowSums
from trainer.verdict.features import features
from trainer.verdict.judgement import ScoredRows, judge
from trainer.verdict.slices import worse_slices

pytestmark = pytest.mark.long

EQUAL_PAIRS, PLANTED_PAIRS = 200, 50


def rows_of(rng: np.random.Generator, num: int) -> list[dict[str, Any]]:
    """Questions of many lengths, with a source, a label, a language and their first words."""
    lengths = rng.lognormal(3, 0.6, num).round().astype(int)
    sources = rng.choice(["nq", "tqa", "wq", "own"], num, p=[0.5, 0.3, 0.15, 0.05])
    labels = rng.integers(0, 20, num)
    languages = rng.choice(["en", "de", "fr"], num)
    first = np.minimum(rng.geometric(0.1, num), 30)
    return [
        {
            "question": f"w{word} " + "x " * length,
            "answers": ["y"] * int(1 + count),
            "source": str(source),
            "label": f"l{label}",
            "language": str(language),
        }
        for word, length, count, source, label, language in zip(
            first, lengths, rng.integers(0, 12, num), sources, labels, languages, strict=True
        )
    ]


def equal_pair(kind: str, rng: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Two results of equally good models: of independent answers, of models that agree in nearly
    all rows, or of scores of which many are the same.
    """
    if kind == "independent":
        return (rng.random(num) < 0.8).astype(float), (rng.random(num) < 0.8).astype(float)
    if kind == "alike":
        before = (rng.random(num) < 0.8).astype(float)
        again = rng.random(num) < 0.05
        return before, np.where(again, rng.random(num) < 0.8, before).astype(float)
    before, other = np.round(rng.beta(2, 1, num), 1), np.round(rng.beta(2, 1, num), 1)
    # whether a score was drawn again is no matter of the model: both sides are dealt by a coin
    mixed = np.where(rng.random(num) < 0.9, before, other)
    is_swapped = rng.random(num) < 0.5
    return np.where(is_swapped, mixed, before), np.where(is_swapped, before, mixed)


@pytest.mark.parametrize("num", [1000, 2000])
@pytest.mark.parametrize("kind", ["independent", "alike", "ties"])
def test_equal_models_have_a_slice_named_in_at_most_one_of_twenty_pairs(
    kind: str, num: int
) -> None:
    alarms = 0
    for seed in range(EQUAL_PAIRS):
        rng = np.random.default_rng([seed, num, len(kind)])
        table = features(rows_of(rng, num))
        alarms += bool(worse_slices(*equal_pair(kind, rng, num), table))
    print(f"SHOW {EQUAL_PAIRS} equal pairs of {num} rows, {kind}: {alarms} alarms")
    assert alarms <= EQUAL_PAIRS // 20


@pytest.mark.parametrize(("key", "value"), [("source", "own"), ("label", "l7")])
def test_a_slice_of_one_in_twenty_rows_that_falls_to_one_half_is_named(
    key: str, value: str
) -> None:
    named = 0
    for seed in range(PLANTED_PAIRS):
        rng = np.random.default_rng([seed, len(key)])
        rows = rows_of(rng, 2000)
        planted = np.array([row[key] == value for row in rows])
        before = (rng.random(2000) < 0.8).astype(float)
        after = (rng.random(2000) < np.where(planted, 0.5, 0.8)).astype(float)
        slices = worse_slices(before, after, features(rows))
        named += (f"{key} = {value}",) in [one.conditions for one in slices]
    print(f"SHOW a planted slice ({key}): named in {named} of {PLANTED_PAIRS}")
    assert named >= 45


def test_the_words_of_a_better_an_equal_and_a_broken_model() -> None:
    rng = np.random.default_rng(3)
    rows = rows_of(rng, 2000)
    before = rng.random(2000) < 0.8
    is_long = np.array([len(row["question"].split()) > 45 for row in rows])
    pairs = {
        "better": before | (rng.random(2000) < 0.25),
        "equal": np.where(rng.random(2000) < 0.05, rng.random(2000) < 0.8, before),
        "broken": np.where(is_long, rng.random(2000) < 0.4, before | (rng.random(2000) < 0.3)),
    }
    said = {}
    for name, after in pairs.items():
        sides = [
            ScoredRows({"em": float(one.mean())}, {"em": RowSums(one * 1.0, np.ones(2000))})
            for one in (before, after)
        ]
        said[name] = judge(sides[:1], sides[1:], rows).words
        print(f"SHOW {name}: {said[name]}")
    assert said["better"].startswith("better on 1 of 1, em by ")
    assert "worse" not in said["better"]
    assert said["equal"] == "no difference shown on 1 of 1"
    assert "worse where words of question > 4" in said["broken"]
