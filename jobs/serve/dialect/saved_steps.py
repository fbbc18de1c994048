"""The saved steps of a run of which a model can be made: whole checkpoints, and exported ones."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, cast

from jobs.record.paths import RunFolder
from trainer.config.origin.continues import MANIFEST
from trainer.files.atomic import open_file

VERSIONS = (1, 2)  # of a manifest; trainer/training/checkpoint.py reads the same ones
_STEP = re.compile(r"step-(\d+)")
_EXPORTED = "lathe.json"


def exportable_steps(run: RunFolder) -> dict[int, float]:
    """step -> when it was saved, in seconds since 1970, of the steps whose checkpoint is whole by
    its names and sizes, and of those that are exported already; the newest last.
    """
    steps: dict[int, float] = {}
    for folder, mark in ((run.path / "checkpoints", MANIFEST), (run.path, _EXPORTED)):
        for step, path in _folders(folder):
            is_whole = mark == _EXPORTED or _is_whole(path, step)
            try:
                at = os.stat(path / mark).st_mtime
            except OSError:
                continue
            if is_whole:
                steps[step] = min(at, steps.get(step, at))
    return dict(sorted(steps.items()))


def _folders(parent: Path) -> list[tuple[int, Path]]:
    try:
        names = os.listdir(parent)
    except OSError:
        return []
    matches = ((_STEP.fullmatch(name), name) for name in names)
    return [(int(match[1]), parent / name) for match, name in matches if match]


def _is_whole(folder: Path, step: int) -> bool:
    """Whether a checkpoint holds what its manifest lists, by names and sizes."""
    try:
        with open_file(folder / MANIFEST) as file:
            manifest: Any = json.loads(file.read())
        if manifest["version"] not in VERSIONS or manifest["step"] != step:
            return False
        files = cast("list[dict[str, Any]]", manifest["files"])
        return all(os.stat(folder / one["name"]).st_size == one["size"] for one in files)
    except (OSError, ValueError, KeyError, TypeError):
        return False
