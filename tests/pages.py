"""The project with the changes of a page of docs/ in it, so that a test can run what the page says.

A change is a path between backquotes and a block of ```diff: its lines begin with a blank where
they are there already, which must be in one place of the file, and with a plus where they are new.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHANGE = re.compile(r"^`([\w./]+)`:\n\n```diff\n(.*?)```$", re.M | re.S)
COMMAND = re.compile(r"^\$ python (.+)$", re.M)


def copy_with_changes(page: Path, folder: Path, names: Sequence[str]) -> Path:
    """The files and folders `names` of the project in `folder`, changed as the page says."""
    for name in names:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "mutants")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    changes = CHANGE.findall(page.read_text())
    assert changes, f"{page.name} changes nothing"
    for name, change in changes:
        lines = change.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line.startswith(" ")).rstrip("\n")
        after = "".join(line[1:] for line in lines).rstrip("\n")
        text = (folder / name).read_text()
        assert text.count(before) == 1, f"{name} has not these lines, or twice: {before}"
        (folder / name).write_text(text.replace(before, after))
    return folder


def run_python(folder: Path, *arguments: str, is_refused: bool = False) -> str:
    """What Python printed in a copy; a failure when it did not end well (or badly, if refused)."""
    process = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=900
    )
    text = process.stdout + process.stderr
    assert (process.returncode != 0) == is_refused, text[-3000:]
    return text
