"""A saved step of a run as an exported folder, RUN/step-N, beside best/ and final/."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer import tasks
from trainer.averages.frozen import frozen_weights
from trainer.errors import CheckpointError, ConfigError
from trainer.exports import card, record
from trainer.files.atomic import read_json
from trainer.files.build_once import build_once
from trainer.training import checkpoint

if TYPE_CHECKING:
    from trainer.protocol.task import Places

logger = logging.getLogger(__name__)


def export_step(run: Path, step: int, places: Places) -> Path:
    """The folder of a run's saved step as a model, made once by whichever process comes first. It
    stays when the run removes the checkpoint.

    Of a run with train.ema it holds the average of that step. ConfigError for a folder that is no
    run, or without such a step; CheckpointError for a damaged one.
    """

    def build(out: Path) -> None:
        values = read_json(run / "exp_dict.json")
        if values is None:
            raise ConfigError(f"{run} has no exp_dict.json. Give the folder of a run: results/ID.")
        _write(run, step, values, out, places)
        logger.info("step %d of %s exported", step, run)

    return build_once(run / f"step-{step}", build, is_whole=_is_whole)


def _is_whole(folder: Path) -> bool:
    return (folder / record.NAME).is_file()  # which is written last


def _write(run: Path, step: int, values: dict[str, Any], out: Path, places: Places) -> None:
    saved = dict(checkpoint.candidates(run / "checkpoints"))
    folder = saved.get(step)
    if folder is None:
        legal = f"those that are saved: {', '.join(map(str, saved))}" if saved else "none is saved"
        raise ConfigError(
            f"step {step} of {run}: there is no such checkpoint; {legal}. train.keep_last keeps "
            "more of them."
        )
    wrong = checkpoint.problems(folder)
    if wrong:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(wrong)}. Use another saved step.")
    cfg = tasks.parse(values, source=str(run / "exp_dict.json"))
    task = tasks.load(cfg, places)
    weights: dict[str, Tensor] = dict(checkpoint.read_tensors(folder, "weights"))
    if cfg.train.ema is not None:
        averages = checkpoint.read_tensors(folder, "average")
        weights |= {name: averages[name].to(weights[name].dtype) for name in averages}
    task.export(weights | frozen_weights(cfg, task), out)
    made = record.of_run(out, values=values, task=task, run_folder=run)
    made = made.model_copy(update={"scores": _scores(run, step)})
    card.write(out, made)
    record.write(out, made)


def _scores(run: Path, step: int) -> dict[str, float]:
    """The scores of the evaluation at a step; {} where there was none."""
    try:
        entries: list[dict[str, float]] = json.loads((run / "score_list.json").read_text())
    except (OSError, ValueError):
        return {}
    at_step = [one for one in entries if one.get("step") == step]
    return dict(sorted(at_step[-1].items())) if at_step else {}
