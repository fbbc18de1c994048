"""What a benchmark imports from this project is there: most of them are run by hand, weeks apart."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("trainer", "jobs", "tests", "benchmarks")
PROGRAMS = sorted((ROOT / "benchmarks").rglob("*.py"))


def _module(name: str, beside: Path) -> Path | None:
    """The file of a module of this project: of a room, or beside the program."""
    place = ROOT if name.split(".")[0] in ROOMS else beside
    path = place.joinpath(*name.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def _names(file: Path) -> set[str]:
    """What can be imported from a module: what it binds at its top, and the modules in a package."""
    found = {path.stem for path in file.parent.iterdir()} if file.stem == "__init__" else set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def missing(file: Path) -> list[str]:
    lacking = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
            continue
        module = _module(node.module, file.parent)
        if module is None:
            is_ours = node.module.split(".")[0] in ROOMS and not (ROOT / node.module).is_dir()
            lacking += [node.module] if is_ours else []
            continue
        there = _names(module) | {"*"}
        lacking += [f"{node.module}.{one.name}" for one in node.names if one.name not in there]
    return lacking


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_a_benchmark_imports_is_there(file: Path) -> None:
    assert missing(file) == []


def test_a_name_that_is_gone_is_found(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("from trainer.errors import ConfigError, NoSuchError\nimport torch\n")
    assert missing(program) == ["trainer.errors.NoSuchError"]
    program.write_text("from trainer.no_such_room import anything\nfrom torch import nn\n")
    assert missing(program) == ["trainer.no_such_room"]
