"""Metrics of a user's own: functions in a file that `metrics` names. Imports no torch.

A function gets (predictions, references, rows) of all validation rows in their order and returns
numbers by name. A run keeps a copy of the file in its folder, and goes on with that copy.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from trainer.config.userfile import execute, placed
from trainer.errors import ConfigError, nearest
from trainer.files.atomic import replace_file

FOLDER = "metrics"  # of a run folder: the copies
_WANT = 'want the name of a file and of a function in it: "mine.py:style"'

Function = Callable[[list[str], list[list[str]], list[dict[str, Any]]], Any]
Rows = Sequence[Mapping[str, Any]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnMetric:
    """One function of a user."""

    spec: str  # a file and its function, as the dictionary has them
    function: Function
    names: tuple[str, ...] = ()  # of its numbers: "style/length"; those that the first rows showed

    @property
    def name(self) -> str:
        return self.spec.rpartition(":")[2]


def source(spec: str, run_folder: Path | None) -> Path:
    """The file of a metric: the copy of the run, if it has one, else where the dictionary says."""
    path = Path(placed(spec.rpartition(":")[0]))
    copy = None if run_folder is None else run_folder / FOLDER / path.name
    return copy if copy is not None and copy.is_file() else path


def problems(specs: Sequence[str], run_folder: Path | None) -> Iterator[str]:
    """What shows without running the file: it is not there, or defines no such function."""
    for spec in specs:
        path, name = source(spec, run_folder), spec.rpartition(":")[2]
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = "there is no such file" if not path.exists() else str(error)
            yield f"metrics={spec!r}: {path}: {reason}; {_WANT}."
            continue
        except SyntaxError as error:
            yield f"metrics={spec!r}: {path}:{error.lineno}: {error.msg}. Mend that line."
            continue
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        defined = [node.name for node in tree.body if isinstance(node, kinds)]
        imported = any(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body)
        assigned = any(isinstance(node, ast.Assign) for node in tree.body)
        if name not in defined and not (imported or assigned):
            hint = nearest(name, sorted(defined)) if defined else "It defines none."
            yield f"metrics={spec!r}: {path} defines no function {name!r}. {hint}"


def keep(specs: Sequence[str], run_folder: Path) -> None:
    """Copy the files into the run folder, where they are not yet. Warn of a file that has changed
    since the run began.
    """
    for spec in specs:
        path = Path(placed(spec.rpartition(":")[0]))
        copy = run_folder / FOLDER / path.name
        if not copy.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            replace_file(copy, path.read_bytes())
        elif path.is_file() and path.read_bytes() != copy.read_bytes():
            log.warning(
                "metrics=%r: %s has changed since the run began; it goes on with its copy %s. A "
                "new label begins a new run.",
                *(spec, path, copy),
            )


def digests(specs: Sequence[str], run_folder: Path | None) -> dict[str, str]:
    """sha256 of each file, by its name."""
    paths = {source(spec, run_folder) for spec in specs}
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}


def load(specs: Sequence[str], run_folder: Path | None) -> list[OwnMetric]:
    """The functions. ConfigError for a file that is not there or fails, or has no such function."""
    wrong = list(problems(specs, run_folder))
    if wrong:
        raise ConfigError("\n".join(wrong))
    loaded: list[OwnMetric] = []
    for spec in specs:
        path, name = source(spec, run_folder), spec.rpartition(":")[2]
        defined = execute(path, flag=f"metrics={spec!r}:", defines=name)
        function: Any = defined.get(name)
        if not callable(function):
            own = sorted(key for key, one in defined.items() if callable(one) and key[:1] != "_")
            hint = nearest(name, own) if own else "It defines none."
            raise ConfigError(f"metrics={spec!r}: {path} defines no function {name!r}. {hint}")
        loaded.append(OwnMetric(spec, function))
    return loaded


def try_out(metrics: Sequence[OwnMetric], rows: Rows) -> list[OwnMetric]:
    """The metrics, each with the names of its numbers. ConfigError for one that raises, or gives
    anything but finite numbers, on these few rows: predicted are their references, then nothing.
    """
    tried: list[OwnMetric] = []
    for metric in metrics:
        names: dict[str, None] = {}
        of_rows = ([(row["answers"] or [""])[0] for row in rows], ["" for _ in rows])
        for predictions in of_rows:
            values, problem = _call(metric, predictions, rows)
            if problem:
                raise ConfigError(
                    f"metrics={metric.spec!r}: tried on {len(rows)} validation rows, it {problem}; "
                    "want a dictionary of finite numbers by name, for texts of any kind. Mend it "
                    "in the file."
                )
            names |= dict.fromkeys(values)
        tried.append(OwnMetric(metric.spec, metric.function, tuple(names)))
    return tried


def scores(
    metrics: Sequence[OwnMetric], predictions: Sequence[str], rows: Rows
) -> dict[str, float]:
    """Every number of every metric as "style/length". One that fails is told, and its numbers are
    then NaN: a run goes on without them.
    """
    numbers: dict[str, float] = {}
    for metric in metrics:
        values, problem = _call(metric, predictions, rows)
        if problem:
            log.warning("metrics=%r: it %s; left out of this evaluation", metric.spec, problem)
        numbers |= dict.fromkeys(metric.names, math.nan) | values
    return numbers


def _call(
    metric: OwnMetric, predictions: Sequence[str], rows: Rows
) -> tuple[dict[str, float], str]:
    """(the numbers of a metric, ""), or ({}, what went wrong)."""
    own_rows = copy.deepcopy([dict(row) for row in rows])  # a function may change what it gets
    references = [list(row["answers"]) for row in rows]
    try:
        result: Any = metric.function(list(predictions), references, own_rows)
    except (Exception, SystemExit) as error:  # any: it is the user's code
        return {}, f"raised {type(error).__name__}: {error}"
    if not isinstance(result, Mapping):
        return {}, f"returned {result!r:.80}"
    numbers: dict[str, float] = {}
    for key, value in result.items():  # pyright: ignore[reportUnknownVariableType]
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not isinstance(key, str) or not key or not is_number or not math.isfinite(value):
            return {}, f"returned {key!r}: {value!r:.80}"
        numbers[f"{metric.name}/{key}"] = float(value)
    return (numbers, "") if numbers else ({}, "returned no number")
