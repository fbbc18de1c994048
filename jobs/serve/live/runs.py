"""The runs of a folder as the index holds them, those that were started by hand too."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.job_state import ACTIVE
from jobs.record.status import survey
from jobs.report.table import as_json
from jobs.serve.live.cards import run_card
from trainer.config.differences import told_apart
from trainer.files.atomic import read_json

if TYPE_CHECKING:
    from jobs.protocol import Backend
    from jobs.record.paths import BaseFolder
    from jobs.record.row import Row
    from jobs.serve.index import Index


def take_in(index: Index, base: BaseFolder, backend_of: Callable[[str], Backend]) -> None:
    """Read the runs that may have changed, and forget those whose folder is gone."""
    known, live = index.known_runs(), index.live_runs(ACTIVE)
    marks = {
        run.path.name: " ".join(map(mark, (run.record, run.status, run.metrics)))
        for run in base.runs()
    }
    index.drop_runs(known.keys() - marks.keys())
    changed = [name for name in marks if name in live or marks[name] != known.get(name)]
    if not changed:
        return
    rows = survey(
        base,
        only=changed,
        backend_of=backend_of,
        record_changes=False,
        include_unsubmitted=True,
    )
    names = index.names()
    index.put_runs(_entry(row, base, names, marks[row.exp_id]) for row in rows)
    _tell_apart(index, {row.group for row in rows if not row.by_hand and row.exp_id not in names})


def _entry(row: Row, base: BaseFolder, names: dict[str, str], facts: str) -> dict[str, Any]:
    """A run as the index takes it. What tells it from its siblings is known of all of them only."""
    if not row.by_hand:
        row = replace(row, name=names.get(row.exp_id, ""))
    folder = base.run(row.exp_id)
    experiment = read_json(folder.exp_dict) or {}
    (body,) = as_json([row])
    return {
        "exp_id": row.exp_id,
        "facts": facts,
        "state": row.state,
        "group": row.group,
        "name": row.name,
        "experiment": json.dumps(experiment),
        "card": json.dumps(run_card(row, folder, experiment)),
        "body": json.dumps(body),
    }


def _tell_apart(index: Index, groups: Collection[str]) -> None:
    """Name the runs of groups that have new ones by what tells them from their siblings."""
    for group in groups:
        experiments = index.experiments_of(group)
        names = told_apart([json.loads(text) for text in experiments.values()])
        index.put_names(dict(zip(experiments, names, strict=True)))


def mark(path: Path) -> str:
    """What a file is like: another text as soon as it changes."""
    try:
        facts = path.stat()
    except OSError:
        return "-"
    return f"{facts.st_mtime_ns:x}.{facts.st_size:x}"
