"""Every family of bases in every task, as numbers in one table.

    python benchmarks/families.py [--task TASK ...] [--family NAME ...] [--out FILE]

All are tiny, with random weights (tests/bases.py). The columns:

- loads: the base is read as it was written from one file, shards, pytorch_model.bin alone, and
  bf16; how many of the four are.
- loss = stock: the loss (vera: states, retriever: vectors) against stock transformers' own.
- packed = padded: the same of packed rows against padded ones. Of a base whose rows are
  padded (marked *): of rows together against each alone.
- ZeRO-3: the largest difference between four losses on two ranks at ZeRO-3, from a folder of shards
  with a padded vocabulary, and those on one rank at ZeRO-0.
- plan: the peak of a training step that the plan predicts, against what is really allocated.
- export: stock transformers loads what both runs exported, and has the weights of the file.
  cross_attention: the added layers alone are exported, and read back.

Differences are relative to the largest number that is compared. Prints a row as soon as it is
known; ends with 1 when a cell is not within its bound. Half an hour on two cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout

from memory_plan import TOLERANCE, predicted_bytes, real_bytes

from tests import families
from tests.facts import write_facts
from tests.ranks import run_alone, run_on_ranks

BOUNDS = {"loss = stock": 1e-5, "packed = padded": 1e-6, "ZeRO-3": 1e-6, "plan": TOLERANCE}


@dataclass(frozen=True)
class Cell:
    """What stands in the table, and whether it is within its bound."""

    text: str
    is_good: bool

    @classmethod
    def of(cls, column: str, value: float) -> Cell:
        text = f"{value:+.2%}" if column == "plan" else f"{value:.0e}"
        is_good = abs(value) <= BOUNDS[column]  # False of NaN
        return cls(text if is_good else f"**{text}**", is_good)


@dataclass(frozen=True)
class Family:
    """One line of the table."""

    task: str
    name: str
    facts: Path
    folder: Path  # of its own

    def cells(self) -> dict[str, Cell]:
        """Every column, in its order."""
        measured: dict[str, Callable[[], Cell]] = {
            "loads": self._loads,
            "loss = stock": partial(self._compared, "loss = stock", "with_stock"),
            "packed = padded": partial(self._compared, "packed = padded", "with_padded"),
        }
        found = {column: _tried(cell) for column, cell in measured.items()}
        return found | self._trained() | {"plan": _tried(self._plan)}

    def _loads(self) -> Cell:
        good = [
            files
            for files in families.FILES
            if not run_alone(
                families.wrongly_read, self.task, self.name, files, self.folder / files
            )
        ]
        is_good = len(good) == len(families.FILES)
        return Cell(f"{len(good)} of {len(families.FILES)}", is_good)

    def _compared(self, column: str, function: str) -> Cell:
        got, want = run_alone(getattr(families, function), self.task, self.name)
        cell = Cell.of(column, _distance(got, want))
        is_padded = column == "packed = padded" and families.is_padded(self.task, self.name)
        return Cell(f"{cell.text}*" if is_padded else cell.text, cell.is_good)

    def _trained(self) -> dict[str, Cell]:
        try:
            values = families.experiments(self.task, (self.name,), self.facts, self.folder / "b")
            given = (values, self.facts)
            (alone,) = run_on_ranks(1, families.runs, *given, self.folder / "alone", 0)
            together = run_on_ranks(2, families.runs, *given, self.folder / "together", 3)[0]
        except AssertionError as error:
            return dict.fromkeys(("ZeRO-3", "export"), _failure(error))
        (one, two) = alone[self.name], together[self.name]
        return {
            "ZeRO-3": Cell.of("ZeRO-3", _distance(two[1], one[1])),
            "export": _tried(partial(self._exported, values[self.name], [one[0], two[0]])),
        }

    def _exported(self, values: dict[str, Any], run_folders: list[Path]) -> Cell:
        for run_folder in run_folders:
            run_alone(families.read_again, values, self.facts, run_folder / "final")
        return Cell("loads", True)

    def _plan(self) -> Cell:
        real, predicted = run_alone(peaks, self.task, self.name, self.facts)
        return Cell.of("plan", predicted / real - 1)


def peaks(task: str, name: str, facts: Path) -> tuple[int, int]:
    """Bytes of a training step: really allocated, and predicted."""
    step = families.TaskStep(task, name, facts)
    return real_bytes(step), predicted_bytes(step)


def _tried(cell: Callable[[], Cell]) -> Cell:
    try:
        return cell()
    except AssertionError as error:  # of a process that failed, with its traceback
        return _failure(error)


def _failure(error: AssertionError) -> Cell:
    print(error, file=sys.stderr)
    return Cell("**failed**", False)


def _distance(got: Any, want: Any) -> float:
    """The largest difference, as a share of the largest number wanted."""
    import torch

    ours, theirs = (torch.as_tensor(x, dtype=torch.float64) for x in (got, want))
    return float((ours - theirs).abs().max() / theirs.abs().max())


COLUMNS = ("loads", "loss = stock", "packed = padded", "ZeRO-3", "plan", "export")


def main() -> None:
    options = _options()
    # the runs write to standard output, too: theirs goes where errors go
    table = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lines = [f"| task | family | {' | '.join(COLUMNS)} |", f"|{'---|' * (len(COLUMNS) + 2)}"]
    print("\n".join(lines), file=table, flush=True)
    is_good = True
    with tempfile.TemporaryDirectory() as temporary:
        facts = write_facts(Path(temporary) / "facts", train=16, valid=11)
        for task, names in families.supported().items():
            for name in names if task in options.task else ():
                if options.family and name not in options.family:
                    continue
                folder = Path(temporary) / "family"
                cells = Family(task, name, facts, folder).cells()
                shutil.rmtree(folder, ignore_errors=True)
                is_good &= all(cell.is_good for cell in cells.values())
                texts = [cells[column].text for column in COLUMNS]
                lines.append(f"| {task} | {name} | {' | '.join(texts)} |")
                print(lines[-1], file=table, flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    if not is_good:
        sys.exit("a cell is not within its bound")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The table of families.")
    known = families.supported()
    parser.add_argument("--task", nargs="+", default=list(known), choices=list(known))
    parser.add_argument("--family", nargs="+", metavar="NAME", help="these only, by their names")
    parser.add_argument("--out", type=Path, help="a file that takes the table")
    return parser.parse_args()


if __name__ == "__main__":
    main()
