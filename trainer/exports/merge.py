"""Folds the adapters of an export into their base."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from trainer import tasks
from trainer.errors import ConfigError
from trainer.exports import card, record
from trainer.files.atomic import refusals
from trainer.models import adapters
from trainer.protocol.task import Places

if TYPE_CHECKING:
    from trainer.config.schema import Experiment

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
    made = record.read(folder)
    if made is None:
        raise ConfigError(
            f"{folder} has no {record.NAME}, which says what was trained. Give best/ or final/ of "
            "a run."
        )
    cfg = tasks.parse(made.experiment, source=str(folder / record.NAME))
    if cfg.lora is None or not cfg.exports_adapters:
        raise ConfigError(f"{folder} holds a whole model and no adapters: nothing is to be merged.")
    weights = {
        name: parameter.detach()
        for name, parameter in tasks.load(cfg, places).load_export(folder).named_parameters()
        if parameter.requires_grad
    }
    values = {**made.experiment, "lora": {**made.experiment["lora"], "export": "merged"}}
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with refusals(out):
            tasks.load(_merging(tasks.parse(values)), places).export(weights, temporary)
            files = record.digests(temporary)
            own = made.model_copy(update={"experiment": values, "files": files})
            record.write(temporary, own)
            card.write(temporary, own)
            os.replace(temporary, out)
    finally:  # on a full disk these files take the room
        shutil.rmtree(temporary, ignore_errors=True)


def _merging(cfg: Experiment) -> Experiment:
    """The experiment with adapters of the kind that its export holds."""
    if cfg.lora is None or not adapters.changes_base(cfg.lora):
        return cfg
    return cfg.model_copy(update={"lora": adapters.beside_the_whole_base_as(cfg.lora)})
