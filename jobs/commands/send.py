"""Commands that submit a group, or show what would be submitted: plan, submit, export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from exp_configs import experiments_of
from jobs.errors import NothingMatched
from jobs.job_state import ACTIVE
from jobs.options import (
    BackendName,
    Base,
    ExpConfigs,
    Flags,
    JobConfigs,
    Json,
    NeededGroup,
    Only,
    PythonBinary,
    ResendAfter,
    Steps,
    Yes,
    json_alone,
    report_errors,
)
from jobs.report import selection
from jobs.submit.control import cancel
from jobs.submit.group import preview, scheduler_texts, submit
from jobs.submit.prepare import job_config, make, training_flags, with_steps
from jobs.submit.request import RESEND_S
from trainer.config.identity import exp_id
from trainer.errors import ConfigError, nearest


def experiments(
    group: str, file: Path | None, steps: int | None, only: Sequence[str] | None
) -> list[dict[str, Any]]:
    """The dictionaries of a group, or those whose ids begin with a text of `only`.

    NothingMatched names every text of `only` that matches none; ConfigError refuses an empty text.
    """
    dictionaries = experiments_of(group, file, steps)
    if not only:
        return dictionaries
    if not all(only):
        raise ConfigError(
            '--only "": want an id, or its beginning. Leave --only out to take the whole group.'
        )
    ids = [exp_id(values) for values in dictionaries]
    strays = [text for text in only if not any(name.startswith(text) for name in ids)]
    if strays:
        raise NothingMatched(
            f"--only {', '.join(map(repr, strays))}: no experiment of {group} has an id like that."
        )
    return [
        values
        for name, values in zip(ids, dictionaries, strict=True)
        if name.startswith(tuple(only))
    ]


@report_errors
def plan_command(
    exp_group: NeededGroup,
    savedir_base: Base,
    job_scheduler: BackendName = "local",
    exp_configs: ExpConfigs = None,
    job_configs: JobConfigs = None,
    steps: Steps = None,
    python_binary: PythonBinary = "",
    only: Only = None,
    show_rendered: Annotated[
        bool,
        typer.Option("--show-rendered", help="Also print the text that the scheduler would get."),
    ] = False,
    as_json: Json = False,
    flags: Flags = None,
) -> None:
    """Show what submit would do with each experiment, and why. Asks the scheduler, and writes
    nothing below --savedir_base.
    """
    request = make(
        group=exp_group,
        experiments=experiments(exp_group, exp_configs, steps, only),
        base=savedir_base,
        backend=job_scheduler,
        job=job_config(exp_group, job_configs, python_binary),
        flags=with_steps(training_flags(flags or []), steps),
        allow_dirty=True,
        take_snapshot=False,
    )
    results = preview(request)
    texts = (
        dict(zip(request.by_id, scheduler_texts(request), strict=True)) if show_rendered else None
    )
    selection.show(results, as_json, rendered=texts)
    selection.fail_if_any(results)


@report_errors
def submit_command(
    exp_group: NeededGroup,
    savedir_base: Base,
    job_scheduler: BackendName,
    exp_configs: ExpConfigs = None,
    job_configs: JobConfigs = None,
    steps: Steps = None,
    python_binary: PythonBinary = "",
    only: Only = None,
    retry: Annotated[
        str, typer.Option("--retry", help="States to run again: failed,preempted,lost,...")
    ] = "",
    max_parallel: Annotated[
        int | None, typer.Option("--max-parallel", min=1, help="Most live jobs at one time.")
    ] = None,
    array: Annotated[bool, typer.Option("--array", help="Submit one array (Slurm).")] = False,
    after: Annotated[
        list[str] | None,
        typer.Option("--after", help="Scheduler id of a job that must succeed first."),
    ] = None,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Send uncommitted code, with its patch.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Cancel experiments that left this group. Needs --yes.")
    ] = False,
    yes: Yes = False,
    resend_after: ResendAfter = RESEND_S,
    as_json: Json = False,
    flags: Flags = None,
) -> None:
    """Submit each experiment of the group unless it succeeded or is alive. It may be repeated."""
    if prune and not yes:
        raise ConfigError(
            "--prune: this cancels live experiments that are no longer in the group. Say --yes."
        )
    request = make(
        group=exp_group,
        experiments=experiments(exp_group, exp_configs, steps, only),
        base=savedir_base,
        backend=job_scheduler,
        job=job_config(exp_group, job_configs, python_binary),
        flags=with_steps(training_flags(flags or []), steps),
        allow_dirty=allow_dirty,
        retry=selection.states(retry),
        max_parallel=max_parallel,
        use_array=array,
        after=after or [],
        resend_s=resend_after,
    )
    with json_alone(as_json):
        results = submit(request)
        if prune:  # compares with the whole group: experiments outside of --only are still in it
            members = {exp_id(one) for one in experiments(exp_group, exp_configs, steps, None)}
            rows = selection.rows(savedir_base, exp_group)
            strays = [row for row in rows if row.state in ACTIVE and row.exp_id not in members]
            results += cancel(request.base, strays, request.backend_of)
    selection.show(results, as_json)
    selection.fail_if_any(results)


@report_errors
def export_command(
    exp_group: NeededGroup,
    savedir_base: Base,
    to: Annotated[str, typer.Option("--to", help="sbatch, eai, trainjob or sky.")],
    exp_configs: ExpConfigs = None,
    job_configs: JobConfigs = None,
    steps: Steps = None,
    python_binary: PythonBinary = "",
    only: Only = None,
    flags: Flags = None,
) -> None:
    """Print the text of each job for another tool to submit. Nothing is written or submitted, and
    such jobs are not in the record.
    """
    from jobs.submit.export import Kind, export
    from jobs.submit.group import specs

    kinds: tuple[Kind, ...] = get_args(Kind)
    if to not in kinds:
        raise ConfigError(f"--to {to}: {nearest(to, list(kinds))}")
    request = make(
        group=exp_group,
        experiments=experiments(exp_group, exp_configs, steps, only),
        base=savedir_base,
        backend="local",
        job=job_config(exp_group, job_configs, python_binary),
        flags=with_steps(training_flags(flags or []), steps),
        allow_dirty=True,
        take_snapshot=False,
    )
    for spec in specs(request):
        typer.echo(export(spec, cast("Any", to)))
