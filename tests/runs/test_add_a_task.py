"""The page docs/add-a-task.md is true: its files make a task, and its commands run, in a copy."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "add-a-task.md"
COPIED = ["trainer", "tests", "ds_configs", "exp_configs.py", "job_configs.py", "trainval.py"]
FILE = re.compile(r"^`([\w./]+)`(, at its end)?:\n\n```python\n(.*?)```$", re.M | re.S)
COMMAND = re.compile(r"^\$ python (.+)$", re.M)

# Each command runs in a process forked from one that has imported what all of them need.
DRIVER = """
import json, os, runpy, sys
import deepspeed, torch, transformers
codes = []
for argv in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        out = os.open(f"output-{len(codes)}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        module = argv[1] if argv[0] == "-m" else None
        sys.argv = argv[1:] if module else argv
        sys.path[0] = os.getcwd()
        code = 0
        try:
            if module:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


def files_of_the_page() -> dict[str, str]:
    return {name: text for name, _, text in FILE.findall(PAGE.read_text())}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with the files of the page in it."""
    folder = tmp_path_factory.mktemp("copy")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "mutants")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    for name, at_end, text in FILE.findall(PAGE.read_text()):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        assert path.exists() == bool(at_end), f"{name}: a new file, or one that grows at its end"
        path.write_text(f"{path.read_text()}\n\n{text}" if at_end else text)
    return folder


def test_the_task_of_the_page_has_less_than_100_lines() -> None:
    files = files_of_the_page()
    task = [text for name, text in files.items() if name.startswith("trainer/tasks/reward/")]
    assert len(task) == 3
    assert sum(len(text.splitlines()) for text in task) < 100


def run_commands(copy: Path, commands: list[list[str]]) -> list[str]:
    """What each of the commands said; a failure when one of them did not end well."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(commands)],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=900,
    )
    said = [(copy / f"output-{number}.txt").read_text() for number in range(len(commands))]
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [0] * len(commands), "\n".join(said)[-3000:]
    return said


@pytest.mark.long
def test_the_first_commands_of_the_page_run_as_it_says(copy: Path) -> None:
    commands = [shlex.split(line) for line in COMMAND.findall(PAGE.read_text())]
    _, dry = run_commands(copy, commands[:2])
    assert "reward" in dry


@pytest.mark.long
def test_every_command_of_the_page_runs_as_it_says(copy: Path) -> None:
    commands = [shlex.split(line) for line in COMMAND.findall(PAGE.read_text())]
    assert [command[0] for command in commands] == [
        "make_preferences.py",
        "trainval.py",
        "-m",
        "-m",
        "trainval.py",
    ]
    _, dry, plan, stats, trained = run_commands(copy, commands)
    assert "reward" in dry
    assert "every row is taken to fill its limits" in plan
    assert "max_length: pairs.max_tokens 64 -> 32" in plan
    assert "chosen: May I borrow book" in stats
    assert "rejected: May I borrow book" in stats
    assert "pairs_per_s" in trained
    (run,) = [path.parent for path in (copy / "results").glob("*/metrics.jsonl")]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["valid/accuracy"] == 1.0
    for folder in ("best", "final"):
        assert (run / folder / "head.safetensors").is_file()


@pytest.mark.long
def test_the_task_of_the_page_is_what_the_contract_wants(copy: Path) -> None:
    chosen = "reward and (sum or pure or made_up or described or limits or tiny or covers)"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract"]
    done = subprocess.run(
        [*command, "-k", chosen], cwd=copy, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d\d? passed|^\.{7}", done.stdout, re.M), done.stdout
