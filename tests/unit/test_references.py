"""What docstrings and comments of the source mention is there: our files, and names of our modules."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("*.py"), *ROOT.glob("trainer/**/*.py"), *ROOT.glob("jobs/**/*.py")])
OURS = [
    *FILES,
    *(path for top in ("tests", "benchmarks", "docs") for path in ROOT.glob(f"{top}/**/*.*")),
]
# Files of other programs that comments give as their source.
FOREIGN = {
    "cal-rouge.py",
    "comm/torch.py",
    "credentials.py",
    "fido_architecture.py",
    "flop_counter.py",
    "integers.py",
    "job_create_params.py",
    "modeling_layers.py",
    "partitioned_param_coordinator.py",
    "runtime/config.py",
    "runtime/zero/linear.py",
    "transformers/integrations/deepspeed.py",
    "translate_model.py",
    "types/file_object.py",
    "utils/file_baton.py",
    "utils/groups.py",
}
# Words before a dot that are blocks of an experiment, names of files on disk, or plain variables,
# although a module of ours is called so too.
NO_MODULES = {"code", "data", "engine", "generation", "head", "model", "plan", "reader", "scores"}
NO_MODULES |= {"jobs", "loss", "shared", "stats", "trainer"}  # shared: T5's embedding
ENDINGS = {"py", "json", "jsonl", "md", "toml", "csv", "txt", "pt", "html", "js"}
_PATH = re.compile(r"(?<![\w./])((?:[\w-]+/)*[\w-]+\.py)\b")
_NAME = re.compile(r"(?<![\w./\"'])([a-z_]+)\.([A-Za-z_]\w*)\b")


def words_of(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring and comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@cache
def names_in(file: Path) -> frozenset[str]:
    """Everything that a module defines, imports or holds as an attribute or argument."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.arg | ast.Attribute):
            names.add(
                getattr(node, "id", "") or getattr(node, "arg", "") or getattr(node, "attr", "")
            )
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
    return frozenset(names)


@cache
def modules() -> dict[str, list[Path]]:
    by_name: dict[str, list[Path]] = {}
    for file in FILES:
        name = file.parent.name if file.name == "__init__.py" else file.stem
        by_name.setdefault(name, []).append(file)
    return by_name


@cache
def endings_of_ours() -> frozenset[str]:
    """Every way to name one of our files: by its name, its folder and name, and so on."""
    parts = [path.relative_to(ROOT).parts for path in OURS]
    return frozenset("/".join(one[start:]) for one in parts for start in range(len(one)))


def stale_references(text: str) -> list[str]:
    """The files and the names of our modules that a text mentions and that are not there."""
    stale = [
        path
        for path in _PATH.findall(text)
        if path not in FOREIGN and path not in endings_of_ours()
    ]
    by_name = modules()
    for module, name in _NAME.findall(text):
        if module in NO_MODULES or name in ENDINGS or module not in by_name:
            continue
        files = by_name[module]
        is_there = any(
            name in names_in(file) or file.with_name(f"{name}.py").exists() for file in files
        )
        if not is_there:
            stale.append(f"{module}.{name}")
    return stale


def test_what_docstrings_and_comments_mention_is_there() -> None:
    stale = [
        f"{file.relative_to(ROOT)}:{line} {reference}"
        for file in FILES
        for line, text in words_of(file.read_text())
        for reference in stale_references(text)
    ]
    assert not stale, "\n".join(stale)


def test_a_file_and_a_name_that_are_gone_are_found() -> None:
    text = "See packing.layout, loop.fit, loop.fits, training/loop.py and training/lop.py."
    assert stale_references(text) == ["training/lop.py", "loop.fits"]
