"""The page docs/add-a-family.md is true: in a copy of the project its changes add a family, which
trains and passes the tests that the page names.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "add-a-family.md"
COPIED = ("trainer", "tests", "ds_configs", "exp_configs.py", "pyproject.toml")
# A path, and the lines of a change to it: those that are added begin with a plus.
CHANGE = re.compile(r"^`([\w./]+)`:\n\n```diff\n(.*?)```$", re.M | re.S)
TESTS = re.compile(r"^\$ pytest (.+)$", re.M)

# Two steps of two tasks: added layers around the blocks of the family, and the base as it is.
TRAIN = """
from pathlib import Path

from tests import families
from tests.facts import write_facts
from tests.ranks import run_on_ranks

if __name__ == "__main__":
    facts = write_facts(Path("facts"), train=16, valid=11)
    two_steps = {**families.STEPS, "steps": 2, "eval_every": 2, "save_every": 2}
    for task in ("cross_attention", "causal_lm"):
        values = families.experiment_on(task, "smollm3", facts, train=two_steps)
        (runs,) = run_on_ranks(1, families.runs, {task: values}, facts, Path("runs"), 2)
        print(task, len(set(runs[task][1])), "losses")
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with the changes of the page in it."""
    folder = tmp_path_factory.mktemp("copy")
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "mutants", "golden")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    changes = CHANGE.findall(PAGE.read_text())
    assert [name for name, _ in changes] == ["trainer/models/families.py", "tests/bases.py"]
    for name, change in changes:
        lines = change.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line.startswith(" ")).rstrip("\n")
        text = (folder / name).read_text()
        assert text.count(before) == 1, f"{name} has not these lines, or twice: {before}"
        after = "".join(line[1:] for line in lines).rstrip("\n")
        (folder / name).write_text(text.replace(before, after))
    return folder


def run(copy: Path, *arguments: str) -> str:
    """What Python printed in the copy; a failure when it did not end well."""
    process = subprocess.run(
        [sys.executable, *arguments], cwd=copy, capture_output=True, text=True, timeout=900
    )
    assert process.returncode == 0, (process.stdout + process.stderr)[-3000:]
    return process.stdout


@pytest.mark.long  # seven CPU seconds
def test_the_family_of_the_page_trains_two_steps(copy: Path) -> None:
    (copy / "train.py").write_text(TRAIN)
    printed = run(copy, "train.py").splitlines()
    assert "cross_attention 2 losses" in printed
    assert "causal_lm 2 losses" in printed


@pytest.mark.long
def test_the_family_of_the_page_passes_the_tests_that_it_names(copy: Path) -> None:
    (arguments,) = TESTS.findall(PAGE.read_text())
    printed = run(copy, "-m", "pytest", "-p", "no:cacheprovider", *arguments.split())
    assert re.search(r"^\d+ passed", printed, re.M), printed
