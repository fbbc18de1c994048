"""docs/commands.md says of every command what its --help says."""

from __future__ import annotations

import re

import pytest
import typer
from typer.cli import get_docs_for_click

import trainval
from jobs.cli import app as jobs_app
from tests.unit.pages import assert_made, wrapped
from trainer.__main__ import app as trainer_app

PROGRAMS = {
    "python trainval.py": trainval.app,
    "python -m trainer": trainer_app,
    "lathe-jobs": jobs_app,
}
HEAD = """# Every command

`lathe NAME` is each command of this page, by one name and from any folder: `lathe train` is `python trainval.py`, `lathe plan` is
`python -m trainer plan`, `lathe submit` is `lathe-jobs submit`. Where both programs have a command of one name (plan, export, doctor), that of
jobs is `lathe jobs NAME`. A command that takes `-e GROUP` also takes a file of groups (.py, .yaml, .json) as its first word, and then
needs no `-e` where the file has one group; `-sb` is `results` where it is not given.

Made from what `--help` says. [experiments.md](experiments.md) and [jobs.md](jobs.md) say how the flags go together,
[troubleshooting.md](troubleshooting.md) what the exit codes mean.
"""


def of_program(name: str, app: typer.Typer) -> str:
    """A program's section: its own options, then its commands."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name=name)
    text = get_docs_for_click(obj=command, ctx=context, name=name, indent=1)
    text = re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+\n", "", text)  # the headings below are the list
    lines = [line for line in text.splitlines() if not line.startswith("* `--help`")]
    return "\n".join(
        part for line in lines for part in (wrapped(line) if line.startswith("* ") else [line])
    )


def test_the_page_of_commands_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    sections = [of_program(name, app) for name, app in PROGRAMS.items()]
    text = re.sub(r"\n{3,}", "\n\n", "\n\n".join([HEAD, *sections])).rstrip() + "\n"
    assert_made("commands.md", text, __file__)
