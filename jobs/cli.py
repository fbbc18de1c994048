"""The command: `python -m jobs`, or `lathe-jobs`.

Exit codes: 0 all is as asked, 2 bad input, 3 some experiments failed to be dealt with, 4 a
scheduler cannot be reached, 5 nothing matched. Nothing is ever asked: what is dangerous needs
--yes. With --json stdout holds JSON and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import Annotated, Any, ParamSpec, cast, get_args

import typer

from jobs import backends
from jobs.backends import BackendCache
from jobs.errors import NothingMatched, Unreachable
from jobs.job_state import ACTIVE, ENDED_BADLY
from jobs.record.paths import BaseFolder
from jobs.record.row import Row
from jobs.report import selection
from jobs.submit.control import Again, again, cancel, reconcile, reset
from jobs.submit.group import preview, rendered, submit
from jobs.submit.policy import Limits
from jobs.submit.prepare import check_base, job_config, make, training_flags
from jobs.submit.request import RESEND_S, Request, Result
from trainer.config import exp_id, nearest
from trainer.errors import ConfigError, LatheError, StorageError

P = ParamSpec("P")
app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},  # every command inherits them
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Submit groups of experiments, and see what becomes of them. Backends: "
    + ", ".join(backends.names())
    + ". `doctor -j NAME` says how far each was validated.",
)
RETRIES = (
    "`retry ID` sends exactly what was sent before: flags, job dictionary and code. "
    "`submit --retry failed` sends those of now."
)

Base = Annotated[Path, typer.Option("-sb", "--savedir_base", help="Root of all run folders.")]
Group = Annotated[str | None, typer.Option("-e", "--exp_group", help="Group of experiments.")]
NeededGroup = Annotated[str, typer.Option("-e", "--exp_group", help="Group of experiments.")]
BackendName = Annotated[str, typer.Option("-j", "--job_scheduler", help="Where they run.")]
ExpConfigs = Annotated[
    Path | None, typer.Option("--exp_configs", help="Python file with EXP_GROUPS.")
]
JobConfigs = Annotated[
    Path | None, typer.Option("--job_configs", "--profile", help="Python file with JOB_CONFIGS.")
]
Steps = Annotated[
    int | None,
    typer.Option("--steps", min=1, help="Written into the dictionaries: changes their ids."),
]
PythonBinary = Annotated[
    str, typer.Option("--python_binary", help="Launch line, parsed and never given to a shell.")
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", help="Only this id (or its beginning); may be repeated."),
]
JsonLines = Annotated[
    bool, typer.Option("--json", help="One JSON document per line on stdout, for scripts.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, for scripts.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it.")]
Ids = Annotated[list[str] | None, typer.Argument(help="Ids of experiments, or their beginnings.")]
Flags = Annotated[
    list[str] | None, typer.Argument(help="After --: flags of trainval.py, such as --data_path D.")
]


def _guarded(function: Callable[P, None]) -> Callable[P, None]:
    """Turn our errors into one message and their exit code."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
        try:
            if isinstance(base := kwargs.get("savedir_base"), Path):
                check_base(base)
            function(*args, **kwargs)
        except LatheError as error:
            raise _told(error) from None
        except BrokenPipeError:  # the reader of a pipe has left: `logs -f ID | head`
            raise typer.Exit(0) from None
        except OSError as error:  # a folder that is a file, or not ours to read
            raise _told(
                StorageError(
                    f"{error.filename or 'disk'}: {error.strerror or error}. Check --savedir_base."
                )
            ) from None

    return run


def _told(error: LatheError) -> typer.Exit:
    typer.echo(selection.shown(f"{type(error).__name__}: {error}"), err=True)
    return typer.Exit(error.exit_code)


@contextlib.contextmanager
def _json_alone(as_json: bool) -> Generator[None]:
    """While the block lasts, what a process that it starts prints (`-j inline`) goes to stderr:
    stdout is for JSON.
    """
    if not as_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@app.command("plan")
@_guarded
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
        bool, typer.Option("--show-rendered", help="The text each scheduler would get.")
    ] = False,
    as_json: Json = False,
    flags: Flags = None,
) -> None:
    """What would be sent, adopted, run again or left alone, and why. Asks the scheduler.

    Writes nothing below --savedir_base.
    """
    request = make(
        group=exp_group,
        experiments=selection.experiments(exp_group, exp_configs, steps, only),
        base=savedir_base,
        backend=job_scheduler,
        job=job_config(exp_group, job_configs, python_binary),
        flags=training_flags(flags or []),
        allow_dirty=True,
        take_snapshot=False,
    )
    results = preview(request)
    texts = dict(zip(request.by_id, rendered(request), strict=True)) if show_rendered else None
    selection.show(results, as_json, rendered=texts)
    selection.fail_if_any(results)


@app.command("submit", epilog=RETRIES)
@_guarded
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
        int | None, typer.Option("--max-parallel", min=1, help="At most so many at once.")
    ] = None,
    array: Annotated[bool, typer.Option("--array", help="One submission for all (Slurm).")] = False,
    after: Annotated[
        list[str] | None, typer.Option("--after", help="Scheduler id that must succeed first.")
    ] = None,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Send uncommitted code, with its patch.")
    ] = False,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune", help="Cancel what is alive in this group but no longer in it. Needs --yes."
        ),
    ] = False,
    yes: Yes = False,
    resend_after: Annotated[float, typer.Option("--resend_after", hidden=True)] = RESEND_S,
    as_json: Json = False,
    flags: Flags = None,
) -> None:
    """Send every experiment of the group that is neither done nor alive. Safe to repeat, and to run
    many at once.
    """
    if prune and not yes:
        raise ConfigError(
            "--prune: this cancels whatever is alive and no longer in the group. Say --yes."
        )
    experiments = selection.experiments(exp_group, exp_configs, steps, only)
    request = make(
        group=exp_group,
        experiments=experiments,
        base=savedir_base,
        backend=job_scheduler,
        job=job_config(exp_group, job_configs, python_binary),
        flags=training_flags(flags or []),
        allow_dirty=allow_dirty,
        retry=selection.states(retry),
        max_parallel=max_parallel,
        use_array=array,
        after=after or [],
        resend_s=resend_after,
    )
    with _json_alone(as_json):
        results = submit(request)
        if prune:  # of the whole group: what --only left out is still in it
            results += _prune(request, selection.experiments(exp_group, exp_configs, steps, None))
    selection.show(results, as_json)
    selection.fail_if_any(results)


def _prune(request: Request, whole: Collection[dict[str, Any]]) -> list[Result]:
    """Cancel what is alive under the group's name and is none of its experiments."""
    kept = {exp_id(values) for values in whole}
    rows = selection.rows(request.base.path, request.group, None)
    strays = [row for row in rows if row.state in ACTIVE and row.exp_id not in kept]
    return cancel(request.base, strays, request.backend_of)


@app.command("status")
@_guarded
def status_command(
    savedir_base: Base,
    exp_group: Group = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")
    ] = False,
    every: Annotated[str, typer.Option("--every", help="Between two looks: 5s, 1m.")] = "5s",
    by_hand: Annotated[
        bool, typer.Option("--all", help="Also what was run without being submitted.")
    ] = False,
    as_json: Json = False,
) -> None:
    """State, step, last metrics, time left, host, attempts and GPU-hours of every experiment."""
    from rich.console import Console

    from jobs.report import table

    def look() -> list[Row]:
        return selection.rows(savedir_base, exp_group, None, by_hand=by_hand)

    if watch and as_json:
        raise ConfigError("status: --watch is for a terminal and --json for a script; keep one.")
    if watch:
        table.watch(look, selection.seconds(every))
        return
    rows = look()
    if as_json:
        typer.echo(json.dumps(table.as_json(rows), indent=1))
    else:
        table.show(rows, Console())
    if not rows:
        raise NothingMatched(
            f"no experiment of {exp_group or 'any group'} was ever submitted from {savedir_base}."
        )


@app.command("show")
@_guarded
def show_command(exp_id: str, savedir_base: Base, as_json: Json = False) -> None:
    """All that is known of one experiment: its record, its attempts, its files."""
    from jobs.report import table

    row = selection.one(savedir_base, exp_id)
    typer.echo(json.dumps(table.as_json([row])[0], indent=1) if as_json else selection.details(row))


@app.command("logs")
@_guarded
def logs_command(
    exp_id: str,
    savedir_base: Base,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the attempt ends.")
    ] = False,
    err: Annotated[bool, typer.Option("--err", help="stderr instead of stdout.")] = False,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="Which attempt; the last.")
    ] = None,
    tail: Annotated[int | None, typer.Option("--tail", min=1, help="Only the last lines.")] = None,
    as_json: JsonLines = False,
) -> None:
    """What the training printed."""
    from jobs.report import logs

    row = selection.one(savedir_base, exp_id)
    folder = BaseFolder(savedir_base.absolute()).run(row.exp_id)
    backend = BackendCache()(row.backend or "inline")
    lines = logs.show(folder, backend, attempt=attempt, err=err, tail=tail, follow=follow)
    for line in lines:
        typer.echo(json.dumps({"line": line}) if as_json else line)


@app.command("cancel")
@_guarded
def cancel_command(
    savedir_base: Base,
    ids: Ids = None,
    exp_group: Group = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Ask for the end of live jobs; the training saves first. A group, or several ids, need
    --yes.
    """
    rows = selection.chosen(savedir_base, ids, exp_group)
    if not yes and (exp_group or len(rows) > 1):
        raise ConfigError(f"cancel: this ends up to {len(rows)} experiments. Say --yes.")
    results = cancel(BaseFolder(savedir_base.absolute()), rows, BackendCache())
    selection.show(results, as_json)
    selection.fail_if_any(results)


@app.command("retry", epilog=RETRIES)
@_guarded
def retry_command(
    savedir_base: Base,
    ids: Ids = None,
    exp_group: Group = None,
    state: Annotated[
        str, typer.Option("--state", help="Every experiment in one of these states.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Run ended experiments again, from their last checkpoint, as they were sent before."""
    states = selection.states(state)
    rows = [
        row
        for row in selection.chosen(savedir_base, ids, exp_group, is_all=bool(state))
        if not states or row.state in states
    ]
    if not rows:
        raise NothingMatched(f"retry: no experiment is {state}.")
    limits = Limits(
        retry=states or (*ENDED_BADLY, "preempted"), with_bad_input=bool(ids)
    )  # by its id: somebody has mended it
    with _json_alone(as_json):
        results = again(Again(BaseFolder(savedir_base.absolute()), BackendCache(), limits), rows)
    selection.show(results, as_json)
    selection.fail_if_any(results)


@app.command("reset")
@_guarded
def reset_command(ids: Ids, savedir_base: Base, yes: Yes = False, as_json: Json = False) -> None:
    """Move the folders of experiments to deleted/, so that they can start over. Nothing is
    overwritten.
    """
    rows = selection.chosen(savedir_base, ids, None)
    if not yes:
        raise ConfigError(
            f"reset: this moves {len(rows)} run folder(s) away, checkpoints and all. Say --yes."
        )
    selection.refuse_live(rows)
    results = [
        reset(BaseFolder(savedir_base.absolute()), row.exp_id, BackendCache()) for row in rows
    ]
    selection.show(results, as_json)


@app.command("reconcile")
@_guarded
def reconcile_command(
    savedir_base: Base,
    every: Annotated[str | None, typer.Option("--every", help="Go on for ever: 30s, 5m.")] = None,
    resend_after: Annotated[float, typer.Option("--resend_after", hidden=True)] = RESEND_S,
    as_json: Json = False,
) -> None:
    """Adopt what was never answered, run preempted experiments again, send what waited for its
    turn.

    --every with --json: one JSON document a round, each in one line.
    """
    pause_s = selection.seconds(every) if every is not None else None
    cache = BackendCache()
    while True:
        with _json_alone(as_json):
            results = reconcile(
                Again(BaseFolder(savedir_base.absolute()), cache, resend_s=resend_after)
            )
        selection.show(results, as_json, is_line=pause_s is not None)
        if pause_s is None:
            break
        time.sleep(pause_s)
    selection.fail_if_any(results)


@app.command("doctor")
@_guarded
def doctor_command(job_scheduler: BackendName = "local", as_json: Json = False) -> None:
    """Whether a backend can be used from here, and what to do if not."""
    backend = backends.load(job_scheduler)
    findings = backend.check()
    if as_json:
        typer.echo(json.dumps([vars(finding) for finding in findings], indent=1))
    else:
        typer.echo(f"{backend.name}: {backend.validation}")
        for finding in findings:
            typer.echo(f"  {'ok ' if finding.is_good else 'BAD'}  {finding.name}: {finding.text}")
    if any(finding.is_blocking and not finding.is_good for finding in findings):
        raise Unreachable(f"{job_scheduler} cannot be used from here: see BAD above.")


@app.command("results")
@_guarded
def results_command(
    savedir_base: Base,
    exp_group: Group = None,
    csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a report with loss curves to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What differs between the experiments, and what they reached."""
    from rich.console import Console

    from jobs.report import scores as tables

    if sum((csv, html is not None, as_json)) > 1:
        raise ConfigError("results: of --csv, --html and --json keep one.")
    base = BaseFolder(savedir_base.absolute())
    rows = selection.rows(savedir_base, exp_group, None, by_hand=True)
    if not rows:
        raise NothingMatched(f"{savedir_base} holds no experiment of {exp_group or 'any group'}.")
    gathered = tables.gather(base, [row.exp_id for row in rows])
    if html is not None:
        from jobs.report.html import report
        from trainer.files.atomic import replace_file

        replace_file(html, report(base, rows, gathered).encode())
        typer.echo(str(html))
    elif csv:
        typer.echo(tables.as_csv(gathered), nl=False)
    elif as_json:
        typer.echo(json.dumps(tables.as_json(gathered), indent=1))
    else:
        screen = Console()
        screen.print(tables.as_table(gathered, width=screen.width))


@app.command("gc")
@_guarded
def gc_command(
    savedir_base: Base,
    older_than_days: Annotated[
        int, typer.Option("--older-than", min=0, help="Days, for deleted runs.")
    ] = 30,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Code snapshots that no run refers to, and old deleted runs: listed, and with --yes
    removed.
    """
    from jobs.code import gc

    garbage = gc.plan_gc(BaseFolder(savedir_base.absolute()), older_than_days=older_than_days)
    lines = [{"path": str(item.path), "bytes": item.bytes, "why": item.why} for item in garbage]
    if as_json:
        typer.echo(json.dumps(lines, indent=1))
    for item in [] if as_json else garbage:
        typer.echo(f"{item.bytes / 2**20:10.1f} MiB  {item.path}  ({item.why})")
    if yes:
        typer.echo(f"removed {gc.collect(garbage)} of {len(garbage)}", err=True)


@app.command("export")
@_guarded
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
    """The text that another tool could submit. Nothing is written or sent; such jobs are not in the
    record.
    """
    from jobs.code.export import Kind, export
    from jobs.submit.group import specs

    kinds: tuple[Kind, ...] = get_args(Kind)
    if to not in kinds:
        raise ConfigError(f"--to {to}: {nearest(to, list(kinds))}")
    request = make(
        group=exp_group,
        experiments=selection.experiments(exp_group, exp_configs, steps, only),
        base=savedir_base,
        backend="local",
        job=job_config(exp_group, job_configs, python_binary),
        flags=training_flags(flags or []),
        allow_dirty=True,
        take_snapshot=False,
    )
    for spec in specs(request):
        typer.echo(export(spec, cast("Any", to)))
