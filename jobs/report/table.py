"""The status of many experiments on a terminal, in a log and as JSON."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jobs.job_state import ACTIVE, ENDED_BADLY, STATES, JobState
from jobs.report.text import duration, shown, visible

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
    "lost": "red",
}
# What a person wants to see first where not all fits on the screen.
MOST = 200  # lines that anybody reads
URGENT: tuple[JobState, ...] = ("held", "lost", "failed", "oom", "timeout", "running", "preempted")
WRONG: tuple[JobState, ...] = ("held", *ENDED_BADLY)
BAR = 8
GAP = 2  # between columns
LONGEST_NAME = 16  # of a group or a metric
LONGEST_DIFFERENCE = 40  # of what tells an experiment from its siblings
ENOUGH, NARROWEST = (
    18,
    10,
)  # of the last column: what a layout must leave for it, and what it always has
LONGEST_REASON, MOST_REASONS = 500, 8
AROUND = 7  # lines of the screen that the head, the summary and the prompt take


@dataclass(frozen=True)
class _Layout:
    """Which columns there are besides those that always are."""

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
# What tells siblings apart is worth more than bars and hours.
NAMED = (
    *(replace(layout, has_names=True) for layout in LAYOUTS if layout.has_groups),
    *(replace(layout, has_names=True) for layout in LAYOUTS[3:]),
)


def table(rows: Sequence[Row], *, width: int = 100) -> Table:
    """One line for each experiment, `width` columns wide; `reasons` says in full what it cuts."""
    metric = _main_metric(rows)
    fits = [
        columns
        for layout in ((*NAMED, *LAYOUTS) if any(row.name for row in rows) else LAYOUTS)
        if _room(columns := _columns(rows, layout, metric), width) >= ENOUGH
    ]
    columns = fits[0] if fits else _columns(rows, LAYOUTS[-1], metric)
    found = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for cells in columns:
        side: Literal["left", "right"] = (
            "left" if cells[0].plain in ("id", "group", "name", "state", "step") else "right"
        )
        found.add_column(cells[0], no_wrap=True, justify=side, width=_widest(cells))
    room = max(_room(columns, width), NARROWEST)
    found.add_column("where, why", no_wrap=True, overflow="ellipsis", max_width=room)
    for place, row in enumerate(rows, 1):
        found.add_row(*(cells[place] for cells in columns), _where(row))
    return found


def _widest(cells: Sequence[Text]) -> int:
    return max(cell.cell_len for cell in cells)


def _room(columns: Sequence[Sequence[Text]], width: int) -> int:
    """What these columns leave of `width` for the last one."""
    return width - sum(_widest(cells) + GAP for cells in columns)


def _columns(rows: Sequence[Row], layout: _Layout, metric: str | None) -> list[list[Text]]:
    """The cells of every column but the last, each with its head first."""
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
        columns += [
            [_cut(metric or "valid"), *(_metric(row, metric) for row in rows)],
            [Text("left"), *map(_left, rows)],
            [Text("try"), *map(_tries, rows)],
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
    found = Text(visible(text))
    found.truncate(longest, overflow="ellipsis")
    return found


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table, what is wrong in full, and the summary of all.

    The table is of MOST experiments, urgent ones first.
    """
    shown = _most_urgent(rows, MOST)
    if shown:
        console.print(table(shown, width=console.width))
        console.print()
        console.print(reasons(shown), end="")
    if len(shown) < len(rows):
        console.print(
            f"{len(rows) - len(shown)} more are not shown: --json tells of all.", style="dim"
        )
    console.print(Text(summary(rows)))


def summary(rows: Sequence[Row]) -> str:
    """How many are in which state: "31 succeeded, 2 running, 1 held".

    Then GPU-hours, and what cannot be seen.
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
    """Show the table anew every `every_s` seconds until all is decided, or ctrl-c.

    Without a terminal: the whole table, again when a state has changed.
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
    return any(row.state in ACTIVE or row.state in ("pending", "preempted") for row in rows)


def _screen(rows: Sequence[Row], screen: Console, *, every_s: float) -> RenderableType:
    """As much as fits: the urgent ones when not all do."""
    room = max(screen.height - AROUND, 3)
    chosen = _most_urgent(rows, room)
    left_out = f"{len(rows) - len(chosen)} more are not shown. " if len(chosen) < len(rows) else ""
    foot = Text(f"{left_out}Every {every_s:.0f} s; ctrl-c leaves.", style="dim")
    return Group(table(chosen, width=screen.width), Text(""), Text(summary(rows)), foot)


def _most_urgent(rows: Sequence[Row], count: int) -> Sequence[Row]:
    """All rows as they stand when there are no more than `count`.

    Else those that a person wants to see first.
    """
    order = list(dict.fromkeys((*URGENT, *STATES)))
    return (
        rows if len(rows) <= count else sorted(rows, key=lambda row: order.index(row.state))[:count]
    )


def _main_metric(rows: Sequence[Row]) -> str | None:
    names = Counter(name for row in rows for name in row.metrics if "/" in name)
    return (
        "valid/loss"
        if "valid/loss" in names
        else min(names, key=lambda name: (-names[name], name), default=None)
    )


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
    return Text(shown(row.metrics[name]) if name in row.metrics else "")


def _left(row: Row) -> Text:
    return Text(duration(row.eta_s) if row.eta_s is not None else "")


def _tries(row: Row) -> Text:
    text = Text(str(row.attempts) if row.attempts else "")
    return text.append(f" ↻{row.preemptions}", style="yellow") if row.preemptions else text


def _where(row: Row) -> Text:
    """The host while all is well; otherwise what is wrong."""
    why = _why(row)
    if why:
        return Text(why, style=COLOURS[row.state])
    text = f"{row.host}, by hand" if row.by_hand else row.host or ""
    lost = len(row.recoveries)
    text += f", {lost} recover{'ies' if lost > 1 else 'y'}" if lost else ""
    return Text(visible(text), style="dim")


def _why(row: Row) -> str:
    """What is wrong, or what it waits for, on one line; "" when there is nothing to say."""
    if row.unseen_since:
        text = f"not seen since {row.unseen_since[11:16]} UTC: {row.unseen_reason}"
    else:
        text = (row.reason or "") if row.state != "succeeded" else ""
    return visible(" ".join(text.split()))


def reasons(rows: Sequence[Row]) -> Text:
    """What is wrong with which experiments, in full: one line for each thing that is wrong."""
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
