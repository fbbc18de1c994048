"""Folds the adapters of an export into their base."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainer.errors import ConfigError
from trainer.exports import card, record
from trainer.files.atomic import refusals
from trainer.protocol.task import Places
from trainer.tasks.merged_base import write_whole

_EXPORTS = ("best", "final")


def merge(folder: Path, out: Path, places: Places) -> None:
    """Write the whole model of an export with adapters to `out`, as a run with
    "lora": {"export": "merged"} would have written it.

    folder: best/ or final/ of a run, or the run's folder, of which best/ comes before final/.
    places: where the base and the tokenizer are read. Raises ConfigError for an export that is no
    folder of ours, or holds no adapters; and when `out` exists.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder. Give best/ or final/ of a run.")
    folder = next((folder / name for name in _EXPORTS if (folder / name).is_dir()), folder)
    if out.exists():
        raise ConfigError(f"--out {out}: it exists already, and nothing is overwritten.")
    source = record.read(folder)
    if source is None:
        raise ConfigError(
            f"{folder} has no {record.NAME}, which says what was trained. Give best/ or final/ of "
            "a run."
        )
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with refusals(out):
            values = write_whole(source.experiment, folder, temporary, places)
            files = record.digests(temporary)
            own = source.model_copy(update={"experiment": values, "files": files})
            record.write(temporary, own)
            card.write(temporary, own)
            os.replace(temporary, out)
    finally:  # on a full disk these files take the room
        shutil.rmtree(temporary, ignore_errors=True)
