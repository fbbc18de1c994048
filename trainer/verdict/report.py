"""A judgement as a page of Markdown: judge.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.verdict.judgement import Judgement, ScoreChange
from trainer.verdict.opinions import PeopleSay, people_lines
from trainer.verdict.slices import LEVEL_OF_ONE, LEVEL_OF_TWO

MOST_ROWS = 20  # whose answers stand side by side
_MOST_CHARACTERS = 300
_MARKS = re.compile(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)")  # an underscore in a word is no mark

Texts = Sequence[str | None]


def report(
    facts: Mapping[str, Any],
    judgement: Judgement,
    rows: Sequence[Mapping[str, Any]],
    references: Sequence[Sequence[str]],
    answers: tuple[Texts, Texts],
    *,
    people: PeopleSay | None = None,
) -> str:
    """The page. facts: of judge.json, what was compared. answers: of both models, by row. people:
    what they voted.
    """
    lines = ["# Better or worse?", "", f"**{_plain(judgement.words)}.**", ""]
    lines += [
        f"{facts['model']} of {', '.join(facts['runs'])} against {_plain(facts['against'])}, on "
        f"{judgement.num_rows:,} rows of the {facts['split']} split.",
        "",
    ]
    if judgement.refusals:
        lines += ["The gate refuses this model:", ""]
        lines += [*(f"- {_plain(one)}" for one in judgement.refusals), ""]
    lines += [*_scores(judgement), *_slices(judgement), *_calibrations(judgement)]
    for name, why in facts.get("not_measured", {}).items():
        lines += [f"Not measured: {name}; {_plain(why)}.", ""]
    lines += people_lines(people)
    lines += _broken(judgement, rows, references)
    lines += _side_by_side(rows, references, answers)
    return "\n".join(lines).rstrip() + "\n"


def _scores(judgement: Judgement) -> Iterator[str]:
    yield from ("## Scores", "")
    yield "| score | before | after | difference | 95% interval | p | |"
    yield "|---|---|---|---|---|---|---|"
    general = {} if judgement.general is None else {"loss on general texts": judgement.general}
    for name, score in {**judgement.scores, **general}.items():
        yield _line(name, score)
    for name, (before, after, why) in judgement.untested.items():
        yield f"| {_cell(name)} | {_number(before)} | {_number(after)} | | | | not tested: {why} |"
    yield ""
    yield (
        "Intervals: bootstrap over rows, both models on the same rows. p: rows dealt to the models "
        "at random, corrected for the number of scores (Holm). With several seeds both cover the "
        "choice of seeds, too."
    )
    yield ""
    for name, score in judgement.scores.items():
        test = score.outcome.mcnemar
        if test is not None:
            yield (
                f"{_plain(name)}: {test.broken} rows were right and are wrong now, {test.mended} "
                f"were wrong and are right now (McNemar's exact p = {test.p:.3g})."
            )
            yield ""


def _line(name: str, score: ScoreChange) -> str:
    one = score.outcome
    return (
        f"| {_cell(name)} | {one.before:.4g} | {one.after:.4g} | {one.effect:+.4g} | "
        f"{one.low:+.4g} to {one.high:+.4g} | {score.p:.3g} | {score.result} |"
    )


def _slices(judgement: Judgement) -> Iterator[str]:
    by = judgement.slices_by
    if by is None:
        return
    yield from (f"## Slices that are worse by {_plain(by)}", "")
    if not judgement.slices:
        yield from ("None.", "")
        return
    yield (
        "| rows where | number | before | after | difference at the level of all slices | p "
        "| worse than all rows |"
    )
    yield "|---|---|---|---|---|---|---|"
    for one in judgement.slices:
        conditions = " and ".join(map(_cell, one.conditions))
        yield (
            f"| {conditions} | {one.num_rows} | {one.before:.4g} | {one.after:.4g} | "
            f"{one.low:+.4g} to {one.high:+.4g} | {one.p:.3g} | "
            f"{'yes' if one.is_worse_than_all else 'not shown'} |"
        )
    level = 100 * (LEVEL_OF_ONE + LEVEL_OF_TWO)
    yield ""
    yield (
        f"Of models that are equally good on every row any slice is named in {level:.1f} of 100 "
        "comparisons at most, however many slices are looked at."
    )
    yield ""


def _calibrations(judgement: Judgement) -> Iterator[str]:
    if judgement.calibrations is None:
        return
    yield from ("## Confidence of answers", "")
    yield "| | mean confidence | right | calibration error |"
    yield "|---|---|---|---|"
    for name, one in zip(("before", "after"), judgement.calibrations, strict=True):
        yield f"| {name} | {one.confidence:.4g} | {one.right:.4g} | {one.error:.4g} |"
    yield ""


def _broken(
    judgement: Judgement,
    rows: Sequence[Mapping[str, Any]],
    references: Sequence[Sequence[str]],
) -> Iterator[str]:
    if not judgement.broken:
        return
    yield from (f"## Rows that are worse now by {_plain(str(judgement.slices_by))}", "")
    shown = judgement.broken[:MOST_ROWS]
    yield f"{judgement.num_broken:,} in all; the first {len(shown)}:"
    yield ""
    yield "| row | what stands there | right | before | after | lost |"
    yield "|---|---|---|---|---|---|"
    for one in shown:
        right = " / ".join(references[one.row - 1])
        parts = (text_of(rows[one.row - 1]), right, one.before or "", one.after or "")
        cells = " | ".join(map(_cell, parts))
        yield f"| {one.row} | {cells} | {one.loss:.4g} |"
    yield ""


def _side_by_side(
    rows: Sequence[Mapping[str, Any]],
    references: Sequence[Sequence[str]],
    answers: tuple[Texts, Texts],
) -> Iterator[str]:
    before, after = answers
    differing = [
        row for row, (one, other) in enumerate(zip(before, after, strict=True)) if one != other
    ]
    if not differing:
        return
    yield from ("## Answers side by side", "")
    yield f"{len(differing):,} answers differ; the first {min(len(differing), MOST_ROWS)}:"
    yield ""
    yield "| row | what stands there | right | before | after |"
    yield "|---|---|---|---|---|"
    for row in differing[:MOST_ROWS]:
        right = " / ".join(references[row])
        parts = (text_of(rows[row]), right, before[row] or "", after[row] or "")
        yield f"| {row + 1} | {' | '.join(map(_cell, parts))} |"
    yield ""


def text_of(row: Mapping[str, Any]) -> str:
    """What a row asks, for people."""
    for name in ("question", "query", "statement", "document", "text"):
        if isinstance(row.get(name), str):
            return row[name]
    turns = row.get("messages") or row.get("prompt")
    if isinstance(turns, list):
        texts = [str(one.get("content")) for one in turns if one.get("role") == "user"]
        return texts[-1] if texts else json.dumps(turns, ensure_ascii=False)
    return json.dumps(row, ensure_ascii=False, default=str)


def _cell(text: str) -> str:
    """A text as a cell of a table."""
    line = " ".join(text.split())
    if len(line) > _MOST_CHARACTERS:
        line = f"{line[:_MOST_CHARACTERS]}..."
    return _plain(line)


def _plain(text: str) -> str:
    """A text on one line that Markdown shows as it is: no mark, no tag, no picture that is loaded.
    Half of a surrogate pair, which no file can hold, is replaced.
    """
    line = " ".join(text.split()).encode(errors="replace").decode()
    line = line.replace("&", "&amp;").replace("<", "&lt;")
    return _MARKS.sub(r"\\\g<0>", line)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
