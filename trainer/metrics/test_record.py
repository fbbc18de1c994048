"""test.json of a run (--test): which weights the scores of its test split are of. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from trainer.files.atomic import read_json, sha256_of

FILE = "test.json"


def tested_model(run_folder: Path) -> str:
    """The export that --test scores: "best", or "final" where a run has no best/; "candidate" where
    a gate kept that back.
    """
    names = ("best", "final", "candidate")
    return next((name for name in names if (run_folder / name).is_dir()), "final")


def weights_of(model: Path) -> str | None:
    """What tells the weights of an export from others: the digest of its record, which has the
    digest of each file.
    """
    path = model / "lathe.json"
    return sha256_of(path) if path.is_file() else None


def is_tested(run_folder: Path) -> bool:
    """Whether the test split was scored with the weights that are exported now."""
    before: Any = read_json(run_folder / FILE)
    weights = weights_of(run_folder / tested_model(run_folder))
    return isinstance(before, dict) and (weights == cast("dict[str, Any]", before).get("weights"))


def lacks_test(run_folder: Path, words: Sequence[str]) -> bool:
    """Whether the words of a command ask for the scores of the test split (--test), and the weights
    that the run has exported have none.
    """
    return "--test" in words and not is_tested(run_folder)
