"""The results of experiments: the hyper-parameters in which they differ, and their scores."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from rich.table import Table
from rich.text import Text

from jobs.errors import reason_of
from jobs.record import events as record
from jobs.record.events import Job
from jobs.record.metrics import evaluations, last_metrics
from jobs.record.paths import BaseFolder, RunFolder
from jobs.record.row import experiment_of, starts_of
from jobs.record.status import seen_by_hand
from jobs.report.operations import OperationTotals, operations_of
from jobs.report.test_scores import TestResult, best_test, read_test
from jobs.report.text import number_text, visible
from trainer.config.differences import differing, flatten, short_names, written
from trainer.config.scores.direction import direction_of, is_of_validation
from trainer.files.atomic import read_json
from trainer.metrics.judge_record import why_refused

FORMULA = ("=", "+", "-", "@", "\t", "＝", "＋", "－", "＠")  # first letters, for a spreadsheet
ID_WIDTH, GAP = 8, 2
SPEEDS = {"s a step": "step_s", "TFLOP/s": "tflops"}  # head of a column -> what it shows
_RUN_HEADS = ("steps", "wall_s", *SPEEDS.values())
MOST_BESIDE_TESTS = 3  # hyper-parameters in the table of the test split
WIDEST_CELL = 24  # letters of a hyper-parameter in the table
MOST_SHOWN = 200  # experiments in a table for a terminal


@dataclass(frozen=True)
class Score:
    """One metric over a run. is_least_best: whether a smaller value is better; None: its name does
    not say, and neither does the experiment. Its best value is then its last one.
    """

    best: float
    best_step: int
    last: float
    last_step: int
    is_least_best: bool | None


@dataclass(frozen=True)
class ExperimentScores:
    """The flattened dictionary of one experiment, and its scores.

    wall_s: seconds of all starts together; None for a run by hand. step_s: seconds of a step, and
    tflops: what one GPU achieved in a second (in 1e12), both between the last two log lines; None
    where they were not logged.
    """

    exp_id: str
    group: str
    parameters: dict[str, Any]
    scores: dict[str, Score] = field(default_factory=dict[str, Score])
    steps: int | None = None
    wall_s: float | None = None
    step_s: float | None = None
    tflops: float | None = None
    test: TestResult | None = None  # of --test
    refused: str | None = None  # why a gate keeps its model back
    operations: OperationTotals | None = None  # of a driven run


@dataclass(frozen=True)
class Results:
    """Experiments, the keys in which their dictionaries differ (in order of appearance), metrics
    of evaluations and of the test split. unreadable: exp_id -> why its folder cannot be read.
    """

    results: tuple[ExperimentScores, ...]
    parameters: tuple[str, ...]
    metrics: tuple[str, ...]
    test_metrics: tuple[str, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict[str, str])


def gather(
    base: BaseFolder,
    only: Collection[str] | None = None,
) -> Results:
    """The results of the experiments in `base`, submitted or run by hand, on validation rows.

    only: ids of experiments, in the order of the results; None for all. An experiment without an
    exp_dict.json is skipped.
    """
    folders = base.runs() if only is None else [base.run(name) for name in dict.fromkeys(only)]
    results: list[ExperimentScores] = []
    unreadable: dict[str, str] = {}
    for folder in folders:
        try:
            result = _result(folder, record.read(folder))
        except Exception as error:  # of any kind: it must not hide the others
            unreadable[folder.path.name] = reason_of(error, folder.path)
            continue
        results += [] if result is None else [result]
    return _together(results, unreadable)


def gather_listed(
    base: BaseFolder, group: str | None, members: Callable[[], Collection[str]]
) -> Results | None:
    """The results of the experiments that `status` lists, in its order, of all groups or of one;
    None when it lists none. Each file of a run is read once, and no scheduler is asked.

    members: the ids of the group's experiments, to which those that were run by hand belong.
    """
    listed: list[tuple[tuple[str, str, str], ExperimentScores | None]] = []
    unreadable: dict[str, str] = {}
    of_group: Collection[str] | None = None
    for folder in base.runs():
        name, job = folder.path.name, None
        try:
            job = record.read(folder)
            seen_at = job.created_at if job else seen_by_hand(folder)
            if seen_at is None:
                continue  # nobody has sent it, and it has not begun
            own_group = job.group if job else ""
            if job is None and group is not None:
                of_group = members() if of_group is None else of_group
                own_group = group if name in of_group else ""
            if group in (None, own_group):
                order = (job.group if job else "", seen_at, name)
                listed.append((order, _result(folder, job)))
        except Exception as error:  # of any kind: it must not hide the others
            if group in (None, job.group if job else ""):
                unreadable[name] = reason_of(error, folder.path)
    if not listed and not unreadable:
        return None
    in_order = [result for _, result in sorted(listed, key=lambda one: one[0])]
    return _together([one for one in in_order if one is not None], unreadable)


def _together(results: list[ExperimentScores], unreadable: Mapping[str, str]) -> Results:
    metrics = (name for result in results for name in result.scores)
    tests = (result.test for result in results if result.test is not None)
    return Results(
        tuple(results),
        differing([result.parameters for result in results]),
        _in_order(metrics),
        _in_order(name for test in tests for name in test.scores),
        unreadable,
    )


def _in_order(metrics: Iterable[str]) -> tuple[str, ...]:
    """Each name once, losses first."""
    return tuple(sorted(set(metrics), key=lambda name: (not name.endswith("/loss"), name)))


def _result(folder: RunFolder, job: Job | None) -> ExperimentScores | None:
    values = experiment_of(folder)
    if values is None:
        return None
    starts = [
        start
        for attempt in (job.attempts if job else ())
        for start in starts_of(folder.attempt(attempt.number))
    ]
    last, operations = last_metrics(folder), operations_of(folder.path)
    step: Any = last["step"] if "step" in last else (read_json(folder.status) or {}).get("step")
    return ExperimentScores(
        folder.path.name,
        job.group if job else "",
        flatten(values),
        best_scores(folder, values),
        int(step) if type(step) in (int, float) and math.isfinite(step) else None,
        math.fsum(start.hours for start in starts) * 3600 if starts else None,
        last.get("step_s"),
        last.get("tflops"),
        read_test(folder, _directions(values)),
        why_refused(folder.path),
        operations and operations.totals,
    )


def best_scores(folder: RunFolder, experiment: Mapping[str, Any]) -> dict[str, Score]:
    """Metric -> best and last score of one run. `train.best_is` says which value of `train.best` is
    best.
    """
    return _scores(folder, _directions(experiment))


def _directions(experiment: Mapping[str, Any]) -> dict[str, Literal["min", "max"]]:
    """What train.best_is says of each metric."""
    train = experiment.get("train")
    if not isinstance(train, dict):
        return {}
    train = cast("dict[str, Any]", train)
    best, best_is = train.get("best"), train.get("best_is")
    if isinstance(best_is, dict):
        stated = cast("dict[str, Any]", best_is)
    else:
        stated = {best: best_is} if isinstance(best, str) else dict[str, Any]()
    return {name: one for name, one in stated.items() if one in ("min", "max")}


def _scores(folder: RunFolder, directions: Mapping[str, Literal["min", "max"]]) -> dict[str, Score]:
    series: dict[str, list[tuple[int, float]]] = {}
    for values in evaluations(folder):
        step = int(values.get("step", 0))
        for name in values:
            if is_of_validation(name):
                series.setdefault(name, []).append((step, values[name]))
    scores: dict[str, Score] = {}
    for name, points in series.items():
        direction = directions.get(name) or direction_of(name)
        best_step, best = points[-1]
        if direction is not None:
            sign = 1 if direction == "min" else -1
            best_step, best = min(points, key=lambda point: sign * point[1])
        is_least = None if direction is None else direction == "min"
        scores[name] = Score(best, best_step, points[-1][1], points[-1][0], is_least)
    return scores


def best_of(results: Results, most: int = MOST_SHOWN) -> Results:
    """The results of so many experiments, in their order: the best by the first metric, or the
    first ones where it is not known which value is better.
    """
    order = list(results.results)
    metric = next(iter(results.metrics), None)
    directions = {one.scores[metric].is_least_best for one in order if metric in one.scores}
    if metric is not None and directions in ({True}, {False}):
        sign = 1 if directions == {True} else -1
        order.sort(
            key=lambda one: sign * one.scores[metric].best if metric in one.scores else math.inf
        )
    chosen = {one.exp_id for one in order[:most]}
    return replace(results, results=tuple(one for one in results.results if one.exp_id in chosen))


def as_table(results: Results, *, width: int = 120) -> Table:
    """The results for a terminal: the best value of each metric, with the last one in brackets when
    it differs.

    Parameters, and scores of named validation sets (valid_NAME/...), that do not fit into `width`
    columns are omitted, and the caption says how many.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    bests = {name: best_value(results, name) for name in results.metrics}
    scores = [
        (
            _head(name),
            [_score_cell(each, name, bests[name]) for each in results.results],
        )
        for name in results.metrics
    ]
    scores.append(
        (
            Text("steps"),
            [Text("" if each.steps is None else str(each.steps)) for each in results.results],
        )
    )
    hours = [
        Text("" if each.wall_s is None else f"{each.wall_s / 3600:.2f}") for each in results.results
    ]
    scores.append((Text("hours"), hours))
    for head, name in SPEEDS.items():
        speeds: list[float | None] = [getattr(each, name) for each in results.results]
        if any(speed is not None for speed in speeds):
            cells = [Text("" if speed is None else number_text(speed)) for speed in speeds]
            scores.append((Text(head), cells))
    widths = [_width(head, cells) + GAP for head, cells in scores]
    room, num_scores = width - ID_WIDTH - GAP - sum(widths), len(scores)
    for place in reversed(range(len(results.metrics))):
        if room < 0 and not results.metrics[place].startswith("valid/"):  # scores of sets go first
            room += widths[place]
            del scores[place]
    num_hidden_scores = num_scores - len(scores)
    table.add_column("id", no_wrap=True)
    columns: list[list[Text]] = [[Text(each.exp_id[:ID_WIDTH]) for each in results.results]]
    for key, name in zip(results.parameters, short_names(results.parameters), strict=True):
        cells = [Text(_short(each.parameters, key)) for each in results.results]
        room -= _width(Text(visible(name)), cells) + GAP
        if room >= 0:
            table.add_column(Text(visible(name)), no_wrap=True)
            columns.append(cells)
    num_hidden = len(results.parameters) - len(columns) + 1
    for head, cells in scores:
        table.add_column(head, justify="right", no_wrap=True)
        columns.append(cells)
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    hidden = [f"{num_hidden} more parameters differ"] if num_hidden else []
    hidden += [f"{num_hidden_scores} more scores of named sets"] if num_hidden_scores else []
    if hidden:
        table.caption = f"{' and '.join(hidden)}: --csv, --json or --html shows all"
    return table


def unreadable_lines(results: Results) -> str:
    """A line for each experiment whose folder cannot be read, with the reason; "" without any."""
    return "".join(
        f"{exp_id[:ID_WIDTH]}: its folder cannot be read: {visible(reason)}\n"
        for exp_id, reason in results.unreadable.items()
    )


def refused_lines(results: Results) -> str:
    """A line for each experiment whose gate keeps its model back, with the reasons; "" without
    any.
    """
    refused = [(one.exp_id, one.refused) for one in results.results if one.refused is not None]
    return "".join(f"{exp_id[:ID_WIDTH]}: {visible(why)}\n" for exp_id, why in refused)


def _head(metric: str) -> Text:
    return Text(visible(metric).replace("/", "/\n", 1))


def _width(head: Text, cells: Sequence[Text]) -> int:
    return max(cell.cell_len for cell in (*head.split("\n"), *cells))


def best_value(results: Results, metric: str) -> float | None:
    """The best value of a metric among all experiments; None when fewer than two have one, or when
    it is not known which value is better.
    """
    scores = [result.scores[metric] for result in results.results if metric in result.scores]
    directions = {score.is_least_best for score in scores}
    if len(scores) < 2 or len(directions) > 1 or None in directions:
        return None
    values = [score.best for score in scores]
    return min(values) if scores[0].is_least_best else max(values)


def _short(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "–"
    text = visible(written(values[key]))
    return text if len(text) <= WIDEST_CELL else text[: WIDEST_CELL - 1] + "…"


def _score_cell(result: ExperimentScores, metric: str, best: float | None) -> Text:
    score = result.scores.get(metric)
    if score is None:
        return Text("–", style="dim")
    text = Text().append(number_text(score.best), style="bold green" if score.best == best else "")
    return (
        text
        if score.last == score.best
        else text.append(f" ({number_text(score.last)})", style="dim")
    )


def as_test_table(results: Results) -> Table | None:
    """The scores of the test split for a terminal, a line for each score of each experiment, with
    the ends of its interval; None where no experiment was tested.
    """
    tested = [(each, each.test) for each in results.results if each.test is not None]
    if not tested:
        return None
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    table.add_column("test split", no_wrap=True)
    table.add_column("id", no_wrap=True)
    names = short_names(results.parameters)[:MOST_BESIDE_TESTS]
    for name in names:
        table.add_column(visible(name), no_wrap=True)
    for head in ("score", "95% from", "to", "rows", "seconds"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("weights", no_wrap=True)
    for metric in results.test_metrics:
        best = best_test([test for _, test in tested], metric)
        of_metric = [(each, test) for each, test in tested if metric in test.scores]
        for place, (each, test) in enumerate(of_metric):
            score = test.scores[metric]
            ends = (number_text(end) if end is not None else "–" for end in (score.low, score.high))
            table.add_row(
                visible(metric.removeprefix("test/")) if place == 0 else "",
                each.exp_id[:ID_WIDTH],
                *(_short(each.parameters, key) for key in results.parameters[: len(names)]),
                Text(number_text(score.value), "bold green" if score.value == best else ""),
                *ends,
                "" if test.rows is None else f"{test.rows:,}",
                "" if test.seconds is None else f"{test.seconds:.1f}",
                visible(test.model),
            )
    return table


def as_csv(results: Results) -> str:
    """The results as CSV with whole ids and unrounded numbers.

    A text that a spreadsheet would run as a formula gets a ' in front.
    """
    heads = [
        head
        for name in results.metrics
        for head in (f"{name} best", f"{name} best step", f"{name} last")
    ]
    for name in results.test_metrics:
        heads += [name, f"{name} low", f"{name} high"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            _without_formula(head)
            for head in ("exp_id", "group", *results.parameters, *heads, *_RUN_HEADS)
        ]
    )
    for result in results.results:
        cells: list[Any] = [result.exp_id, result.group]
        for key in results.parameters:
            value = result.parameters.get(key, "")
            cells.append(value if type(value) in (int, float) else written(value))
        for name in results.metrics:
            score = result.scores.get(name)
            cells += (
                [score.best, score.best_step, score.last] if score is not None else ["", "", ""]
            )
        for name in results.test_metrics:
            of_test = result.test.scores.get(name) if result.test is not None else None
            cells += [of_test.value, of_test.low, of_test.high] if of_test is not None else [""] * 3
        cells += [result.steps, None if result.wall_s is None else round(result.wall_s, 1)]
        cells += [getattr(result, name) for name in SPEEDS.values()]
        writer.writerow([_without_formula(cell) for cell in cells])
    return out.getvalue()


def _without_formula(cell: Any) -> Any:
    """`cell` with a quote in front if a spreadsheet would read it as a formula.

    Control characters become visible; numbers stay as they are.
    """
    if not isinstance(cell, str):
        return cell
    text = visible(cell)
    return f"'{text}" if text.lstrip(" ").startswith(FORMULA) else text


def as_json(results: Results) -> list[dict[str, Any]]:
    """The results as plain dictionaries, with the differing hyper-parameters only. An experiment
    whose folder cannot be read has a `read_error`.
    """
    documents: list[dict[str, Any]] = [
        {
            "exp_id": result.exp_id,
            "group": result.group,
            "parameters": {
                key: result.parameters[key]
                for key in results.parameters
                if key in result.parameters
            },
            "metrics": {name: vars(score) for name, score in result.scores.items()},
            "test": None if result.test is None else result.test.plain(),
            "refused": result.refused,
            "operations": result.operations and result.operations.shown(),
            "steps": result.steps,
            "wall_s": result.wall_s,
            **{name: getattr(result, name) for name in SPEEDS.values()},
            "read_error": None,
        }
        for result in results.results
    ]
    nothing: dict[str, Any] = {"group": "", "parameters": {}, "metrics": {}, "test": None}
    nothing |= {"refused": None, "operations": None}
    nothing |= dict.fromkeys(_RUN_HEADS)
    return documents + [
        {"exp_id": exp_id, **nothing, "read_error": reason}
        for exp_id, reason in results.unreadable.items()
    ]
