"""`trainval.py -j BACKEND`: sends a whole group with that command's flags. Imports no torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from jobs.report import selection
from jobs.submit import control, prepare
from jobs.submit import group as group_of_jobs
from jobs.submit.request import Request
from trainer.errors import EXIT_OK, ConfigError


def submit_group(
    group: str | None,
    experiments: list[dict[str, Any]],
    options: dict[str, Any],
    *,
    backend: str,
    file: Path | None,
    python_binary: str,
    survive: str | None,
    is_dry: bool,
    allow_dirty: bool,
) -> int:
    """Send the group as `lathe-jobs submit` does, with trainval.py's flags. Imports no torch."""
    if group is None:
        raise ConfigError(
            "-j needs -e GROUP: an experiment that was sent before runs again by `lathe-jobs "
            "retry ID`."
        )
    base = options["savedir_base"]
    request = prepare.make(
        group=group,
        experiments=experiments,
        base=base,
        backend={"1": "toolkit"}.get(backend, backend),  # as published
        job=prepare.job_config(
            group, file, "" if python_binary == "python" else python_binary, survive=survive
        ),
        flags=_passed_on(options),
        allow_dirty=allow_dirty or is_dry,
        take_snapshot=not is_dry,
    )
    if is_dry:
        results = group_of_jobs.preview(request)
    else:
        if options["reset"]:
            _move_aside(request)
        results = group_of_jobs.submit(request)
    selection.show(results, as_json=False)
    selection.fail_if_any(results)
    return EXIT_OK


def _move_aside(request: Request) -> None:
    """Begin a group anew: every folder of it, sent or run by hand, gets another name.

    None does when one of them is alive.
    """
    # This checks every dictionary and flag: nothing is moved for what cannot be sent.
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


def _passed_on(options: dict[str, Any]) -> dict[str, str]:
    """The flags of this command that the job's own command gets."""
    values = {
        **options,
        "wandb_entity_name": options["wandb_entity"],
        "wandb_project_name": options["wandb_project"],
        "wandb_log_gradients": options["log_gradients"],
        "do_extra_evals": options["extra_evals"] > 0,
        "generation_eval_max_sample_size": options["extra_evals"] or None,
    }
    flags = {name: values[name] for name in prepare.FLAGS if values[name] is not None}
    for name in prepare.SWITCHES:
        if flags.pop(name):
            flags[name] = ""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in flags.items()
    }
