"""The page docs/add-a-flag.md is true: its changes add a flag, which a run reads and a job gets."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.pages import COMMAND, ROOT, copy_with_changes, run_python

PAGE = ROOT / "docs" / "add-a-flag.md"
NAMES = (
    "trainer",
    "jobs",
    "tests",
    "ds_configs",
    "exp_configs.py",
    "job_configs.py",
    "trainval.py",
)
NO_CACHE = ("-p", "no:cacheprovider")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with the flag of the page."""
    return copy_with_changes(PAGE, tmp_path_factory.mktemp("copy"), [*NAMES, "pyproject.toml"])


def commands() -> list[list[str]]:
    return [shlex.split(line) for line in COMMAND.findall(PAGE.read_text())]


@pytest.mark.long
def test_the_flag_of_the_page_is_passed_on_to_a_job(copy: Path) -> None:
    test, _ = commands()
    printed = run_python(copy, *test, *NO_CACHE, "-k", "note or knows")
    assert re.search(r"^2 passed|^\.\.", printed, re.M), printed


@pytest.mark.long
def test_a_run_reads_the_flag_of_the_page(copy: Path) -> None:
    _, train = commands()
    assert "note: a longer warm-up" in run_python(copy, *train)
