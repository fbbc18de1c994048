"""Which versions are installed, told without importing any of them."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Annotated

import typer

DISTRIBUTION = "lathe-finetune"  # as pyproject.toml names it
_NAMED = ("torch", "transformers", "deepspeed")


def version_text() -> str:
    """Such as: lathe 0.1.0 (Python 3.11.7, torch 2.13.0, transformers 5.23.0, deepspeed 0.19.8)."""
    others = [f"Python {platform.python_version()}", *(f"{n} {_version(n)}" for n in _NAMED)]
    return f"lathe {lathe_version()} ({', '.join(others)})"


def lathe_version() -> str:
    """Such as 0.1.0."""
    return _version(DISTRIBUTION)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _tell(is_asked: bool) -> None:
    if is_asked:
        typer.echo(version_text())
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_tell, is_eager=True, help="Print the versions, and end."),
]
