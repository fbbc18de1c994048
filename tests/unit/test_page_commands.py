"""Every command line of the pages that people begin with is understood, and every dictionary is
one: docs/coming-from/ and docs/recipes.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jobs.config import JobConfig
from jobs.serve import offers
from tests.commands_of_pages import commands_of, files_of, parsed, python_of
from tests.forked import ROOT
from trainer import tasks
from trainer.config import groups
from trainer.config.sweeps.sweep import group_of

RECIPES = ROOT / "docs" / "recipes.md"
COMING_FROM = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
PAGES = [RECIPES, ROOT / "docs" / "vera-data.md", *COMING_FROM]
RECIPE = re.compile(r"^### ([^\n]+)\n(.*?)(?=^##|\Z)", re.M | re.S)


def name_of(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_program_understands_every_command_line(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for line in commands_of(page):
        parsed(line.of_lathe)


@pytest.mark.parametrize("page", COMING_FROM, ids=name_of)
def test_every_file_of_groups_holds_experiments(page: Path, tmp_path: Path) -> None:
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text)
        if "EXP_GROUPS" in text or name.endswith(".yaml"):
            for experiments in groups.read(tmp_path / name).values():
                assert [tasks.parse(values).task for values in experiments]


def test_every_page_but_the_list_has_commands_that_are_run() -> None:
    idle = [page.stem for page in COMING_FROM if not any(one.is_run for one in commands_of(page))]
    assert idle == ["index"]


def test_the_offer_of_the_page_on_openai_is_one(tmp_path: Path) -> None:
    (text,) = [
        block for block in python_of(ROOT / "docs/coming-from/openai.md") if "SERVICE" in block
    ]
    (tmp_path / "service.py").write_text(text)
    assert list(offers.read(tmp_path / "service.py").models) == ["chat"]


# The recipes
# --------------------------------------------------------------------------------------------------


def test_there_are_thirty_recipes_and_each_says_what_to_type() -> None:
    recipes = RECIPE.findall(RECIPES.read_text())
    assert len(recipes) >= 30
    for title, text in recipes:
        assert "```" in text, title
        lines = [line for line in text.splitlines() if line and not line.startswith("```")]
        assert 1 <= len(lines) <= 14, title


def test_the_python_of_the_recipes_runs_and_gives_experiments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("a", "yes", " yes"), ("b", "no", "yes")]
    for name, key, place in (("questions", "completion", 1), ("answers", "prediction", 2)):
        lines = [json.dumps({key: row[place]}) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in python_of(RECIPES):
        exec(block, names)
    assert capsys.readouterr().out == "0.5\n"  # the recipe with a metric of its own
    swept = names.pop("SWEEP")
    values = [value for value in names.values() if isinstance(value, dict) and "task" in value]
    values += [*group_of(swept), *names["SEEDS"]]
    assert len(values) > 20
    for experiment in values:
        tasks.parse(experiment)
    JobConfig.model_validate(names["JOB_CONFIGS"]["default"])
