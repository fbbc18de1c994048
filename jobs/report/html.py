"""The report: one HTML file with the states, curves, scores and failures of a group of
experiments.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.job_state import ENDED_BADLY, STATES
from jobs.record.paths import BaseFolder, RunFolder
from jobs.record.row import Row, Start, seconds_between
from jobs.report.curves import read_curves, thin
from jobs.report.logs import last_lines
from jobs.report.page import page
from jobs.report.parallel import searches
from jobs.report.scores import best_value
from jobs.report.table import summary
from jobs.report.test_scores import TestResult, best_test
from jobs.report.text import duration, number_text, visible
from jobs.secret_keys import redact
from trainer.config.differences import short_names, written
from trainer.config.scores.direction import is_of_validation
from trainer.errors import EXIT_OK, EXIT_PAUSED, EXIT_PREEMPTED
from trainer.files.survival_events import recovery_sentence

if TYPE_CHECKING:
    from jobs.report.curves import Curves
    from jobs.report.scores import ExperimentScores, Results

MOST_CARDS = 200  # experiments with curves: about 20 kB each
MOST_SPARKS = 8
SPARK_POINTS = 60
MOST_RECOVERIES = 3
MOST_ATTEMPTS = 6  # of one experiment, in words
LOG_LINES = 40
LONGEST_TEXT = 400  # letters of one hyper-parameter


def report(base: BaseFolder, rows: Sequence[Row], results: Results) -> str:
    """The whole report as one HTML page, which loads nothing. Reads metrics.jsonl, and the logs of
    failed experiments.

    rows: from `record.status.survey`. results: from `report.scores.gather`, of the same
    experiments.
    """
    scores = {result.exp_id: result for result in results.results}
    now = datetime.now(timezone.utc)
    title = base.path.resolve().name
    facts = [str(base.path), f"{now:%Y-%m-%d %H:%M} UTC", *summary(rows).split("; ")[1:]]
    omission_note = ""
    if len(rows) > MOST_CARDS:
        omission_note = (
            f'<p class="soft">Curves of the first {MOST_CARDS} experiments; the other '
            f"{len(rows) - MOST_CARDS} are in the "
            "table above only. Make a report of one group to see them.</p>"
        )
    body = [
        f"<header><h1>{_text(title)}</h1>",
        f'<p class="soft small">{" · ".join(map(_text, facts))}</p>',
        _states(rows),
        '<noscript><p class="empty">The charts need JavaScript.</p></noscript>',
        "</header><main>",
        searches(base, list(dict.fromkeys(row.group for row in rows))),
        f"<h2>Results</h2>{_table(rows, scores, results)}",
        f"<h2>Experiments</h2>{omission_note}",
        '<p class="small"><label><input type="checkbox" id="logarithmic"> logarithmic axes</label>',
        "</p>",
        '<div class="cards">',
        *(
            _card(row, scores.get(row.exp_id), results, now.isoformat())
            for row in rows[:MOST_CARDS]
        ),
        "</div><footer class='soft small'>Scores are the best of each run; the last one stands in "
        "brackets where it differs. Where a curve has a shade, it is the mean of neighbouring "
        "steps and the shade how far they reach.</footer></main>",
    ]
    return page(f"{title}: {len(rows)} experiments", "\n".join(body))


def _text(value: str) -> str:
    """Any text, escaped for HTML."""
    return escape(visible(value))


def _states(rows: Sequence[Row]) -> str:
    counts = Counter(row.state for row in rows)
    order = [state for state in dict.fromkeys(("succeeded", "running", *STATES)) if counts[state]]
    bars = "".join(f'<i class="s-{state}" style="flex:{counts[state]}"></i>' for state in order)
    items = (
        f'<li class="dot s-{state}"><span><b>{counts[state]}</b> {state}</span></li>'
        for state in order
    )
    return f'<div class="states">{bars}</div><ul class="legend">{"".join(items)}</ul>'


def _table(rows: Sequence[Row], scores: dict[str, ExperimentScores], results: Results) -> str:
    has_groups = len({row.group for row in rows}) > 1
    # scores stand before settings: experiments of several tasks differ in very many settings
    texts = ["id", *(["group"] if has_groups else []), "state"]
    numbers = [*results.metrics, *results.test_metrics, "steps", "hours", "GPU-hours"]
    heads = [f"<th><button>{_text(name)}</button></th>" for name in texts]
    heads += [f'<th class="num"><button>{_text(name)}</button></th>' for name in numbers]
    names = short_names(results.parameters)
    heads += [f"<th><button>{_text(name)}</button></th>" for name in names]
    bests = {name: best_value(results, name) for name in results.metrics}
    tests = [result.test for result in results.results]
    bests |= {name: best_test(tests, name) for name in results.test_metrics}
    lines: list[str] = []
    for place, row in enumerate(rows):
        name = row.exp_id[:8]
        name = (
            f'<a href="#x{_text(row.exp_id)}">{_text(name)}</a>'
            if place < MOST_CARDS
            else _text(name)
        )
        cells = [f'<td class="mono" title="{_text(row.name)}">{name}</td>']
        cells += (
            [f'<td class="text" title="{_text(row.group)}">{_text(row.group)}</td>']
            if has_groups
            else []
        )
        cells.append(f'<td class="pill s-{row.state}">{_state(row)}</td>')
        cells += _score_cells(scores.get(row.exp_id), results, bests)
        cells += [
            _number(row.step, ""),
            _number(sum(start.hours for start in row.starts) if row.starts else None, ".2f"),
            _number(row.gpu_hours or None, ".1f"),
        ]
        parameters = [_parameter(scores.get(row.exp_id), key) for key in results.parameters]
        cells += [f'<td class="text" title="{text}">{text}</td>' for text in parameters]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    head = f"<thead><tr>{''.join(heads)}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>'


def _state(row: Row) -> str:
    return f"{row.state}?" if row.unseen_since else row.state


def _score_cells(
    result: ExperimentScores | None, results: Results, bests: dict[str, float | None]
) -> Iterator[str]:
    for name in results.metrics:
        score = result.scores.get(name) if result is not None else None
        if score is None:
            yield '<td class="num"></td>'
            continue
        kind = "num best" if score.best == bests[name] else "num"
        last = (
            f' <span class="soft">({number_text(score.last)})</span>'
            if score.last != score.best
            else ""
        )
        yield f'<td class="{kind}" data-value="{score.best!r}">{number_text(score.best)}{last}</td>'

    for name in results.test_metrics:
        of_test = result.test.scores.get(name) if result is not None and result.test else None
        if of_test is None:
            yield '<td class="num"></td>'
            continue
        kind = "num best" if of_test.value == bests[name] else "num"
        yield f'<td class="{kind}" data-value="{of_test.value!r}">{of_test.text}</td>'


def _parameter(result: ExperimentScores | None, key: str) -> str:
    if result is None or key not in result.parameters:
        return "–"
    text = written(result.parameters[key])
    return _text(text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…")


def _number(value: float | None, form: str) -> str:
    return '<td class="num"></td>' if value is None else f'<td class="num">{value:{form}}</td>'


def _card(row: Row, result: ExperimentScores | None, results: Results, now: str) -> str:
    folder = RunFolder(Path(row.folder))
    name = _text(row.name or row.group)
    chips = [
        f'<li title="{_text(key)}"><span>{_text(short)}</span> {_parameter(result, key)}</li>'
        for key, short in zip(results.parameters, short_names(results.parameters), strict=True)
        if result is not None and key in result.parameters
    ]
    parts = [
        f'<article class="card" id="x{_text(row.exp_id)}">',
        f'<header><h3 class="mono" title="{_text(row.exp_id)}">{_text(row.exp_id[:8])}</h3>'
        f'<span class="group soft small" title="{name}">{name}</span>'
        f'<span class="pill dot s-{row.state}">{_state(row)}</span></header>',
        _progress(row, result.test if result is not None else None),
        f'<ul class="chips">{"".join(chips)}</ul>' if chips else "",
        _why(row),
        _charts(row, read_curves(folder.metrics), result),
        _timeline(row, now),
        _log(row, folder),
        "</article>",
    ]
    return "".join(parts)


def _progress(row: Row, test: TestResult | None) -> str:
    if row.step is None:
        return ""
    share = min(row.step / row.total, 1.0) if row.total else 0.0
    facts = [f"step {row.step}{f' of {row.total}' if row.total else ''}"]
    facts += [f"{duration(row.eta_s)} left"] if row.eta_s is not None else []
    facts += [f"{row.metrics['step_s']:.3g} s a step"] if "step_s" in row.metrics else []
    predicted = row.metrics.get("predicted_step_s")
    facts += [f"{predicted:.3g} s a step predicted"] if predicted else []
    facts += [f"peak {row.metrics['peak_gib']:.3g} GiB"] if "peak_gib" in row.metrics else []
    useful = row.metrics.get("goodput")
    facts += [f"{useful:.0%} of its time in steps"] if useful is not None else []
    bad = row.metrics.get("bad_steps")
    facts += [f"{bad:.0f} bad step{'s' if bad > 1 else ''} left out"] if bad else []
    facts += [
        f"rank lost: {recovery_sentence(event)}" for event in row.recoveries[-MOST_RECOVERIES:]
    ]
    facts += [f"{row.gpu_hours:.1f} GPU-hours"] if row.gpu_hours else []
    if test is not None:
        took = f" in {duration(test.seconds)}" if test.seconds is not None else ""
        facts.append(f"test split: {test.rows} rows with {test.model}/{took}")
    words = "".join(f"<span>{_text(fact)}</span>" for fact in facts)
    bar = f'<div class="progress s-{row.state}"><i style="width:{share:.1%}"></i></div>'
    return f'{bar}<div class="facts">{words}</div>'


def _why(row: Row) -> str:
    words = [row.reason] if row.reason and row.state != "succeeded" else []
    words += [f"Not seen since {row.unseen_since}: {row.unseen_reason}"] if row.unseen_since else []
    shown_lines = "\n".join(_text(line) for word in words for line in word.splitlines())
    return f'<div class="why s-{row.state}"><span>{shown_lines}</span></div>' if words else ""


def _charts(row: Row, curves: Curves, result: ExperimentScores | None) -> str:
    """The places of the charts, with their data. Until the script draws them they show the last
    values.
    """
    losses = {name: curves.points[name] for name in ("loss", "valid/loss") if name in curves.points}
    if not losses:
        has_begun = bool(row.starts) or row.step is not None
        text = "no metrics were written" if has_begun else "has not begun"
        return f'<div class="empty">{text}</div>'
    colours = {"loss": 0, "valid/loss": 1}
    lines: list[Any] = []  # as report.js reads them
    for name, points in losses.items():
        numbers = [[_short(n) for n in (b.step, b.mean, b.low, b.high)] for b in thin(points)]
        lines.append([name, colours[name], numbers])
    last = [
        f"<span>{name} <b>{number_text(points[-1].value)}</b></span>"
        for name, points in losses.items()
    ]
    others = [name for name in curves.points if _has_spark(name)]
    scores = result.scores if result is not None else {}
    sparks = ""
    for name in others[:MOST_SPARKS]:
        points, score = curves.points[name], scores.get(name)
        best = ""
        if score is not None:
            best = f"best {number_text(score.best)} at step {score.best_step}"
        pairs = [[_short(b.step), _short(b.mean)] for b in thin(points, SPARK_POINTS)]
        label = _text(name.removeprefix("valid/"))
        sparks += (
            f'<div title="{best}"><span><em title="{_text(name)}">{label}</em>'
            f"<b>{number_text(points[-1].value)}</b></span>"
            f'<div data-title="{_text(name)}" data-spark="{_data(pairs)}"></div></div>'
        )
    num_hidden = len(others) - MOST_SPARKS
    rest = f'<p class="soft small">and {num_hidden} more metrics</p>' if num_hidden > 0 else ""
    return (
        f'<div data-title="loss" data-lines="{_data(lines)}"><p class="readout soft small">'
        f'{"".join(last)}</p></div><div class="sparks">{sparks}</div>{rest}'
    )


def _has_spark(name: str) -> bool:
    """Whether a metric has a small chart: every score, and the training loss of each source of a
    mix.
    """
    is_of_source = name.startswith("loss_") and name != "loss_scale"
    return is_of_source or (is_of_validation(name) and name != "valid/loss")


def _data(value: object) -> str:
    """JSON as the value of an attribute."""
    return escape(json.dumps(value, separators=(",", ":")))


def _short(value: float) -> float:
    """A number in six digits: more cannot be seen in a chart."""
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded == int(rounded) else rounded


def _timeline(row: Row, now: str) -> str:
    """A bar of when the experiment waited (pale) and ran, and a line for each attempt."""
    if not row.history:
        return ""
    begin = row.history[0].at
    end = row.ended_at or (
        row.starts[-1].ended_at if row.starts and row.state in ENDED_BADLY else now
    )
    total_s = max(seconds_between(begin, end), 1.0)
    bars: list[str] = []
    for start in row.starts:
        offset = min(max(seconds_between(begin, start.began_at) / total_s, 0.0), 1.0)
        width = min(start.hours * 3600 / total_s, 1.0 - offset)
        words = f"attempt {start.attempt}, start {start.number}: {duration(start.hours * 3600)}"
        bars.append(
            f'<i class="{_colour(start, row)}" style="left:{offset:.2%};width:{width:.2%}" '
            f'title="{words}"></i>'
        )
    earlier = max(len(row.history) - MOST_ATTEMPTS, 0)
    items = [f"<li>{earlier} earlier attempts</li>"] if earlier else []
    for attempt in row.history[-MOST_ATTEMPTS:]:
        own = [start for start in row.starts if start.attempt == attempt.number]
        where = f"{attempt.backend} {attempt.id or ''}".strip()
        hosts = list(dict.fromkeys(start.host for start in own if start.host))
        if hosts:
            where += f" on {', '.join(hosts)}"
        ran = f", ran {duration(sum(start.hours for start in own) * 3600)}" if own else ""
        times = f" in {len(own)} starts" if len(own) > 1 else ""
        sentence = f"{attempt.number}. {where}: {attempt.state}{ran}{times}"
        items.append(f"<li>{_text(sentence)}</li>")
    return f'<div class="time">{"".join(bars)}</div><ul class="tries">{"".join(items)}</ul>'


def _colour(start: Start, row: Row) -> str:
    """The class of the state in which a start ended."""
    if start.code is None:
        goes_on = row.state == "running" and start == row.starts[-1]
        return "s-running" if goes_on else "s-lost"
    classes = {EXIT_OK: "s-succeeded", EXIT_PREEMPTED: "s-preempted", EXIT_PAUSED: "s-paused"}
    return classes.get(start.code, "s-failed")


def _log(row: Row, folder: RunFolder) -> str:
    """The last lines that a failed experiment printed, stderr first. Keys are removed, because a
    report is passed on.
    """
    if row.state not in ENDED_BADLY or not row.attempt:
        return ""
    attempt = folder.attempt(row.attempt)
    for path in (attempt.err, attempt.logs):
        lines = last_lines(path, LOG_LINES)
        if lines:
            text = escape(redact("\n".join(lines)))
            return f"<details open><summary>end of {path.name}</summary><pre>{text}</pre></details>"
    return ""
