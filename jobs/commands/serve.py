"""Commands of the service: serve, token, mcp."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from jobs.options import report_errors
from trainer.errors import ConfigError

PACKAGES = ("starlette", "uvicorn", "python_multipart")


@report_errors
def serve_command(context: typer.Context) -> None:
    """A fine-tuning service for OpenAI's clients over the run folders of -sb (docs/service.md)."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise ConfigError(f'serve needs {", ".join(absent)}. Install: pip install -e ".[serve]".')
    # A program of its own, so that no other command has to import a web server.
    os.execv(sys.executable, [sys.executable, "-m", "jobs.serve.app", *context.args])


@report_errors
def token_command(
    token_file: Annotated[
        Path, typer.Option("--token_file", help="File of tokens; made if absent.")
    ],
    name: Annotated[str, typer.Option("--name", help="Its owner; shown as the owner of jobs.")],
    role: Annotated[
        str,
        typer.Option("--role", help="read: look at all; run: tune, and see its own; admin: all."),
    ] = "run",
    jobs: Annotated[int | None, typer.Option("--jobs", help="Most live jobs.")] = None,
    gpu_hours: Annotated[
        float | None, typer.Option("--gpu_hours", help="GPU hours in all.")
    ] = None,
    max_bytes: Annotated[int | None, typer.Option("--bytes", help="Bytes of uploads.")] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Tokens of rows that driven runs get, in all.")
    ] = None,
) -> None:
    """Make a token of the service. It is printed once; the file keeps only its hash."""
    from jobs.serve.access import add_token

    quota = {"jobs": jobs, "gpu_hours": gpu_hours, "bytes": max_bytes, "tokens": tokens}
    typer.echo(add_token(token_file, name, role, quota))


@report_errors
def mcp_command(
    url: Annotated[
        str, typer.Option("--url", help="The address of the service.")
    ] = "http://127.0.0.1:8100",
) -> None:
    """Offer a service's verbs to an agent as tools (Model Context Protocol, on stdin and stdout).
    LATHE_TOKEN is the service's token: the agent may do what it may.
    """
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError('mcp needs the package mcp. Install: pip install -e ".[agents]".')
    from jobs.agents.mcp_server import make_server

    make_server(url, os.environ.get("LATHE_TOKEN") or None).run()
