"""Copies the runs of a folder into the index, including those that were started by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.errors import for_client, reason_of
from jobs.record.row import experiment_of
from jobs.record.status import survey
from jobs.report.scores import best_scores
from jobs.report.table import as_json
from jobs.report.text import plain
from jobs.serve.live.cards import run_card
from trainer.config.differences import names_by_difference

if TYPE_CHECKING:
    from jobs.protocol import Backend
    from jobs.record.paths import BaseFolder
    from jobs.record.row import Row
    from jobs.serve.index import Index


def update_index(
    index: Index,
    base: BaseFolder,
    backend_of: Callable[[str], Backend],
    due: Collection[str],
    again: Collection[str],
) -> dict[str, str]:
    """Write those of the runs `due` that have changed to the index; returns those that cannot be
    read whole now, and why. again: ids of runs that are read whether or not they have changed.
    """
    indexed = index.run_marks(due)
    marks = {
        run.path.name: " ".join(map(mark, (run.record, run.status, run.metrics)))
        for run in map(base.run, sorted(due))
    }
    changed = [name for name in marks if name in again or marks[name] != indexed.get(name)]
    if not changed:
        return {}
    rows = survey(
        base,
        only=changed,
        backend_of=backend_of,
        record_changes=False,
        include_unsubmitted=True,
    )
    names, entries = index.names(changed), list[dict[str, Any]]()
    problems = {row.exp_id: row.reason or "" for row in rows if row.read_error is not None}
    for row in rows:
        experiment, scores = {}, {}
        if row.read_error is None:
            try:
                experiment = experiment_of(base.run(row.exp_id)) or {}
                scores = best_scores(base.run(row.exp_id), experiment)
            except Exception as error:  # of any kind: one run must not hide the others
                problems[row.exp_id] = reason_of(error, base.run(row.exp_id).path)
        own_row = row if row.by_hand else replace(row, name=names.get(row.exp_id, ("", ""))[1])
        reason = for_client(row.reason or "", base.path)
        card = run_card(replace(own_row, reason=reason), scores, experiment)
        entries.append(_entry(own_row, card, experiment, marks[row.exp_id]))
    index.write_runs(entries)
    # every run of a group with a new run is named after the values that distinguish it
    groups = {row.exp_id: row.group for row in rows if not row.by_hand}
    was_in = {name: group for name, (group, _) in names.items()}
    for group in {one for name, one in groups.items() if was_in.get(name) != plain(one)}:
        experiments = index.experiments_of(group)
        differences = names_by_difference([json.loads(text) for text in experiments.values()])
        index.write_names(dict(zip(experiments, differences, strict=True)))
    return problems


def _entry(
    row: Row, card: Mapping[str, Any], experiment: Mapping[str, Any], facts: str
) -> dict[str, Any]:
    """The index's row of a run."""
    (body,) = as_json([row])
    return {
        "exp_id": row.exp_id,
        "facts": facts,
        "state": row.state,
        "group": plain(row.group),
        "name": plain(row.name),
        "experiment": json.dumps(plain(experiment)),
        "card": json.dumps(plain(card)),
        "body": json.dumps(plain(body)),
        "created": plain(row.created_at or ""),
    }


def mark(path: Path) -> str:
    """A text that changes whenever the file changes."""
    try:
        facts = path.stat()
    except OSError:
        return "-"
    return f"{facts.st_mtime_ns:x}.{facts.st_size:x}"
