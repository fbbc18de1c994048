"""The site of docs/ builds without a warning, every page is in its menu, and what the page on
errors quotes is what the program says.
"""

from __future__ import annotations

import ast
import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.pages import ROOT

SOURCES = [*ROOT.glob("trainer/**/*.py"), *ROOT.glob("jobs/**/*.py"), ROOT / "trainval.py"]
# What people search for, each of which leads to a recipe.
SEARCHED = (
    "sweep",
    "early",
    "mix",
    "resume",
    "more steps",
    "go on from adapters",
    "metric",
    "8 gpus",
)
SEARCHED += ("nodes", "qlora", "long context", "oom", "hub", "vllm", "compare two runs")
OUTSIDE_THE_MENU = "decisions/"  # pages of the site that others lead to


def pages_of(menu: list[Any]) -> Iterator[str]:
    for entry in menu:
        if isinstance(entry, str):
            yield entry
            continue
        for below in entry.values():
            yield from pages_of([below] if isinstance(below, str) else below)


def test_every_page_is_in_the_menu_of_the_site() -> None:
    tomllib = pytest.importorskip("tomllib")
    with (ROOT / "zensical.toml").open("rb") as file:
        menu = tomllib.load(file)["project"]["nav"]
    found = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert {page for page in found if not page.startswith(OUTSIDE_THE_MENU)} == set(pages_of(menu))


@pytest.mark.long
def test_the_site_builds_and_every_link_and_anchor_leads_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    build = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stdout + build.stderr
    page = (tmp_path / "site" / "own-data" / "index.html").read_text()
    assert "data.valid_share" in page
    assert (tmp_path / "site" / "llms.txt").read_bytes() == (
        ROOT / "docs" / "llms.txt"
    ).read_bytes()
    entries = json.loads((tmp_path / "site" / "search.json").read_text())["items"]
    recipes = [one for one in entries if one["location"].startswith("recipes/#")]
    texts = {
        html.unescape(one["title"]): f"{one['title']} {one['text']}".lower() for one in recipes
    }
    titles = re.findall(r"^### (.+)$", (ROOT / "docs" / "recipes.md").read_text(), re.M)
    assert set(titles) <= set(texts)
    assert [word for word in SEARCHED if not any(word in text for text in texts.values())] == []
    assert not re.findall(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', page)


def said_by_the_program() -> set[str]:
    """Every piece of text in the sources that stands between two values."""
    nodes = (node for source in SOURCES for node in ast.walk(ast.parse(source.read_text())))
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def quoted_messages() -> list[str]:
    """What the page on errors quotes at the beginning of its entries."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## By message")[2]
    entries = re.split(r"^- ", text, flags=re.M)[1:]
    quoted = [re.match(r"`([^`]+)`(?:, `([^`]+)`)?", entry) for entry in entries]
    return [part for found in quoted if found for part in found.groups() if part]


def test_messages_of_the_page_on_errors_are_those_of_the_program() -> None:
    messages, said = quoted_messages(), said_by_the_program()
    assert len(messages) >= 20
    unknown = [message for message in messages if not any(message in text for text in said)]
    assert not unknown
