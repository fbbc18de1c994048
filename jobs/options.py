"""What the commands share: options, the exit codes of errors, and a stdout with JSON alone."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from jobs.record.paths import check_base
from jobs.report.text import printable
from trainer.errors import LatheError, StorageError

P = ParamSpec("P")
Base = Annotated[Path, typer.Option("-sb", "--savedir_base", help="Root of all run folders.")]
Group = Annotated[str | None, typer.Option("-e", "--exp_group", help="Group of experiments.")]
NeededGroup = Annotated[str, typer.Option("-e", "--exp_group", help="Group of experiments.")]
BackendName = Annotated[
    str, typer.Option("-j", "--job_scheduler", help="The backend that runs the jobs.")
]
ExpConfigs = Annotated[
    Path | None, typer.Option("--exp_configs", help="File of groups: .py, .yaml or .json.")
]
JobConfigs = Annotated[
    Path | None, typer.Option("--job_configs", "--profile", help="Python file with JOB_CONFIGS.")
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps", min=1, help="Steps of each training, as a part of its dictionary and id."
    ),
]
PythonBinary = Annotated[
    str, typer.Option("--python_binary", help="Launch line; no shell reads it.")
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", help="Take only this id (or its beginning); may be repeated."),
]
JsonLines = Annotated[
    bool, typer.Option("--json", help="Print one JSON document per line, for scripts.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for scripts.")]
Yes = Annotated[bool, typer.Option("--yes", help="Confirm the action.")]
ResendAfter = Annotated[float, typer.Option("--resend_after", hidden=True)]
Ids = Annotated[list[str] | None, typer.Argument(help="Ids of experiments, or their beginnings.")]
Flags = Annotated[
    list[str] | None, typer.Argument(help="After --: flags of trainval.py, such as --data_path D.")
]


def report_errors(function: Callable[P, None]) -> Callable[P, None]:
    """Make a command print each of our errors as one message, and exit with its code."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
        try:
            if isinstance(base := kwargs.get("savedir_base"), Path):
                check_base(base)
            function(*args, **kwargs)
        except LatheError as error:
            raise _exit(error) from None
        except BrokenPipeError:  # the reader of the pipe has ended: `logs -f ID | head`
            raise typer.Exit(0) from None
        except OSError as error:  # a folder that is a file, or that we may not read
            raise _exit(
                StorageError(
                    f"{error.filename or 'disk'}: {error.strerror or error}. Check --savedir_base."
                )
            ) from None

    return run


def _exit(error: LatheError) -> typer.Exit:
    typer.echo(printable(f"{type(error).__name__}: {error}"), err=True)
    return typer.Exit(error.exit_code)


@contextlib.contextmanager
def json_alone(as_json: bool) -> Generator[None]:
    """Send what child processes print (`-j inline`) to stderr, so that stdout holds JSON alone."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
