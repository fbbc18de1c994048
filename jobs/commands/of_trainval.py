"""`trainval.py -j BACKEND`: submits a whole group with the flags of trainval.py. No torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from jobs.report import selection
from jobs.submit import control, prepare
from jobs.submit import group as group_of_jobs
from jobs.submit.request import Request
from trainer.config.flags import RunFlags
from trainer.errors import EXIT_OK, ConfigError


def submit_group(
    group: str | None,
    experiments: list[dict[str, Any]],
    flags: RunFlags,
    *,
    steps: int | None,
    base: Path,
    resets: bool,
    backend: str,
    file: Path | None,
    python_binary: str,
    survive: str | None,
    is_dry: bool,
    allow_dirty: bool,
) -> int:
    """Submit the group as `lathe-jobs submit` does, with the flags of trainval.py. Returns the exit
    code.
    """
    if group is None:
        raise ConfigError(
            "-j needs -e GROUP: an experiment that was sent before runs again by `lathe-jobs "
            "retry ID`."
        )
    request = prepare.make(
        group=group,
        experiments=experiments,
        base=base,
        backend={"1": "toolkit"}.get(backend, backend),  # as published
        job=prepare.job_config(
            group, file, "" if python_binary == "python" else python_binary, survive=survive
        ),
        flags=prepare.with_steps(flags.as_text(), steps),
        allow_dirty=allow_dirty or is_dry,
        take_snapshot=not is_dry,
    )
    if is_dry:
        results = group_of_jobs.preview(request)
    else:
        if resets:
            _move_aside(request)
        results = group_of_jobs.submit(request)
    selection.show(results, as_json=False)
    selection.fail_if_any(results)
    return EXIT_OK


def _move_aside(request: Request) -> None:
    """Rename every run folder of a group, submitted or run by hand, so that the group starts anew.

    ConfigError, and nothing is renamed, when one of them is alive.
    """
    # This checks every dictionary and flag: nothing is moved for a group that cannot be sent.
    group_of_jobs.specs(request)
    folders = [folder for name in request.by_id if (folder := request.base.run(name)).path.exists()]
    rows = selection.rows(request.base.path, None, by_hand=True)
    selection.refuse_live(row for row in rows if row.exp_id in request.by_id)
    for folder in folders:
        aside = folder.path.with_name(f"{folder.path.name}.bak-{time.strftime('%Y%m%d-%H%M%S')}")
        selection.show(
            [control.reset(request.base, folder.path.name, request.backend_of, aside=aside)],
            as_json=False,
        )
