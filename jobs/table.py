"""The status of many experiments on a terminal, in a log and as JSON."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jobs.logs import visible
from jobs.results import shown
from jobs.spec import ACTIVE, ENDED_BADLY, JobState
from jobs.status import STATES, Row

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
URGENT: tuple[JobState, ...] = ("held", "lost", "failed", "oom", "timeout", "running", "preempted")
WRONG: tuple[JobState, ...] = ("held", *ENDED_BADLY)
WIDE = 100  # columns; below, group and GPU-hours are left out
BAR = 8
GAP = 2  # between columns
LONGEST_NAME = 16  # of a group or a metric
NARROWEST = 10  # the last column
LONGEST_REASON, MOST_REASONS = 500, 8
AROUND = 7  # lines of the screen that the head, the summary and the prompt take


def table(rows: Sequence[Row], *, width: int = WIDE) -> Table:
    """One line for each experiment, for a terminal of `width` columns; `reasons` says in full what it cuts."""
    is_wide = width >= WIDE
    metric = _main_metric(rows)
    has_groups = is_wide and len({row.group for row in rows}) > 1
    left = ["id", *(["group"] if has_groups else []), "state", "step"]
    right = ["loss", visible(metric or "valid")[:LONGEST_NAME], "left", "try", *(["GPU-h"] if is_wide else [])]
    lines: list[list[Text]] = []
    for row in rows:
        line = [Text(row.exp_id[:8]), *([_cut(row.group)] if has_groups else []), _state(row)]
        line += [_progress(row, is_wide=is_wide), _metric(row, "loss"), _metric(row, metric), _left(row), _tries(row)]
        line += [Text(f"{row.gpu_hours:.1f}" if row.gpu_hours else "")] if is_wide else []
        lines.append([*line, _where(row)])
    found = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    room = width
    for place, name in enumerate([*left, *right]):
        widest = max([len(name), *(line[place].cell_len for line in lines)])
        room -= widest + GAP
        found.add_column(Text(name), no_wrap=True, justify="right" if name in right else "left", width=widest)
    found.add_column("where, why", no_wrap=True, overflow="ellipsis", max_width=max(room, NARROWEST))
    for line in lines:
        found.add_row(*line)
    return found


def _cut(text: str) -> Text:
    found = Text(visible(text))
    found.truncate(LONGEST_NAME, overflow="ellipsis")
    return found


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table, what is wrong in full, and the summary."""
    if rows:
        console.print(table(rows, width=console.width))
        console.print()
        console.print(reasons(rows), end="")
    console.print(Text(summary(rows)))


def summary(rows: Sequence[Row]) -> str:
    """How many are in which state: "31 succeeded, 2 running, 1 held"; then GPU-hours, and what cannot be seen."""
    if not rows:
        return "no experiments"
    counts = Counter(row.state for row in rows)
    order = ("succeeded", "running", *STATES)
    words = [", ".join(f"{counts[state]} {state}" for state in dict.fromkeys(order) if counts[state])]
    if hours := sum(row.gpu_hours for row in rows):
        words.append(f"{hours:.1f} GPU-hours")
    unseen = Counter(row.backend or "" for row in rows if row.unseen_since)
    words += [f"{name} cannot be reached: {count} may have moved on" for name, count in sorted(unseen.items())]
    return "; ".join(words)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain dictionaries."""
    return [asdict(row) for row in rows]


def watch(make_rows: Callable[[], Sequence[Row]], every_s: float, *, console: Console | None = None) -> None:
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
    chosen = rows
    if len(rows) > room:
        order = list(dict.fromkeys((*URGENT, *STATES)))
        chosen = sorted(rows, key=lambda row: order.index(row.state))[:room]
    left_out = f"{len(rows) - len(chosen)} more are not shown. " if len(chosen) < len(rows) else ""
    foot = Text(f"{left_out}Every {every_s:.0f} s; ctrl-c leaves.", style="dim")
    return Group(table(chosen, width=screen.width), Text(""), Text(summary(rows)), foot)


def _main_metric(rows: Sequence[Row]) -> str | None:
    names = Counter(name for row in rows for name in row.metrics if "/" in name)
    return "valid/loss" if "valid/loss" in names else min(names, key=lambda name: (-names[name], name), default=None)


def _state(row: Row) -> Text:
    text = Text(row.state, style=COLOURS[row.state])
    return text.append("?", style="bold yellow") if row.unseen_since else text


def _progress(row: Row, *, is_wide: bool) -> Text:
    if row.step is None:
        return Text("")
    if not row.total:
        return Text(str(row.step))
    share = min(row.step / row.total, 1.0)
    text = Text(f"{row.step}/{row.total} ", end="")
    if is_wide:
        full = round(share * BAR)
        text.append("━" * full, style=COLOURS[row.state]).append("━" * (BAR - full), style="grey37")
        text.append(" ")
    return text.append(f"{share:4.0%}")


def _metric(row: Row, name: str | None) -> Text:
    return Text(shown(row.metrics[name]) if name in row.metrics else "")


def _left(row: Row) -> Text:
    return Text(duration(row.eta_s) if row.eta_s is not None else "")


def _tries(row: Row) -> Text:
    text = Text(str(row.attempts) if row.attempts else "")
    return text.append(f"+{row.preemptions}p", style="yellow") if row.preemptions else text


def _where(row: Row) -> Text:
    """The host while all is well; otherwise what is wrong."""
    why = _why(row)
    return Text(why, style=COLOURS[row.state]) if why else Text(visible(row.host or ""), style="dim")


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
        text.append(f"{', '.join(ids[:3])}{others}: ", style="bold").append(f"{why}\n", style=COLOURS[state])
    if len(wrong) > MOST_REASONS:
        text.append(f"and {len(wrong) - MOST_REASONS} more reasons\n", style="dim")
    return text


def duration(seconds: float) -> str:
    """Seconds as one reads them: 45 s, 12 min, 3 h 05, 2 d 4 h."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d}" if hours < 24 else f"{hours // 24} d {hours % 24} h"
