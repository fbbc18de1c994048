"""The part of the report about a search: parallel coordinates, the best trial, what mattered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from jobs.report.matter import MEASURE, mattering
from jobs.report.text import number_text, visible
from jobs.search.record import SearchRecord, SearchState, Trial
from trainer.config.differences import short_names, written
from trainer.errors import LatheError

if TYPE_CHECKING:
    from jobs.record.paths import BaseFolder

WIDTH, HEIGHT = 900, 320
LEFT, RIGHT, TOP, BOTTOM = 70, 70, 34, 20
MOST_LINKS = 40  # trials that the tab key stops at, the best first
MOST_TICKS = 6
LOG_FROM = 30  # an axis whose numbers differ by this factor is logarithmic


@dataclass(frozen=True)
class Column:
    """One axis: its name, the place of each trial on it (0 bottom, 1 top; None: it has none), and
    the texts beside it.
    """

    name: str
    places: list[float | None]
    ticks: list[tuple[float, str]]


def searches(base: BaseFolder, groups: Sequence[str]) -> str:
    """A section for each of these groups that was searched."""
    parts: list[str] = []
    for group in groups:
        try:
            search = SearchRecord.of(base.path, group).read()
        except LatheError as error:
            parts.append(f"<h2>Search: {_text(group)}</h2><p>{_text(str(error))}</p>")
            continue
        if search is not None and search.trials:
            parts.append(_section(group, search))
    return "".join(parts)


def _section(group: str, search: SearchState) -> str:
    ranked = _order(search)
    best = next((one for one in search.trials if one.number == search.best), None)
    scored = [one for one in ranked if one.scores]
    sentence = "the search has not ended yet"
    if best is not None:
        score = best.scores[max(best.scores)]
        sentence = f"the best is {_link(best)} with {_text(search.metric)} " + (
            "" if score is None else f"<b>{number_text(score)}</b>"
        )
    return (
        f"<section><h2>Search: {_text(group)}</h2>"
        f'<p class="small">{len(search.trials)} trials; {sentence}.</p>'
        f"{_figure(search, scored) if scored else ''}{_influence(search)}{_table(search, ranked)}"
        "</section>"
    )


def _order(search: SearchState) -> list[Trial]:
    """The trials, those first that came furthest, and among them the best."""
    sign = 1 if search.is_least_best else -1

    def key(trial: Trial) -> tuple[float, float, int]:
        reached = [rung for rung, score in trial.scores.items() if score is not None]
        score = trial.scores[max(reached)] if reached else None
        return -max(reached, default=0), sign * (score or 0.0), trial.number

    return sorted(search.trials, key=key)


def _last_rung(trial: Trial) -> int:
    return max((rung for rung, score in trial.scores.items() if score is not None), default=0)


# The figure
# --------------------------------------------------------------------------------------------------


def _figure(search: SearchState, trials: Sequence[Trial]) -> str:
    """Parallel coordinates as inline SVG: a line for each trial, which is a link to its card."""
    columns = list(_columns(search, trials))
    step = (WIDTH - LEFT - RIGHT) / max(len(columns) - 1, 1)
    axes: list[str] = []
    for place, column in enumerate(columns):
        x = LEFT + place * step
        axes.append(f'<path class="grid" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        head = _text(column.name)
        axes.append(f'<text x="{x:.1f}" y="{TOP - 16}" text-anchor="middle">{head}</text>')
        for at, words in column.ticks:
            spot = f'x="{x - 5:.1f}" y="{_y(at) + 3:.1f}"'
            axes.append(f'<text {spot} text-anchor="end">{_text(words)}</text>')
    lines: list[str] = []
    for number, trial in enumerate(trials):
        points = " ".join(
            f"{LEFT + place * step:.1f},{_y(at):.1f}"
            for place, column in enumerate(columns)
            if (at := column.places[number]) is not None
        )
        words = _text(_label(search, trial))
        line = (
            f'<polyline class="{_class(search, trial)}" points="{points}"><title>{words}</title>'
            "</polyline>"
        )
        if number < MOST_LINKS:
            line = f'<a href="#x{_text(trial.exp_id)}" aria-label="{words}">{line}</a>'
        lines.append(line)
    caption = (
        "Each line is a trial: where it crosses an axis is its value. Green: the best; blue: "
        "trained to the end. The tab key goes from trial to trial, the best first; Enter opens one."
    )
    return (
        f'<figure class="chartbox parallel"><svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="group" aria-label="Trials in parallel coordinates">'
        f'{"".join(lines)}<g aria-hidden="true">{"".join(axes)}</g></svg>'
        f'<figcaption class="soft small">{caption}</figcaption></figure>'
    )


def _class(search: SearchState, trial: Trial) -> str:
    if trial.number == search.best:
        return "c2 of-best"
    return "c0" if _last_rung(trial) == search.steps else "of-rest"


def _label(search: SearchState, trial: Trial) -> str:
    """A trial in words, for whoever hears it or points at it."""
    names = short_names(list(search.keys))
    values = ", ".join(
        f"{name} {written(trial.values[key])}" for name, key in zip(names, search.keys, strict=True)
    )
    scores = "; ".join(
        f"{search.metric} {number_text(score)} at step {rung}" if score is not None else "failed"
        for rung, score in trial.scores.items()
    )
    best = ", the best" if trial.number == search.best else ""
    return f"trial {trial.number + 1}{best}: {values}; {scores or 'no score yet'}"


def _y(place: float) -> float:
    return HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)


def _columns(search: SearchState, trials: Sequence[Trial]) -> Iterator[Column]:
    names = short_names(list(search.keys))
    for name, key in zip(names, search.keys, strict=True):
        yield _column(name, [trial.values[key] for trial in trials])
    rung = search.first_rung
    if rung is not None:
        yield _column(f"{search.metric}, step {rung}", [trial.scores.get(rung) for trial in trials])
    yield _column("came to step", [_last_rung(trial) for trial in trials])


def _column(name: str, values: Sequence[Any]) -> Column:
    """An axis for values: numbers where they lie, anything else in the order of appearance."""
    stated = [value for value in values if value is not None]
    if not all(type(value) in (int, float) for value in stated):
        texts = list(dict.fromkeys(written(value) for value in stated))
        at = {text: place / max(len(texts) - 1, 1) for place, text in enumerate(texts)}
        places = [None if value is None else at[written(value)] for value in values]
        return Column(name, places, [(at[text], _cut(text)) for text in texts[:MOST_TICKS]])
    low, high = min(stated, default=0), max(stated, default=1)
    is_log = low > 0 and high / low >= LOG_FROM

    def scale(value: float) -> float:
        if high == low:
            return 0.5
        if is_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    different = sorted(set(stated))
    if len(different) > MOST_TICKS:
        middle = math.sqrt(low * high) if is_log else (low + high) / 2
        different = [low, middle, high]
    ticks = [(scale(value), number_text(value)) for value in different]
    return Column(name, [None if value is None else scale(value) for value in values], ticks)


# Words and tables
# --------------------------------------------------------------------------------------------------


def _influence(search: SearchState) -> str:
    told = mattering(search)
    if told.problem:
        return f'<p class="small">{_text(told.problem[0].upper() + told.problem[1:])}.</p>'
    rows = "".join(
        f"<tr><td>{_text(one.key)}</td><td class='num'>{one.groups}</td><td class='num'>"
        + ("too few trials" if one.share is None else f"{one.share:.0%}")
        + "</td></tr>"
        for one in told.shares
    )
    return (
        f"<h3>What mattered</h3><p class='small soft'>At step {told.rung}, {told.trials} trials: "
        f"{_text(MEASURE)}. Keys that act together do not add up to 100%.</p>"
        "<div class='scroll'><table><thead><tr><th>key</th><th class='num'>values or thirds</th>"
        f"<th class='num'>share</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _table(search: SearchState, trials: Sequence[Trial]) -> str:
    """Every trial with its values and scores, for whoever does not see the figure."""
    rungs = sorted({rung for trial in search.trials for rung in trial.scores})
    heads = ["trial", *short_names(list(search.keys)), *(f"step {rung}" for rung in rungs)]
    lines: list[str] = []
    for trial in trials:
        values = [_text(_cut(written(trial.values[key]))) for key in search.keys]
        scores = ["" if rung not in trial.scores else _score(trial.scores[rung]) for rung in rungs]
        cells = "".join(f"<td>{cell}</td>" for cell in [_link(trial), *values, *scores])
        lines.append(f"<tr>{cells}</tr>")
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    return (
        f"<details><summary>{len(trials)} trials with their {_text(search.metric)}</summary>"
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
        "</table></div></details>"
    )


def _score(score: float | None) -> str:
    return "failed" if score is None else number_text(score)


def _link(trial: Trial) -> str:
    return f'<a href="#x{_text(trial.exp_id)}">trial {trial.number + 1}</a>'


def _cut(text: str) -> str:
    return text if len(text) <= 16 else f"{text[:15]}…"


def _text(value: str) -> str:
    """Any text, escaped for HTML."""
    return escape(visible(value))
