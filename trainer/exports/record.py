"""lathe.json of an export: the experiment that made it, its data, its scores, and its weights by
digest.

It holds nothing that differs from machine to machine or from time to time, so that the same weights
have the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.block import Strict, validate
from trainer.config.identity import exp_id
from trainer.errors import ConfigError
from trainer.files.atomic import read_json, sha256_of
from trainer.version import lathe_version

if TYPE_CHECKING:
    from trainer.protocol.task import Task

NAME = "lathe.json"
FORMAT = 1
_WEIGHTS = (".safetensors", ".pt", ".bin")
_CODE = ".py"


class Record(Strict):
    """What lathe.json holds."""

    format: int = FORMAT
    lathe: str
    """The version that wrote it."""
    exp_id: str
    """Of the run folder."""
    experiment: dict[str, Any]
    """The dictionary that was trained."""
    base_fingerprint: str = ""
    """Of the frozen weights that the trained ones belong to; "": all are trained, and here."""
    data: dict[str, Any]
    """By split: the digest of its rows, how many, how many tokens."""
    metrics: dict[str, str] = {}  # noqa: RUF012 (the block is frozen)
    """sha256 of each file of the user's own metrics; left out where there is none."""
    scores: dict[str, float]
    """Of the last evaluation before the export, and its step."""
    licence: str | None = None
    """Of the base, as its own card says; None: unknown."""
    files: dict[str, str]
    """sha256 of each file of weights and of code."""
    average: dict[str, Any] | None = None
    """What the weights are an average of: {"ema": 0.999} of the steps before, by train.ema, or
    {"of": [...]}, what `lathe average` read. None: they are those of one step.
    """


def of_run(folder: Path, *, values: dict[str, Any], task: Task, run_folder: Path) -> Record:
    """The record of an export that a run has just written into `folder`."""
    data = read_json(run_folder / "data.json") or {}
    identity, splits = data.get("identity", {}), data.get("splits", {})
    try:
        entries = json.loads((run_folder / "score_list.json").read_text())
    except (OSError, ValueError):
        entries = []
    scores: dict[str, float] = entries[-1] if entries else {}
    return Record(
        lathe=lathe_version(),
        exp_id=exp_id(values),
        experiment=values,
        base_fingerprint=task.fingerprint(),
        data={name: {"digest": identity.get(name), **splits[name]} for name in sorted(splits)},
        metrics=data.get("metrics", {}),
        scores=dict(sorted(scores.items())),
        licence=_licence(values["base"]),
        files=digests(folder),
        average=None if task.cfg.train.ema is None else {"ema": task.cfg.train.ema},
    )


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file of weights or code below a folder, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (*_WEIGHTS, _CODE))
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}


def write(folder: Path, record: Record) -> None:
    """Write lathe.json."""
    values = record.model_dump()
    if not record.metrics:
        del values["metrics"]
    if record.average is None:  # earlier versions know no such key
        del values["average"]
    (folder / NAME).write_text(json.dumps(values, indent=2) + "\n")


def read(folder: Path) -> Record | None:
    """What a folder says of itself; None for one of an older version, or of another program.

    ConfigError for a record that is torn, or newer than this program.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        values: Any = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: {error}. Export the model again.") from None
    if isinstance(values, dict) and values.get("format") != FORMAT:
        raise ConfigError(
            f"{path}: its format is {values.get('format')!r}, want {FORMAT}. Use the version of "
            f"Lathe that wrote it ({values.get('lathe')}), or a newer one."
        )
    return validate(Record, values, source=str(path))


def _licence(base: Any) -> str | None:
    """What the card of a base that is a folder says its licence is."""
    card = Path(base) / "README.md" if isinstance(base, str) else None
    if card is None or not card.is_file():
        return None
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:]:
        if line.strip() == "---":
            return None
        name, _, value = line.partition(":")
        if name == "license" and value.strip():
            return value.strip()
    return None
