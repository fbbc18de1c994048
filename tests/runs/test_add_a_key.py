"""The page docs/add-a-key.md is true: its changes add a key, whose list a test of the contract
knows, and which leaves every id of before as it was.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.pages import COMMAND, ROOT, copy_with_changes, run_python

PAGE = ROOT / "docs" / "add-a-key.md"
NAMES = ("trainer", "tests", "ds_configs", "exp_configs.py", "job_configs.py", "pyproject.toml")
CONFIG = "trainer/tasks/cross_attention/config.py"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with the key of the page."""
    return copy_with_changes(PAGE, tmp_path_factory.mktemp("copy"), NAMES)


def commands() -> list[list[str]]:
    return [shlex.split(line) for line in COMMAND.findall(PAGE.read_text())]


def test_the_key_of_the_page_is_described(copy: Path) -> None:
    _, keys = commands()
    assert run_python(copy, *keys) in PAGE.read_text()


@pytest.mark.long
def test_the_key_of_the_page_passes_the_tests_that_it_names(copy: Path) -> None:
    test, _ = commands()
    printed = run_python(copy, *test, "-p", "no:cacheprovider")
    assert re.search(r"^3 passed|^\.\.\.", printed, re.M), printed


@pytest.mark.long
def test_a_key_in_neither_list_fails(copy: Path) -> None:
    test, _ = commands()
    text = (copy / CONFIG).read_text()
    line = '            "question_prefix",\n'
    assert text.count(line) == 1
    (copy / CONFIG).write_text(text.replace(line, ""))
    printed = run_python(copy, *test, "-p", "no:cacheprovider", is_refused=True)
    (copy / CONFIG).write_text(text)
    assert "Data.question_prefix stands in neither list" in printed
