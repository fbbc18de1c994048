"""What the pages say about this repository is there: paths in backticks, relative links, and flags of
commands.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from trainer.__main__ import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(ROOT.glob("docs/**/*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
]
TOPS = ("trainer", "jobs", "tests", "docs", "benchmarks", "ds_configs", ".ci")
MAX_PROSE = 160

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join(map(re.escape, TOPS))})/[\w./*-]*[\w*](?![<{{\w])")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
# docs/add-a-task.md and docs/add-a-backend.md walk through what the reader adds.
ADDED_BY_THE_READER = re.compile(
    r"^(trainer/tasks/reward|tests/golden/reward|jobs/backends/detached)"
)
_COMMAND = re.compile(r"python -m trainer ([a-z][\w-]*)((?:(?! -- )[^`\n|;])*)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# Pages that tell what was typed in the past.
PAST = ("docs/log.md", "docs/decisions/")


def named_paths(text: str) -> set[str]:
    """The repository's paths that stand in backticks outside of code blocks."""
    spans = _CODE.findall(_FENCE.sub("", text))
    return {path for span in spans for path in _PATH.findall(span)}


def missing_paths(text: str) -> list[str]:
    """Those of them that lead nowhere; a `*` stands for anything."""
    paths = sorted(named_paths(text))
    return [
        path
        for path in paths
        if not ADDED_BY_THE_READER.match(path) and not any(ROOT.glob(path.rstrip("/")))
    ]


def broken_links(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead nowhere."""
    targets = _LINK.findall(_FENCE.sub("", text))
    return [
        target for target in targets if "://" not in target and not (page.parent / target).exists()
    ]


def unknown_flags(text: str) -> list[str]:
    """The flags behind `python -m trainer NAME` that this command does not have."""
    unknown: list[str] = []
    for name, rest in _COMMAND.findall(text):
        options = options_of()[name]
        unknown += [f"{name} {flag}" for flag in _FLAG.findall(rest) if flag not in options]
    return unknown


@cache
def options_of() -> dict[str, set[str]]:
    """The flags of each command of `python -m trainer`."""
    program: Any = get_command(app)
    return {
        name: {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
        for name, command in program.commands.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_and_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = page.read_text()
    assert not missing_paths(text), "paths that are not in the repository"
    assert not broken_links(page, text), "links that lead nowhere"


def test_every_flag_of_a_command_exists() -> None:
    for page in PAGES:
        if not str(page.relative_to(ROOT)).startswith(PAST):
            assert not unknown_flags(page.read_text()), page
    assert unknown_flags("`python -m trainer predict RUN --rows R`") == ["predict --rows"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_of_prose_is_too_long_for_a_terminal(page: Path) -> None:
    prose = _FENCE.sub("", page.read_text()).splitlines()
    long = [line for line in prose if len(line) > MAX_PROSE and not line.startswith("|")]
    assert not long


def test_a_wrong_path_and_a_broken_link_are_noticed() -> None:
    text = "See `trainer/training/lop.py` and `trainer/training/loop.py`; [this](nowhere.md)."
    assert missing_paths(text) == ["trainer/training/lop.py"]
    assert broken_links(ROOT / "README.md", text) == ["nowhere.md"]
