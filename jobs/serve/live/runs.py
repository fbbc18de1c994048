"""Copies the runs of a folder into the index, including those that were started by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.job_state import ACTIVE
from jobs.record.status import survey
from jobs.report.table import as_json
from jobs.serve.live.cards import run_card
from trainer.config.differences import names_by_difference
from trainer.files.atomic import read_json

if TYPE_CHECKING:
    from jobs.protocol import Backend
    from jobs.record.paths import BaseFolder
    from jobs.record.row import Row
    from jobs.serve.index import Index


def update_index(index: Index, base: BaseFolder, backend_of: Callable[[str], Backend]) -> None:
    """Write the runs that may have changed to the index, and remove those whose folder is gone."""
    indexed, live = index.run_marks(), index.live_runs(ACTIVE)
    marks = {
        run.path.name: " ".join(map(mark, (run.record, run.status, run.metrics)))
        for run in base.runs()
    }
    index.drop_runs(indexed.keys() - marks.keys())
    changed = [name for name in marks if name in live or marks[name] != indexed.get(name)]
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
    index.write_runs(_entry(row, base, names, marks[row.exp_id]) for row in rows)
    # every run of a group with a new run is named after the values that distinguish it
    for group in {row.group for row in rows if not row.by_hand and row.exp_id not in names}:
        experiments = index.experiments_of(group)
        differences = names_by_difference([json.loads(text) for text in experiments.values()])
        index.write_names(dict(zip(experiments, differences, strict=True)))


def _entry(row: Row, base: BaseFolder, names: dict[str, str], facts: str) -> dict[str, Any]:
    """The index's row of a run. names: exp_id -> name; a new run gets its name later."""
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


def mark(path: Path) -> str:
    """A text that changes whenever the file changes."""
    try:
        facts = path.stat()
    except OSError:
        return "-"
    return f"{facts.st_mtime_ns:x}.{facts.st_size:x}"
