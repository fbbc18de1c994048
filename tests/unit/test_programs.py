"""What `python -m NAME` starts: every file with a command of ours, and files that are none."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from jobs.cli import app as jobs_app
from tests import forked
from trainer.__main__ import app as trainer_app
from trainer.errors import EXIT_BAD_INPUT, EXIT_OK

USER_FILES = ("exp_configs", "job_configs", "service")
_APP = re.compile(r"^\w+ = (?:typer\.Typer|_make)\(", re.MULTILINE)
FILES = sorted(
    path.relative_to(forked.ROOT)
    for folder in ("trainer", "jobs")
    for path in (forked.ROOT / folder).rglob("*.py")
    if _APP.search(path.read_text())
)


def test_every_file_with_a_command_can_be_started() -> None:
    assert {"trainer/lathe.py", "trainer/__main__.py", "jobs/cli.py"} <= {*map(str, FILES)}
    silent = [
        str(path)
        for path in FILES
        if 'if __name__ == "__main__":' not in (forked.ROOT / path).read_text()
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("module", "name"), [("trainer.lathe", "lathe"), ("jobs.cli", "lathe-jobs")]
)
def test_the_modules_behind_the_commands_are_the_commands(module: str, name: str) -> None:
    ended = forked.run("-m", module, "--help")
    assert ended.returncode == EXIT_OK, ended.stderr
    assert ended.stdout.lstrip().startswith(f"Usage: {name} ")


@pytest.mark.parametrize("module", USER_FILES)
def test_a_file_of_dictionaries_says_which_command_reads_it(module: str) -> None:
    ended = forked.run("-m", module)
    assert ended.returncode == EXIT_BAD_INPUT
    assert "lathe " in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize(("app", "word"), [(trainer_app, "train"), (jobs_app, "predict")])
def test_a_command_of_another_program_leads_to_lathe(app: object, word: str) -> None:
    ended = CliRunner().invoke(app, [word, "mine.py"])  # pyright: ignore[reportArgumentType]
    assert ended.exit_code == EXIT_BAD_INPUT
    assert repr(word) in ended.output
    assert "lathe -h" in ended.output
