"""Commands that only read: status, show, logs, results, doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from jobs import backends
from jobs.backends import BackendCache
from jobs.errors import NothingMatched, Unreachable
from jobs.options import (
    BackendName,
    Base,
    ExpConfigs,
    Group,
    Json,
    JsonLines,
    report_errors,
)
from jobs.record.paths import BaseFolder
from jobs.record.row import Row
from jobs.report import selection
from trainer.errors import ConfigError


@report_errors
def status_command(
    savedir_base: Base,
    exp_group: Group = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh until all have ended, or Ctrl-C.")
    ] = False,
    every: Annotated[str, typer.Option("--every", help="Interval of --watch: 5s, 1m.")] = "5s",
    exp_configs: ExpConfigs = None,
    is_all: Annotated[bool, typer.Option("--all", hidden=True)] = False,  # today it always is
    as_json: Json = False,
) -> None:
    """State, step, last metrics, time left, host, attempts and GPU-hours of every experiment.

    Runs that trainval.py started without submitting them are shown too ("by hand"); with -e, those
    whose dictionary is in that group of --exp_configs.
    """
    from rich.console import Console

    from jobs.report import table
    from jobs.report.text import json_lines

    def look() -> list[Row]:
        return selection.rows(savedir_base, exp_group, by_hand=True, exp_configs=exp_configs)

    if watch and as_json:
        raise ConfigError("status: --watch is for a terminal and --json for a script; keep one.")
    if watch:
        table.watch(look, selection.seconds(every))
        return
    rows = look()
    if as_json:
        typer.echo(json_lines(table.as_json(rows)))
    else:
        table.show(rows, Console())
    if not rows:
        raise NothingMatched(
            f"{savedir_base} holds no experiment of {exp_group or 'any group'}, submitted or run "
            "by hand."
        )


@report_errors
def show_command(exp_id: str, savedir_base: Base, as_json: Json = False) -> None:
    """Everything about one experiment: its record, its attempts, its files."""
    from jobs.report import table

    row = selection.one(savedir_base, exp_id)
    typer.echo(json.dumps(table.as_json([row])[0], indent=1) if as_json else selection.details(row))


@report_errors
def logs_command(
    exp_id: str,
    savedir_base: Base,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Continue until the attempt ends.")
    ] = False,
    err: Annotated[bool, typer.Option("--err", help="Print stderr, not stdout.")] = False,
    attempt: Annotated[
        int | None,
        typer.Option("--attempt", min=1, help="Number of the attempt; the last one by default."),
    ] = None,
    tail: Annotated[int | None, typer.Option("--tail", min=1, help="Last lines to print.")] = None,
    as_json: JsonLines = False,
) -> None:
    """Print what the training printed."""
    from jobs.report import logs

    row = selection.one(savedir_base, exp_id)
    folder = BaseFolder(savedir_base.absolute()).run(row.exp_id)
    backend = BackendCache()(row.backend or "inline")
    lines = logs.show(folder, backend, attempt=attempt, err=err, tail=tail, follow=follow)
    for line in lines:
        typer.echo(json.dumps({"line": line}) if as_json else line)


@report_errors
def doctor_command(job_scheduler: BackendName = "local", as_json: Json = False) -> None:
    """Check whether a backend can be used from here, and say what to do if not."""
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


@report_errors
def results_command(
    savedir_base: Base,
    exp_group: Group = None,
    exp_configs: ExpConfigs = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a report with loss curves to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the hyper-parameters in which the experiments differ, and their scores."""
    from rich.console import Console

    from jobs.report import scores as tables
    from jobs.report.operations import as_operations_table
    from jobs.report.text import json_lines

    if sum((csv, html is not None, as_json)) > 1:
        raise ConfigError("results: of --csv, --html and --json keep one.")
    base = BaseFolder(savedir_base.absolute())
    results = tables.gather_listed(
        base, exp_group, lambda: selection.members(exp_group, exp_configs)
    )
    if results is None:
        raise NothingMatched(f"{savedir_base} holds no experiment of {exp_group or 'any group'}.")
    if html is not None:
        from jobs.report.html import report
        from trainer.files.atomic import replace_file

        rows = selection.rows(savedir_base, exp_group, by_hand=True, exp_configs=exp_configs)
        replace_file(html, report(base, rows, results).encode())
        typer.echo(str(html))
    elif csv:
        typer.echo(tables.as_csv(results), nl=False)
    elif as_json:
        typer.echo(json_lines(tables.as_json(results)))
    else:
        screen, shown = Console(), tables.best_of(results)
        screen.print(tables.as_table(shown, width=screen.width))
        of_tests = tables.as_test_table(shown)
        if of_tests is not None:
            screen.print()
            screen.print(of_tests)
        of_driven = as_operations_table([(one.exp_id, one.operations) for one in shown.results])
        if of_driven is not None:
            screen.print()
            screen.print(of_driven)
        typer.echo(tables.refused_lines(shown), nl=False)
        left_out = len(results.results) - len(shown.results)
        if left_out:
            typer.echo(f"{left_out:,} more are not shown: --csv, --json or --html shows all.")
    if not as_json:
        typer.echo(tables.unreadable_lines(results), err=True, nl=False)
