"""One model against another on the same rows, as numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from trainer.config.scores.direction import Direction, direction_of
from trainer.config.scores.judged import KEPT_LOSS, WORSE_SLICES, Bound
from trainer.metrics.intervals import OF_ALL_ROWS, RowSums
from trainer.verdict.calibration import Confidence, calibration
from trainer.verdict.features import features
from trainer.verdict.paired import Difference, compare, holm
from trainer.verdict.slices import MIN_ROWS, Slice, worse_slices

SIGNIFICANT = 0.05  # of the p values that are corrected for the number of scores
MOST_BROKEN = 100  # rows that are listed
FEWEST_ROWS = 20  # by which a gain can be shown: the interval of fewer says nothing
_LOSS = "loss"
_NOT_FINITE = "it is not a finite number under both models"
# Scores that say right or wrong by row, the one that is looked at first.
_RIGHT = ("em", "accuracy", "exact_match", "acc")

Result = Literal["better", "worse", "no difference shown", "no direction"]


@dataclass(frozen=True)
class ScoredRows:
    """What one model scored on N rows."""

    scores: Mapping[str, float]
    sums: Mapping[str, RowSums]  # of those that are means over rows: what each of the N rows adds
    answers: Sequence[str | None] = ()  # what it said to each row; None: it was not asked
    # (N,) the probability of what it said to each row; NaN: it was not asked. None: nobody knows
    confidence_N: np.ndarray | None = None


@dataclass(frozen=True)
class ScoreChange:
    """One score under both models."""

    outcome: Difference
    direction: Direction | None
    p: float  # corrected for all scores
    result: Result

    @property
    def gain(self) -> tuple[float, float, float]:
        """How much better it is, and the worse and the better end of that interval."""
        one = self.outcome
        if self.direction == "min":
            return -one.effect, -one.high, -one.low
        return one.effect, one.low, one.high


@dataclass(frozen=True)
class BrokenRow:
    """A row that was right, or had a lower loss, and is not any more."""

    row: int  # its number, from 1
    before: str | None  # the answers
    after: str | None
    loss: float  # by how much the score fell


@dataclass(frozen=True)
class Judgement:
    """What changed."""

    num_rows: int
    scores: Mapping[str, ScoreChange]
    untested: Mapping[str, tuple[float | None, float | None, str]]  # before, after, why not
    slices_by: str | None  # the score by which slices and broken rows are known
    slices: Sequence[Slice]
    broken: Sequence[BrokenRow]
    num_broken: int
    general: ScoreChange | None = None  # the loss on general texts
    calibrations: tuple[Confidence, Confidence] | None = None
    refusals: Sequence[str] = field(default_factory=list[str])  # what of the gate does not hold

    @property
    def words(self) -> str:
        """The verdict as one sentence."""
        parts = _scores_in_words(self.scores)
        if broken := [name for name, (*_, why) in self.untested.items() if why == _NOT_FINITE]:
            parts.append(f"not finite, and so not tested: {', '.join(broken)}")
        is_worse = self.slices_by is not None and self.scores[self.slices_by].result == "worse"
        # of a score that is worse on all rows a slice is worth a word where it is worse than that
        worst = [one for one in self.slices if one.is_worse_than_all or not is_worse][:3]
        if worst:
            places = [_slice_in_words(one, str(self.slices_by)) for one in worst]
            parts.append("worse where " + "; where ".join(places))
        if self.general is not None:
            general = self.general
            numbers = f"{general.outcome.before:.4g} to {general.outcome.after:.4g}"
            parts.append(f"on general texts {general.result} (loss {numbers})")
        if self.num_rows < FEWEST_ROWS:
            rows = "1 row" if self.num_rows == 1 else f"{self.num_rows} rows"
            parts.append(f"of only {rows}, whose intervals say nothing")
        return "; ".join(parts) or "nothing could be compared"

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "verdict": self.words,
            "rows": self.num_rows,
            "scores": {name: _record(one) for name, one in self.scores.items()},
            "untested": {
                name: {"before": before, "after": after, "why": why}
                for name, (before, after, why) in self.untested.items()
            },
            "slices_by": self.slices_by,
            "slices": [{**asdict(one), "effect": one.effect} for one in self.slices],
            "broken": {"rows": self.num_broken, "first": [asdict(one) for one in self.broken]},
            "keep": None if self.general is None else _record(self.general),
            "calibration": None
            if self.calibrations is None
            else dict(zip(("before", "after"), map(asdict, self.calibrations), strict=True)),
            "gate": {"holds": not self.refusals, "refusals": list(self.refusals)},
        }


def judge(
    before: Sequence[ScoredRows],
    after: Sequence[ScoredRows],
    rows: Sequence[Mapping[str, Any]],
    *,
    general: tuple[RowSums, RowSums] | None = None,
    slices_by: str | None = None,
    gate: Mapping[str, Bound] | None = None,
) -> Judgement:
    """The model `after` against the model `before`, each on the same rows, in the same order;
    several ScoredRows are several seeds.

    rows: as they were read; they name the slices. general: the loss of both on other texts.
    ValueError for a gate, or slices_by, with a score that nobody has computed or whose direction
    nobody knows.
    """
    bounds = gate or {}
    names = sorted({name for one in [*before, *after] for name in one.scores})
    reasons = {name: _untested(name, before, after) for name in names}
    directions: dict[str, Direction | None] = {
        name: _direction(name, bounds) for name in names if not reasons[name]
    }
    num_tested = sum(one is not None for one in directions.values())
    outcomes = {
        name: compare(
            *([one.sums[name] for one in side] for side in (before, after)), num_scores=num_tested
        )
        for name in directions
    }
    tested = {name: one.p for name, one in outcomes.items() if directions[name] is not None}
    corrected = holm(tested)
    scores = {
        name: _score(one, directions[name], corrected.get(name, one.p))
        for name, one in outcomes.items()
    }
    by = _slices_by(slices_by, scores, reasons)
    loss_N = _losses(by, scores, before, after) if by is not None else np.zeros(len(rows))
    slices: list[Slice] = []
    if by is not None:
        sign = 1 if scores[by].direction == "max" else -1
        values = [sign * _by_row(by, side) for side in (before, after)]
        slices = _slices(values, rows, sign)
    broken = np.flatnonzero(loss_N > 0)
    worst = sorted(broken.tolist(), key=lambda row: (-loss_N[row], row))[:MOST_BROKEN]
    judgement = Judgement(
        num_rows=len(rows),
        scores=scores,
        untested={
            name: (_mean_of(name, before), _mean_of(name, after), why)
            for name, why in reasons.items()
            if why
        },
        slices_by=by,
        slices=slices,
        broken=[
            BrokenRow(row + 1, _answer(before, row), _answer(after, row), float(loss_N[row]))
            for row in worst
        ],
        num_broken=len(broken),
        general=_of_general(general),
        calibrations=_calibrations(before[0], after[0]),
    )
    return replace(judgement, refusals=refusals(judgement, bounds))


def refusals(judgement: Judgement, gate: Mapping[str, Bound]) -> list[str]:
    """What of a gate does not hold, each as a sentence; what could not be tested does not hold.
    ValueError for a score that nobody has computed, or one whose direction nobody knows.
    """
    known = {**judgement.scores}
    if judgement.general is not None:
        known[KEPT_LOSS] = judgement.general
    lines: list[str] = []
    for name, bound in gate.items():
        if name == WORSE_SLICES:
            most, count = bound.at_most or 0, len(judgement.slices)
            by = judgement.slices_by
            num_rows = 0 if by is None else judgement.scores[by].outcome.num_rows
            if num_rows < 2 * MIN_ROWS:
                lines.append(
                    f"{name} could not be looked at: {num_rows} rows count, and a slice needs "
                    f"{MIN_ROWS} in it and {MIN_ROWS} outside it"
                )
            elif count > most:
                lines.append(f"{count} slices are worse, at most {most:g} may be")
        elif name in known:
            lines += _refusals(name, known[name], bound)
        elif name == KEPT_LOSS:
            lines.append(f"{name}: the losses of the two models on general texts do not compare")
        elif name in judgement.untested and judgement.untested[name][2] != OF_ALL_ROWS:
            lines.append(f"{name} could not be tested: {judgement.untested[name][2]}")
        else:
            raise ValueError(f"judge.gate: {name!r} has no result by row. Use one of {[*known]}.")
    return lines


def _refusals(name: str, score: ScoreChange, bound: Bound) -> list[str]:
    lines: list[str] = []
    value = score.outcome.after
    if bound.gain is not None:
        if score.direction is None:
            raise ValueError(f"judge.gate: {name!r} needs best_is, which says what is better.")
        gain, low, _ = score.gain
        if score.outcome.num_rows < FEWEST_ROWS:
            lines.append(
                f"{name}: {score.outcome.num_rows} rows count for it, and a gain needs "
                f"{FEWEST_ROWS} to be shown"
            )
        elif not low >= bound.gain:
            lines.append(
                f"{name}: the gain is {gain:.4g} and may be {low:.4g}, at least {bound.gain:g} is "
                "asked for"
            )
    if bound.at_least is not None and not value >= bound.at_least:
        lines.append(f"{name} is {value:.4g}, at least {bound.at_least:g} is asked for")
    if bound.at_most is not None and not value <= bound.at_most:
        lines.append(f"{name} is {value:.4g}, at most {bound.at_most:g} is asked for")
    return lines


# Parts
# --------------------------------------------------------------------------------------------------


def _untested(name: str, before: Sequence[ScoredRows], after: Sequence[ScoredRows]) -> str:
    """Why a score is not compared; "" where it is."""
    sides = [*before, *after]
    if any(name not in one.scores for one in sides):
        return "only one of the models has it"
    if any(name not in one.sums for one in sides):
        return OF_ALL_ROWS
    weights = [one.sums[name].den_N for one in sides]
    if not all(np.array_equal(weights[0], one) for one in weights[1:]):
        return "its rows count differently under the two models, as tokens of two tokenizers do"
    if not weights[0].sum():
        return "no row counts for it"
    is_sound = all(math.isfinite(one.sums[name].value()) for one in sides)
    return "" if is_sound else _NOT_FINITE


def _mean_of(name: str, side: Sequence[ScoredRows]) -> float | None:
    values = [one.scores[name] for one in side if name in one.scores]
    mean = sum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None


def _direction(name: str, gate: Mapping[str, Bound]) -> Direction | None:
    stated = gate[name].best_is if name in gate else None
    return stated or direction_of(name)


def _score(outcome: Difference, direction: Direction | None, p: float) -> ScoreChange:
    if direction is None:
        return ScoreChange(outcome, None, p, "no direction")
    if p > SIGNIFICANT or outcome.effect == 0:
        return ScoreChange(outcome, direction, p, "no difference shown")
    is_better = (outcome.effect > 0) == (direction == "max")
    return ScoreChange(outcome, direction, p, "better" if is_better else "worse")


def _of_general(losses: tuple[RowSums, RowSums] | None) -> ScoreChange | None:
    if losses is None or not all(math.isfinite(one.value()) for one in losses):
        return None
    outcome = compare([losses[0]], [losses[1]])
    return _score(outcome, "min", outcome.p)


def _slices_by(
    stated: str | None, scores: Mapping[str, ScoreChange], reasons: Mapping[str, str]
) -> str | None:
    """The score by which slices are compared. None where none could be tested, or the stated one is
    not finite: that is a broken model, and not a wrong name, which is a ValueError.

    reasons: by score, why it was not tested; "" where it was.
    """
    names = [name for name, one in scores.items() if one.direction is not None]
    if stated is not None:
        if stated in names or reasons.get(stated) == _NOT_FINITE:
            return stated if stated in names else None
        raise ValueError(
            f"judge: slices_by={stated!r} has no result by row, or nothing says whether more of it "
            f"is better. Use one of {names}."
        )
    binary = [name for name in names if scores[name].outcome.mcnemar is not None]
    ordered = [name for name in _RIGHT if name in names]
    ordered += [*binary, *(name for name in names if name == _LOSS), *names]
    return ordered[0] if ordered else None


def _by_row(name: str, side: Sequence[ScoredRows]) -> np.ndarray:
    """(N,) the score of each row, the mean over seeds; NaN for a row that does not count."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.mean([one.sums[name].num_N / one.sums[name].den_N for one in side], axis=0)


def _losses(
    name: str,
    scores: Mapping[str, ScoreChange],
    before: Sequence[ScoredRows],
    after: Sequence[ScoredRows],
) -> np.ndarray:
    """(N,) by how much the score of each row is worse after; 0 for a row that does not count."""
    sign = 1 if scores[name].direction == "max" else -1
    return np.nan_to_num(sign * (_by_row(name, before) - _by_row(name, after)))


def _slices(
    values: Sequence[np.ndarray], rows: Sequence[Mapping[str, Any]], sign: int
) -> list[Slice]:
    """The slices of the rows that count; values are higher where they are better."""
    counts_N = np.isfinite(values[0]) & np.isfinite(values[1])
    places: list[int] = np.flatnonzero(counts_N).tolist()
    before, after = (one[places] for one in values)
    table = features([rows[place] for place in places])
    if sign > 0:
        return worse_slices(before, after, table)
    return [_turned(one) for one in worse_slices(before, after, table)]


def _turned(one: Slice) -> Slice:
    """A slice of negative losses as one of losses."""
    ends = {"low": -one.high, "high": -one.low}
    return replace(one, before=-one.before, after=-one.after, **ends)


def _answer(side: Sequence[ScoredRows], row: int) -> str | None:
    return side[0].answers[row] if side[0].answers else None


def _calibrations(before: ScoredRows, after: ScoredRows) -> tuple[Confidence, Confidence] | None:
    first, second = _calibration(before), _calibration(after)
    return None if first is None or second is None else (first, second)


def _calibration(rows: ScoredRows) -> Confidence | None:
    """Of the rows that have an answer with a probability, and right answers."""
    right = rows.sums.get(_RIGHT[0])
    if rows.confidence_N is None or right is None:
        return None
    counts_N = np.isfinite(rows.confidence_N) & (right.den_N > 0)
    if not counts_N.any():
        return None
    return calibration(rows.confidence_N[counts_N], right.num_N[counts_N])


def _record(score: ScoreChange) -> dict[str, Any]:
    one = score.outcome
    return {
        "before": one.before,
        "after": one.after,
        "effect": one.effect,
        "low": one.low,
        "high": one.high,
        "p": one.p,
        "p_corrected": score.p,
        "rows": one.num_rows,
        "best_is": score.direction,
        "result": score.result,
        "mcnemar": None if one.mcnemar is None else asdict(one.mcnemar),
    }


# Words
# --------------------------------------------------------------------------------------------------


def _scores_in_words(scores: Mapping[str, ScoreChange]) -> list[str]:
    """ "better on 7 of 8, em by 4.1 points (2.9 to 5.3)", and the same of what is worse."""
    judged = {name: one for name, one in scores.items() if one.direction is not None}
    if not judged:
        return []
    parts: list[str] = []
    for result in ("better", "worse"):
        names = [name for name, one in judged.items() if one.result == result]
        if names:
            clearest = min(names, key=lambda name: (judged[name].p, -_size(judged[name]), name))
            first = [name for name in _RIGHT if name in names]
            headline = first[0] if first else clearest
            amount = _amount(judged[headline])
            parts.append(f"{result} on {len(names)} of {len(judged)}, {headline} by {amount}")
    return parts or [f"no difference shown on {len(judged)} of {len(judged)}"]


def _size(score: ScoreChange) -> float:
    """How many half widths of its interval the difference is."""
    half = (score.outcome.high - score.outcome.low) / 2
    return abs(score.outcome.effect) / half if half else math.inf


def _amount(score: ScoreChange) -> str:
    """A difference with its interval; of a share of rows in points (hundredths)."""
    one = score.outcome
    ends = sorted(abs(end) for end in (one.low, one.high))
    if one.low < 0 < one.high:
        ends = [-min(ends), max(ends)]
    is_share = all(0 <= value <= 1 for value in (one.before, one.after))
    if is_share and score.direction == "max":
        return f"{100 * abs(one.effect):.1f} points ({100 * ends[0]:.1f} to {100 * ends[1]:.1f})"
    return f"{abs(one.effect):.4g} ({ends[0]:.4g} to {ends[1]:.4g})"


def _slice_in_words(one: Slice, name: str) -> str:
    conditions = " and ".join(one.conditions)
    numbers = f"{name} {one.before:.4g} to {one.after:.4g}"
    return f"{conditions} ({one.num_rows} rows, {numbers})"
