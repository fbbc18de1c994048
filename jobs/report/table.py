"""The status of many experiments on a terminal, in a log and as JSON."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jobs.job_state import ENDED_BADLY, STATES, JobState
from jobs.report.operations import as_operations_table, totals_or_none
from jobs.report.text import duration, number_text, visible

if TYPE_CHECKING:
    from jobs.record.row import Row

COLOURS: dict[JobState, str] = {
    "pending": "dim",
    "submitting": "blue",
    "submitted": "blue",
    "queued": "blue",
    "running": "cyan",
    "held": "yellow",
    "succeeded": "green",
    "failed": "red",
    "timeout": "red",
    "oom": "red",
    "preempted": "yellow",
    "cancelled": "magenta",
    "paused": "yellow",
    "lost": "red",
}
MOST = 200  # lines of the table when nobody watches it
# The states that come first when not all experiments fit on the screen.
URGENT: tuple[JobState, ...] = ("held", "lost", "failed", "oom", "timeout", "running", "preempted")
WRONG: tuple[JobState, ...] = ("held", *ENDED_BADLY)
BAR = 8
GAP = 2  # between columns
LONGEST_NAME = 16  # of a group or a metric
LONGEST_DIFFERENCE = 40  # of the name that tells an experiment from the others of its group
# Widths of the last column: a layout is used when it leaves so much, and the column has so much
# at least.
ENOUGH, NARROWEST = 18, 10
LONGEST_REASON, MOST_REASONS = 500, 8
AROUND = 7  # lines of the screen for the head, the summary and the prompt


@dataclass(frozen=True)
class _Layout:
    """Which of the optional columns a table has."""

    has_groups: bool = False
    has_names: bool = False
    has_bars: bool = False
    has_steps: bool = False
    has_hours: bool = False
    has_scores: bool = True


LAYOUTS = (
    _Layout(has_groups=True, has_bars=True, has_steps=True, has_hours=True),
    _Layout(has_groups=True, has_steps=True, has_hours=True),
    _Layout(has_bars=True, has_steps=True, has_hours=True),
    _Layout(has_steps=True, has_hours=True),
    _Layout(),
    _Layout(has_scores=False),
)
# Layouts with the column of names come before those with bars and hours.
NAMED = (
    *(replace(layout, has_names=True) for layout in LAYOUTS if layout.has_groups),
    *(replace(layout, has_names=True) for layout in LAYOUTS[3:]),
)


def table(rows: Sequence[Row], *, width: int = 100) -> Table:
    """One line for each experiment, `width` wide. It cuts long reasons; `reasons` prints them
    whole.
    """
    # "valid/loss", or else the evaluation metric that most rows have
    names = Counter(name for row in rows for name in row.metrics if "/" in name)
    metric = min(names, key=lambda name: (-names[name], name), default=None)
    if "valid/loss" in names:
        metric = "valid/loss"
    fits = [
        columns
        for layout in ((*NAMED, *LAYOUTS) if any(row.name for row in rows) else LAYOUTS)
        if _room(columns := _columns(rows, layout, metric), width) >= ENOUGH
    ]
    columns = fits[0] if fits else _columns(rows, LAYOUTS[-1], metric)
    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for cells in columns:
        side: Literal["left", "right"] = (
            "left" if cells[0].plain in ("id", "group", "name", "state", "step") else "right"
        )
        grid.add_column(cells[0], no_wrap=True, justify=side, width=_widest(cells))
    room = max(_room(columns, width), NARROWEST)
    grid.add_column("where, why", no_wrap=True, overflow="ellipsis", max_width=room)
    for place, row in enumerate(rows, 1):
        grid.add_row(*(cells[place] for cells in columns), _where(row))
    return grid


def _widest(cells: Sequence[Text]) -> int:
    return max(cell.cell_len for cell in cells)


def _room(columns: Sequence[Sequence[Text]], width: int) -> int:
    """The width that remains for the last column beside these."""
    return width - sum(_widest(cells) + GAP for cells in columns)


def _columns(rows: Sequence[Row], layout: _Layout, metric: str | None) -> list[list[Text]]:
    """The cells of every column but the last. The first cell of each is its head."""
    columns = [[Text("id"), *(Text(row.exp_id[:8]) for row in rows)]]
    if layout.has_groups and len({row.group for row in rows}) > 1:
        columns.append([Text("group"), *(_cut(row.group) for row in rows)])
    if layout.has_names:
        columns.append([Text("name"), *(_cut(row.name, LONGEST_DIFFERENCE) for row in rows)])
    columns += [
        [Text("state"), *map(_state, rows)],
        [Text("step"), *(_progress(row, layout) for row in rows)],
        [Text("loss"), *(_metric(row, "loss") for row in rows)],
    ]
    if layout.has_scores:
        tries = [Text("try")]
        for row in rows:
            text = Text(str(row.attempts) if row.attempts else "")
            if row.preemptions:
                text.append(f" ↻{row.preemptions}", style="yellow")
            tries.append(text)
        columns += [
            [_cut(metric or "valid"), *(_metric(row, metric) for row in rows)],
            [
                Text("left"),
                *(Text("" if row.eta_s is None else duration(row.eta_s)) for row in rows),
            ],
            tries,
        ]
    if layout.has_hours:
        columns.append(
            [
                Text("GPU-h"),
                *(Text(f"{row.gpu_hours:.1f}" if row.gpu_hours else "") for row in rows),
            ]
        )
    return columns


def _cut(text: str, longest: int = LONGEST_NAME) -> Text:
    cell = Text(visible(text))
    cell.truncate(longest, overflow="ellipsis")
    return cell


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table, all reasons in full, the operations of driven runs, and the summary.

    The table shows at most MOST experiments; the urgent ones come first when there are more.
    """
    visible_rows = _most_urgent(rows, MOST)
    if visible_rows:
        console.print(table(visible_rows, width=console.width))
        console.print()
        console.print(reasons(visible_rows), end="")
        of_driven = [(row.exp_id, totals_or_none(Path(row.folder))) for row in visible_rows]
        operations = as_operations_table(of_driven)
        if operations is not None:
            console.print(operations)
            console.print()
    if len(visible_rows) < len(rows):
        console.print(
            f"{len(rows) - len(visible_rows)} more are not shown: --json lists all.", style="dim"
        )
    console.print(Text(summary(rows)))


def summary(rows: Sequence[Row]) -> str:
    """Counts by state, GPU-hours, and backends that do not answer: "31 succeeded, 1 held; 2.5
    GPU-hours".
    """
    if not rows:
        return "no experiments"
    counts = Counter(row.state for row in rows)
    order = ("succeeded", "running", *STATES)
    words = [
        ", ".join(f"{counts[state]} {state}" for state in dict.fromkeys(order) if counts[state])
    ]
    if hours := sum(row.gpu_hours for row in rows):
        words.append(f"{hours:.1f} GPU-hours")
    unseen = Counter(row.backend or "" for row in rows if row.unseen_since)
    words += [
        f"{name} cannot be reached: {count} may have moved on"
        for name, count in sorted(unseen.items())
    ]
    return "; ".join(words)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain dictionaries."""
    return [asdict(row) for row in rows]


def watch(
    make_rows: Callable[[], Sequence[Row]], every_s: float, *, console: Console | None = None
) -> None:
    """Show the table again every `every_s` seconds, until every experiment has ended or ctrl-c.

    Without a terminal it prints the whole table again whenever a state has changed.
    """
    screen = console or Console()
    try:
        if screen.is_terminal:
            _watch_live(make_rows, every_s, screen)
        else:
            _watch_plain(make_rows, every_s, screen)
    except KeyboardInterrupt:
        screen.print("(left; the jobs go on)", style="dim")


def _watch_live(make_rows: Callable[[], Sequence[Row]], every_s: float, screen: Console) -> None:
    with Live(console=screen, auto_refresh=False, transient=True) as live:
        rows = make_rows()
        while _goes_on(rows):
            live.update(_screen(rows, screen, every_s=every_s), refresh=True)
            time.sleep(every_s)
            rows = make_rows()
    show(rows, screen)


def _watch_plain(make_rows: Callable[[], Sequence[Row]], every_s: float, screen: Console) -> None:
    before: dict[str, str] | None = None
    while True:
        rows = make_rows()
        states: dict[str, str] = {row.exp_id: row.state for row in rows}
        if states != before:
            show(rows, screen)
        before = states
        if not _goes_on(rows):
            return
        time.sleep(every_s)


def _goes_on(rows: Sequence[Row]) -> bool:
    return any(row.is_live or row.state in ("pending", "preempted") for row in rows)


def _screen(rows: Sequence[Row], screen: Console, *, every_s: float) -> RenderableType:
    """The table, summary and footer, with the urgent experiments only when not all fit."""
    room = max(screen.height - AROUND, 3)
    visible_rows = _most_urgent(rows, room)
    hidden_note = (
        f"{len(rows) - len(visible_rows)} more are not shown. "
        if len(visible_rows) < len(rows)
        else ""
    )
    foot = Text(f"{hidden_note}Every {every_s:.0f} s; ctrl-c leaves.", style="dim")
    return Group(table(visible_rows, width=screen.width), Text(""), Text(summary(rows)), foot)


def _most_urgent(rows: Sequence[Row], count: int) -> Sequence[Row]:
    """All rows in their order when there are at most `count`; else the `count` most urgent."""
    if len(rows) <= count:
        return rows
    order = list(dict.fromkeys((*URGENT, *STATES)))
    return sorted(rows, key=lambda row: order.index(row.state))[:count]


def _state(row: Row) -> Text:
    text = Text(row.state, style=COLOURS[row.state])
    return text.append("?", style="bold yellow") if row.unseen_since else text


def _progress(row: Row, layout: _Layout) -> Text:
    if row.step is None:
        return Text("")
    if not row.total:
        return Text(str(row.step))
    share = min(row.step / row.total, 1.0)
    text = Text()
    if layout.has_bars:
        full = int(share * BAR)
        text.append("━" * full, style=COLOURS[row.state]).append(
            "╌" * (BAR - full), style="dim"
        ).append(" ")
    text.append(f"{share:4.0%}")
    return text.append(f" {row.step}/{row.total}", style="dim") if layout.has_steps else text


def _metric(row: Row, name: str | None) -> Text:
    return Text(number_text(row.metrics[name]) if name in row.metrics else "")


def _where(row: Row) -> Text:
    """The problem of an experiment, or its host when there is none."""
    why = _why(row)
    if why:
        return Text(why, style=COLOURS[row.state])
    text = f"{row.host}, by hand" if row.by_hand else row.host or ""
    lost = len(row.recoveries)
    text += f", {lost} recover{'ies' if lost > 1 else 'y'}" if lost else ""
    return Text(visible(text), style="dim")


def _why(row: Row) -> str:
    """The problem of an experiment, or what it waits for, on one line; "" for neither."""
    if row.unseen_since:
        text = f"not seen since {row.unseen_since[11:16]} UTC: {row.unseen_reason}"
    else:
        text = (row.reason or "") if row.state != "succeeded" else ""
    return visible(" ".join(text.split()))


def reasons(rows: Sequence[Row]) -> Text:
    """Every reason in full, one line each, with the experiments that have it."""
    wrong: dict[tuple[JobState, str], list[str]] = {}
    for row in rows:
        if (row.state in WRONG or row.unseen_since) and (why := _why(row)):
            wrong.setdefault((row.state, why), []).append(row.exp_id[:8])
    text = Text()
    for (state, why), ids in list(wrong.items())[:MOST_REASONS]:
        others = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
        why = why if len(why) <= LONGEST_REASON else why[: LONGEST_REASON - 1] + "…"
        text.append(f"{', '.join(ids[:3])}{others}: ", style="bold").append(
            f"{why}\n", style=COLOURS[state]
        )
    if len(wrong) > MOST_REASONS:
        text.append(f"and {len(wrong) - MOST_REASONS} more reasons\n", style="dim")
    return text
