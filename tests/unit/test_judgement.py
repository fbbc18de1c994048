"""What is said of two models by their results on the same rows."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from trainer.config.scores.judged import Bound
from trainer.metrics.intervals import RowSums
from trainer.verdict.calibration import calibration
from trainer.verdict.features import features
from trainer.verdict.judgement import ScoredRows, judge, refusals
from trainer.verdict.report import report

LENGTHS = [3 + (7 * n) % 40 for n in range(400)]
ROWS = [
    {"question": "where " * length, "source": "own" if n % 8 == 0 else "nq", "id": f"r{n}"}
    for n, length in enumerate(LENGTHS)
]


def scored(right: np.ndarray, loss: np.ndarray | None = None) -> ScoredRows:
    sums = {"em": RowSums(right.astype(float), np.ones(len(right)))}
    if loss is not None:
        sums["loss"] = RowSums(loss, np.ones(len(loss)))
    scores = {name: one.value() for name, one in sums.items()} | {"auroc": 0.9}
    return ScoredRows(scores, sums, ["right" if one else "wrong" for one in right])


def draws(share: float, seed: int, num: int = 400) -> np.ndarray:
    return np.random.default_rng(seed).random(num) < share


def test_a_better_model_is_said_to_be_better_by_points() -> None:
    before = draws(0.5, 0)
    judgement = judge([scored(before)], [scored(before | draws(0.3, 1))], ROWS)
    assert judgement.words.startswith("better on 1 of 1, em by ")
    assert "points" in judgement.words
    assert judgement.scores["em"].result == "better"
    assert judgement.num_broken == 0
    assert judgement.untested["auroc"][:2] == (0.9, 0.9)


def test_equal_models_are_not_said_to_differ() -> None:
    before = draws(0.5, 0)
    judgement = judge([scored(before)], [scored(before)], ROWS)
    assert judgement.words == "no difference shown on 1 of 1"
    assert judgement.slices == []
    assert judgement.broken == []


def test_a_slice_that_broke_is_in_the_words_beside_a_mean_that_rose() -> None:
    before = draws(0.6, 0)
    of_own = np.array([row["source"] == "own" for row in ROWS])
    after = np.where(of_own, False, before | draws(0.6, 1))
    judgement = judge([scored(before)], [scored(after)], ROWS)
    assert judgement.scores["em"].result == "better"
    assert judgement.slices[0].conditions == ("source = own",)
    assert "worse where source = own (50 rows" in judgement.words
    assert judgement.num_broken == int((before & ~after).sum())
    first = judgement.broken[0]
    assert (first.before, first.after, first.loss) == ("right", "wrong", 1.0)
    page = report(
        {"model": "best", "runs": ["a"], "against": "base", "split": "test"},
        judgement,
        ROWS,
        [["x | y"]] * len(ROWS),
        ([*scored(before).answers], [*scored(after).answers]),
    )
    assert "| source = own | 50 |" in page
    assert "x \\| y" in page, "a reference does not end a cell of the table"


def test_a_model_that_is_worse_everywhere_is_said_to_be_worse_once() -> None:
    before = draws(0.7, 0)
    everywhere = judge([scored(before)], [scored(before & draws(0.6, 1))], ROWS)
    assert everywhere.scores["em"].result == "worse"
    assert everywhere.slices, "each half of the rows is worse"
    assert not any(one.is_worse_than_all for one in everywhere.slices)
    assert "where" not in everywhere.words
    of_own = np.array([row["source"] == "own" for row in ROWS])
    after = np.where(of_own, False, before & draws(0.8, 1))
    somewhere = judge([scored(before)], [scored(after)], ROWS)
    assert somewhere.scores["em"].result == "worse"
    assert "worse where source = own (50 rows" in somewhere.words
    assert somewhere.words.count("(") == 2, "and the other slices are as all rows are"


def test_a_score_that_is_not_finite_is_in_the_verdict() -> None:
    right, broken = draws(0.5, 0), np.full(400, np.nan)
    judgement = judge([scored(right, np.ones(400))], [scored(right, broken)], ROWS)
    assert judgement.words == ("no difference shown on 1 of 1; not finite, and so not tested: loss")


def test_a_gate_on_slices_does_not_hold_where_none_could_be_looked_at() -> None:
    gate = {"slices": Bound(at_most=0)}
    right, broken = draws(0.5, 0), np.full(400, np.nan)
    sides = [scored(right, np.ones(400))], [scored(right, broken)]
    (line,) = judge(*sides, ROWS, gate=gate, slices_by="loss").refusals
    assert line.startswith("slices could not be looked at: 0 rows count")
    few = [scored(right[:39])]
    (line,) = judge(few, few, ROWS[:39], gate=gate).refusals
    assert line.startswith("slices could not be looked at: 39 rows count")
    assert not judge([scored(right)], [scored(right)], ROWS, gate=gate).refusals


def test_of_many_scores_a_clear_difference_is_still_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.verdict.paired.RESAMPLES", 50)  # of the intervals; p needs none
    num_scores, ones = 105, np.ones(24)
    noise = np.random.default_rng(0).normal(0, 1, (num_scores, 2, 24))
    noise[7, 1] -= 9
    before, after = (
        {f"loss_{n}": RowSums(noise[n, side], ones) for n in range(num_scores)} for side in (0, 1)
    )
    sides = [
        [ScoredRows({name: one.value() for name, one in sums.items()}, sums)]
        for sums in (before, after)
    ]
    judgement = judge(*sides, [{}] * 24)
    assert [name for name, one in judgement.scores.items() if one.result == "better"] == ["loss_7"]


def test_a_loss_that_falls_is_better_and_its_slices_are_told_as_losses() -> None:
    right, loss = draws(0.5, 0), np.random.default_rng(2).normal(2, 0.1, 400)
    of_own = np.array([row["source"] == "own" for row in ROWS])
    lower = np.where(of_own, loss + 0.5, loss - 0.2)
    judgement = judge([scored(right, loss)], [scored(right, lower)], ROWS, slices_by="loss")
    assert judgement.scores["loss"].result == "better"
    gain, worse_end, better_end = judgement.scores["loss"].gain
    assert 0 < worse_end < gain < better_end
    (slice, *_) = judgement.slices
    assert slice.conditions == ("source = own",)
    assert slice.effect == pytest.approx(0.5)
    assert slice.low < 0.5 < slice.high


def test_losses_of_two_tokenizers_are_not_compared() -> None:
    right = draws(0.5, 0)
    before, after = scored(right, np.ones(400)), scored(right, np.ones(400))
    after.sums["loss"] = RowSums(np.ones(400), np.full(400, 2.0))  # type: ignore[index]
    judgement = judge([before], [after], ROWS)
    assert "tokenizers" in judgement.untested["loss"][2]
    assert "loss" not in judgement.scores


def test_a_gate_names_each_thing_that_does_not_hold() -> None:
    before = draws(0.6, 0)
    judgement = judge([scored(before)], [scored(before)], ROWS)
    assert refusals(judgement, {"em": Bound(gain=0.0)}) == []
    gate = {"em": Bound(gain=0.01, at_least=0.99, at_most=0.1)}
    lines = refusals(judgement, gate)
    assert len(lines) == 3
    assert all(line.startswith("em") for line in lines)
    with pytest.raises(ValueError, match="auroc"):
        refusals(judgement, {"auroc": Bound(gain=0.1)})


def test_the_gain_of_a_gate_is_the_worse_end_of_the_interval() -> None:
    before = draws(0.5, 0)
    after = before | draws(0.1, 1)
    judgement = judge([scored(before)], [scored(after)], ROWS)
    effect, low, _ = judgement.scores["em"].gain
    assert 0 < low < effect
    between = (low + effect) / 2
    assert refusals(judgement, {"em": Bound(gain=between)})
    assert not refusals(judgement, {"em": Bound(gain=low - 1e-9)})


def test_a_gain_of_few_rows_is_not_shown() -> None:
    before, after = np.zeros(8, dtype=bool), np.ones(8, dtype=bool)
    judgement = judge([scored(before)], [scored(after)], ROWS[:8])
    assert judgement.words.endswith("of only 8 rows, whose intervals say nothing")
    (line,) = refusals(judgement, {"em": Bound(gain=0.0, at_least=0.5)})
    assert "8 rows count for it" in line


def test_what_could_not_be_tested_does_not_hold() -> None:
    right = draws(0.5, 0)
    broken = np.ones(400)
    broken[3] = np.nan
    before, after = scored(right, np.ones(400)), scored(right, broken)
    judgement = judge([before], [after], ROWS, gate={"loss": Bound(gain=-1.0)})
    assert judgement.untested["loss"][:2] == (1.0, None)
    assert judgement.refusals == [
        "loss could not be tested: it is not a finite number under both models"
    ]
    json.dumps(judgement.record(), allow_nan=False)
    (line,) = refusals(judgement, {"keep/loss": Bound(gain=-1.0)})
    assert line.startswith("keep/loss: ")


@pytest.mark.parametrize("name", ["emm", "kl"])
def test_slices_by_a_score_of_no_direction_are_refused(name: str) -> None:
    right = draws(0.5, 0)
    sides = [scored(right), scored(right)]
    for side in sides:
        side.sums["kl"] = RowSums(np.ones(400), np.ones(400))  # type: ignore[index]
        side.scores["kl"] = 1.0  # type: ignore[index]
    with pytest.raises(ValueError, match="slices_by"):
        judge(sides[:1], sides[1:], ROWS, slices_by=name)


def test_texts_of_rows_and_models_are_no_marks_of_the_page() -> None:
    wild = "a | b\n# x ![p](http://x/y.png) **b** <script> &lt; `c` \ud83d 😀 _i_ $x$"
    rows = [{**row, "source": wild if n % 8 == 0 else "nq"} for n, row in enumerate(ROWS)]
    before = np.ones(400, dtype=bool)
    after = np.array([row["source"] == "nq" for row in rows])
    judgement = judge([scored(before)], [scored(after)], rows)
    facts = {"model": "best", "runs": ["a"], "against": "base", "split": "test"}
    answers = ([wild] * 400, ["b"] * 400)
    page = report(facts, judgement, rows, [[wild]] * 400, answers)
    page.encode()
    from markdown_it import MarkdownIt

    html = MarkdownIt("js-default", {"html": True}).render(page)
    assert "<img" not in html
    assert "<script" not in html
    assert "<em>" not in html
    assert "😀" in html
    assert "&amp;lt;" in html
    cells = {line.count("<td") for line in html.split("<tr>")[1:] if "<td" in line}
    assert cells <= {5, 6, 7}


def test_a_row_with_a_number_that_is_no_float_is_a_row() -> None:
    table = features([{"size": 10**400 if n % 2 else n, "share": float("nan")} for n in range(80)])
    assert set(table) == {"size"}


def test_a_gate_on_slices_counts_them() -> None:
    before = np.ones(400, dtype=bool)
    after = np.array([row["source"] != "own" for row in ROWS])
    judgement = judge([scored(before)], [scored(after)], ROWS)
    assert refusals(judgement, {"slices": Bound(at_most=0)})
    assert not refusals(judgement, {"slices": Bound(at_most=len(judgement.slices))})


def test_features_are_lengths_words_columns_and_scripts() -> None:
    rows = [
        {
            "messages": [{"role": "user", "content": "how long is it"}, {"role": "assistant"}],
            "label": "a" if n % 2 else "b",
            "is_new": n % 3 == 0,
            "id": f"r{n}",
            "text": "мир и труд " * 3 if n % 4 == 0 else "peace " * (n % 9 + 1),
            "same": "x",
        }
        for n in range(120)
    ]
    table = features(rows)
    assert {"label", "is_new", "words of text", "script"} <= table.keys()
    assert set(table["script"]) == {"latin", "cyrillic"}
    assert not {"same", "id", "first question"} & table.keys()


def test_calibration_is_the_mean_distance_over_bins_of_equally_many_rows() -> None:
    confidence = np.array([0.1] * 50 + [0.9] * 50)
    right = np.array([0] * 50 + [1] * 40 + [0] * 10)
    one = calibration(confidence, right)
    assert one.right == pytest.approx(0.4)
    assert one.confidence == pytest.approx(0.5)
    # bins of ten rows: .1 above 0 five times; then .1 below 1 four times, .9 above 0 once
    assert one.error == pytest.approx((5 * 0.1 + 4 * 0.1 + 0.9) / 10)


def test_the_confidence_of_answers_is_that_of_rows_that_were_asked() -> None:
    right = np.array([True] * 40 + [False] * 360)
    asked_N = np.full(400, np.nan)
    asked_N[:80] = 0.75
    sides = [replace(scored(right), confidence_N=one) for one in (asked_N, asked_N)]
    first, _ = judge(sides[:1], sides[1:], ROWS).calibrations or (None, None)
    assert first is not None
    assert (first.num_rows, first.right, first.confidence) == (80, 0.5, 0.75)
    assert judge([scored(right)], [scored(right)], ROWS).calibrations is None
