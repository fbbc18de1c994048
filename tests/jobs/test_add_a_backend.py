"""The page docs/add-a-backend.md is true: its file makes a backend, and its commands run, in a copy."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import STUB, wait_until
from trainer.runtime.process import life

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "add-a-backend.md"
COPIED = ["jobs", "trainer", "exp_configs.py", "job_configs.py", "trainval.py", "ds_configs"]
FILE = re.compile(r"^`([\w./]+)`:\n\n```python\n(.*?)```$", re.M | re.S)
COMMAND = re.compile(r"^\$ python (.+)$", re.M)


@dataclass
class Copy:
    """The project with the backend of the page in it, and a stand-in for the training."""

    folder: Path
    state: Path

    @property
    def what(self) -> Path:
        return self.folder.with_name("what")

    def run(self, *words: str) -> str:
        """What `python WORDS` prints on stdout, run in the copy."""
        environment = {**os.environ, "LATHE_DETACHED": str(self.state), "PYTHONPATH": ""}
        process = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    def command(self, number: int, *words: str) -> str:
        """A command of the page, with more words behind it."""
        return self.run(*shlex.split(COMMAND.findall(PAGE.read_text())[number]), *words)

    def submit(self) -> str:
        """The page's submission; the stand-in runs in place of the training."""
        return self.command(1, "--python_binary", str(self.folder.with_name("bin") / "python"))

    def row(self) -> dict[str, Any]:
        (row,) = json.loads(self.command(2, "--json"))
        return row

    def until(self, *states: str) -> dict[str, Any]:
        return wait_until(self.row, lambda row: row["state"] in states)

    def num_starts(self) -> int:
        return len((self.folder / "results" / "starts").read_text().splitlines())


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Copy]:
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    ((name, text),) = FILE.findall(PAGE.read_text())
    assert not (folder / name).exists()
    (folder / name).write_text(text)
    who = ["-c", "user.name=a reader", "-c", "user.email=reader@example.org"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "A backend"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    made = Copy(folder, tmp_path / "state")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    stub = STUB.replace('values["train"]["seed"]', "1")  # this group names no seed
    python.write_text(stub.format(python=sys.executable, what=str(made.what)))
    python.chmod(0o755)
    made.what.write_text("ok")
    yield made
    for path in made.state.glob("*/process.json"):
        facts = json.loads(path.read_text())
        if life(facts) == "alive":
            os.killpg(facts["pid"], 9)


@pytest.mark.long
def test_the_commands_of_the_page_run_an_experiment(copy: Copy) -> None:
    assert len(COMMAND.findall(PAGE.read_text())) == 3
    assert "ok" in copy.command(0)
    assert "submitted as ft_" in copy.submit()
    assert copy.until("succeeded", "failed")["state"] == "succeeded"
    assert copy.num_starts() == 1
    assert "it is done" in copy.submit()


@pytest.mark.long  # three CPU seconds
def test_a_submission_whose_answer_was_lost_starts_its_job_once(copy: Copy) -> None:
    copy.submit()
    row = copy.until("succeeded", "failed")
    record = Path(row["folder"]) / "job.jsonl"
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(line for line in lines if '"intent"' in line or '"created"' in line))
    copy.submit()
    assert copy.row()["job_id"] == row["job_id"]
    assert copy.num_starts() == 1


@pytest.mark.long  # three CPU seconds
def test_a_job_that_is_cancelled_may_save_and_ends(copy: Copy) -> None:
    copy.what.write_text("sleep")
    copy.submit()
    wait_until(lambda: (copy.folder / "results" / "starts").exists(), bool)
    copy.run("-m", "jobs", "cancel", copy.row()["exp_id"], "-sb", "results", "--yes")
    assert copy.until("cancelled", "failed", "lost")["state"] == "cancelled"
