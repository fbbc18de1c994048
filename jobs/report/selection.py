"""How commands read their arguments (experiments, states, intervals) and print their results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from jobs.backends import BackendCache
from jobs.errors import NothingMatched, SomeFailed, Unreachable
from jobs.job_state import ACTIVE, STATES, JobState
from jobs.record.paths import BaseFolder
from jobs.record.status import survey
from jobs.report.text import printable
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from jobs.record.row import Row
    from jobs.submit.request import ActionResult


MOST_IDS = 8  # in one message


def rows(
    base: Path, group: str | None, *, by_hand: bool = False, exp_configs: Path | None = None
) -> list[Row]:
    """The state of every submitted experiment in a folder, or of those of one group.

    by_hand: also experiments that were run without being submitted. Their record names no group:
    they belong to `group` when their dictionary is in that group of `exp_configs` (None: the
    built-in file).
    """
    folder = BaseFolder(base.absolute())
    all_rows = survey(folder, backend_of=BackendCache(), include_unsubmitted=by_hand)
    if group is None:
        return all_rows
    of_group = members(group, exp_configs) if any(row.by_hand for row in all_rows) else set[str]()
    return [
        row for row in all_rows if row.group == group or (row.by_hand and row.exp_id in of_group)
    ]


def members(group: str | None, exp_configs: Path | None) -> set[str]:
    """Ids of a group's experiments; none when the built-in file lacks the group: then it was
    submitted from another file, which need not be named again. None: of no group.
    """
    if group is None:
        return set()
    from exp_configs import experiments_of  # a hundred dictionaries, which few commands need
    from trainer.config.identity import exp_id

    try:
        return {exp_id(values) for values in experiments_of(group, exp_configs, None)}
    except ConfigError:
        if exp_configs is not None:
            raise
        return set()


def select_rows(
    base: Path, ids: Sequence[str] | None, group: str | None, *, is_all: bool = False
) -> list[Row]:
    """The rows that ids or a group name. A run by hand must be named by its id. ConfigError when
    neither is given, NothingMatched when nothing matches.
    """
    if not ids and group is None and not is_all:
        raise ConfigError("name experiments: their ids, or -e GROUP.")
    matches = rows(base, group, by_hand=bool(ids) and group is None)
    if ids:
        named_rows = [match(matches, text) for text in ids]
        matches = list({row.exp_id: row for row in named_rows}.values())
    if not matches:
        raise NothingMatched(f"{base} holds no submitted experiment of {group or 'any group'}.")
    return matches


def one(base: Path, text: str) -> Row:
    """The one row of a folder whose id begins with `text`."""
    return match(rows(base, None, by_hand=True), text)


def match(rows: Sequence[Row], text: str) -> Row:
    """The one row whose id begins with `text`. NothingMatched when there is none, ConfigError when
    there are several.
    """
    matches = [row for row in rows if text and row.exp_id.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        of_group = [row.exp_id[:8] for row in rows if text and row.group == text]
        if of_group:
            raise NothingMatched(
                f"{text!r} is a group, and one experiment is wanted. Its ids begin with "
                f"{', '.join(of_group[:MOST_IDS])}{', ...' if len(of_group) > MOST_IDS else ''}."
            )
        raise NothingMatched(
            f"{text!r}: no experiment has an id that begins so. `status` lists them."
        )
    raise ConfigError(
        f"{text!r}: {len(matches)} ids begin so ({', '.join(row.exp_id[:12] for row in matches)}). "
        "Give more."
    )


def refuse_by_hand(rows: Iterable[Row], command: str) -> None:
    """Return if all of these were submitted. ConfigError names those that were started by hand."""
    strays = [
        f"{row.exp_id} was started by hand on {row.host} and never submitted."
        for row in rows
        if row.by_hand
    ]
    if strays:
        cure = "Stop it there" if command == "cancel" else "Run it again there, or submit its group"
        raise ConfigError("\n".join([*strays, f"{command}: nothing is done. {cure}."]))


def refuse_live(rows: Iterable[Row]) -> None:
    """Return if none of these is alive, so that their folders may be moved. ConfigError names those
    that are.
    """
    live = [
        f"{row.exp_id} is {row.state} as {row.job_id}. `cancel` it first."
        if row.history
        else f"{row.exp_id} is running on {row.host}, started by hand. Stop it there first."
        for row in rows
        if (row.state in ACTIVE if row.history else row.state == "running")
    ]
    if live:
        raise ConfigError("\n".join(live))


def states(text: str) -> list[JobState]:
    """The states that a comma-separated text names."""
    names = [word for word in text.split(",") if word]
    wrong = [name for name in names if name not in STATES]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)}: no such state. States: {', '.join(STATES)}")
    return cast("list[JobState]", names)


def seconds(text: str) -> float:
    """Seconds of a text such as 30s, 5m or 2h: more than 0, at most a year."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        value = float(number) * units[unit]
    except ValueError:
        value = 0.0
    if not 0 < value <= 366 * 24 * 3600:
        raise ConfigError(
            f"--every {text!r}: want a number of seconds above 0, or one with s, m or h: 30s."
        )
    return value


def show(
    results: Sequence[ActionResult],
    as_json: bool,
    *,
    rendered: Mapping[str, str] | None = None,
    is_line: bool = False,
) -> None:
    """Print the action that was taken for each experiment.

    rendered: id -> the text that the scheduler gets. is_line: write the JSON in one line.
    """
    if as_json:
        documents = [vars(result) for result in results]
        if rendered is not None:
            documents = [{**values, "rendered": rendered[values["exp_id"]]} for values in documents]
        typer.echo(json.dumps(documents, indent=None if is_line else 1))
        return
    for result in results:
        typer.echo(printable(f"{result.exp_id}  {result.action:<7} {result.text}"))
    for text in (rendered or {}).values():
        typer.echo(text)


def fail_if_any(results: Sequence[ActionResult]) -> None:
    """Raise the error of the command's exit code if something failed for some experiment."""
    bad = [result for result in results if result.is_bad]
    if not bad:
        return
    if all(result.action == "settle" or result.is_unanswered for result in bad):
        raise Unreachable(
            f"{len(bad)} of {len(results)} got no answer: run the same command again, nothing is "
            "sent twice."
        )
    raise SomeFailed(f"{len(bad)} of {len(results)} were not dealt with: see above.")


def details(row: Row) -> str:
    """Everything that is known of one experiment, as lines of text."""
    lines = [
        f"{row.exp_id}  {row.state}" + (f": {row.reason}" if row.reason else ""),
        f"folder    {row.folder}",
    ]
    lines.append(f"group     {row.group}")
    if row.name:
        lines.append(f"name      {row.name}")
    if row.by_hand:
        lines.append(f"by hand   never submitted; on {row.host}, last seen {row.created_at}")
    if row.total:
        lines.append(f"step      {row.step or 0} of {row.total}")
    lines += [f"          {name} {value:.6g}" for name, value in row.metrics.items()]
    for attempt in row.history:
        where = f"{attempt.backend} {attempt.id or '(no id yet)'}" + (
            f", part {attempt.index} of {attempt.name}" if attempt.index is not None else ""
        )
        why = f": {attempt.reason}" if attempt.reason else ""
        lines.append(
            f"attempt {attempt.number}  {attempt.state}{why}  ({where}, sent {attempt.at[:19]})"
        )
        for start in (start for start in row.starts if start.attempt == attempt.number):
            when = f"{start.began_at[:19]} to {start.ended_at[:19]}"
            lines.append(f"  start {start.number}  {when} on {start.host}, code {start.code}")
    if row.unseen_since:
        lines.append(f"unseen    since {row.unseen_since[:19]}: {row.unseen_reason}")
    if row.sync_hint:
        lines.append(f"wandb     {row.sync_hint}")
    return printable("\n".join(lines))
