"""The reading path of docs/architecture.md: which functions it names, and where they stand.

    python -m tests.reading_path        write the present line numbers into the page

The page has two tables. The path: a file, the lines to read, the functions that stand there, in the
order of a run. The leaves: files or folders whose functions a run calls and that need not be read
to follow it; with names, only those functions of a file.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
MAX_LINES = 600
_PATH = re.compile(r"^\| `([^`]+\.py)` \|([^|]*)\| (`[^|]+`) \|", re.MULTILINE)
_LEAF = re.compile(r"^\| leaf: `([^`]+)` \| ([^|]*) \|", re.MULTILINE)


@dataclass(frozen=True)
class Stop:
    """One file of the path, and the functions or classes of it that are read."""

    file: str
    lines: str  # as the page says: "12-30, 44-60"
    names: tuple[str, ...]

    def present_lines(self) -> list[tuple[int, int]]:
        """(first, last) of each name today. KeyError when it is gone."""
        places = definitions(self.file)
        return [places[name] for name in self.names]


def stops(text: str) -> list[Stop]:
    """The path, in order."""
    return [
        Stop(file, lines.strip(), tuple(re.findall(r"`([^`]+)`", names)))
        for file, lines, names in _PATH.findall(text)
    ]


def leaves(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """(file or folder, names); no names: all of it."""
    return [(place, tuple(re.findall(r"`([^`]+)`", names))) for place, names in _LEAF.findall(text)]


def definitions(file: str) -> dict[str, tuple[int, int]]:
    """{qualified name: (first line, last line)} of the functions and classes of a file."""
    places: dict[str, tuple[int, int]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                places[prefix + child.name] = (child.lineno, child.end_lineno or child.lineno)
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse((ROOT / file).read_text()), "")
    return places


def ranges(places: list[tuple[int, int]]) -> str:
    return ", ".join(f"{first}-{last}" for first, last in places)


def length(path: list[Stop]) -> int:
    """Lines to read; a method of a class that is read itself counts once."""
    lines = {
        (stop.file, line)
        for stop in path
        for first, last in stop.present_lines()
        for line in range(first, last + 1)
    }
    return len(lines)


def unexplained(calls: Iterator[tuple[str, int]], text: str) -> list[str]:
    """The functions among `calls` that stand neither on the path nor among the leaves.

    calls: (file from the root, first line of the function), as a trace saw them.
    """
    explained: dict[str, list[tuple[int, int]]] = {}
    for stop in stops(text):
        explained.setdefault(stop.file, []).extend(stop.present_lines())
    whole: list[str] = []
    for place, names in leaves(text):
        if not names:
            whole.append(place)
            continue
        known: Mapping[str, Any] = definitions(place)
        explained.setdefault(place, []).extend(known[name] for name in names)
    return sorted(
        f"{file}:{line}"
        for file, line in set(calls)
        if not any(file == place or file.startswith(f"{place.rstrip('/')}/") for place in whole)
        and not any(first - 5 <= line <= last for first, last in explained.get(file, []))
    )


def renumbered(text: str) -> str:
    """The page with the present line numbers."""

    def row(match: re.Match[str]) -> str:
        file, _, names = match.groups()
        stop = Stop(file, "", tuple(re.findall(r"`([^`]+)`", names)))
        return f"| `{file}` | {ranges(stop.present_lines())} | {names} |"

    text = _PATH.sub(row, text)
    return re.sub(r"\*\*\d+ lines\*\*", f"**{length(stops(text))} lines**", text)


if __name__ == "__main__":
    PAGE.write_text(renumbered(PAGE.read_text()))
    print(f"{length(stops(PAGE.read_text()))} lines to read")
    sys.exit()
