"""Uses a trained verifier: fits its temperature and stores it with the model, and scores
statements.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.files.atomic import write_json
from trainer.files.packages import require
from trainer.models.head import HEAD_FILE
from trainer.runtime.batch import to_device
from trainer.tasks.vera import pictures
from trainer.tasks.vera.calibration import Calibration, Objective, calibrate, scores_of
from trainer.tasks.vera.metrics import LABEL, LOGIT, TASK
from trainer.tasks.vera.model import DESCRIPTION, Verifier, read_temperature

if TYPE_CHECKING:
    from trainer.tasks.vera.task import Task

log = logging.getLogger(__name__)

POOL = "statements"  # the pool of Task.scores whose rows are the scored statements
_TOGETHER = 64  # statements in one forward


def calibrate_model(
    folder: Path, table: Tensor, *, split: str, objective: Objective, report: Path
) -> Calibration:
    """Fit the temperature of the model in `folder` to a table of scored statements (see
    metrics.statement_metrics) and store it in the folder. All tasks have the same weight.

    It writes calibration.json, reliability.png and scores.png into `report`. ConfigError when the
    folder holds no verifier of ours, and without the extra `plots`.
    """
    require("matplotlib", "plots")
    if not (folder / HEAD_FILE).is_file():
        raise ConfigError(
            f"{folder} holds no {HEAD_FILE}, so it is no trained verifier. Give a best/ or "
            "final/ folder."
        )
    rows = table.numpy()
    numbers = rows[:, TASK].astype(np.int64)
    weights = 1.0 / np.bincount(numbers)[numbers]
    calibration = calibrate(
        rows[:, LOGIT], rows[:, LABEL], split=split, objective=objective, weights=weights
    )
    report.mkdir(parents=True, exist_ok=True)
    after = scores_of(rows[:, LOGIT], temperature=calibration.temperature)
    pictures.reliability_diagram(
        report / "reliability.png", scores_of(rows[:, LOGIT]), after, rows[:, LABEL]
    )
    pictures.score_histogram(report / "scores.png", after, rows[:, LABEL])
    write_json(report / "calibration.json", asdict(calibration))
    write_json(folder / DESCRIPTION, {**_describe(folder), "temperature": calibration.temperature})
    log.info("%s: temperature %.4f; pictures in %s", folder, calibration.temperature, report)
    return calibration


def _describe(folder: Path) -> dict[str, object]:
    path = folder / DESCRIPTION
    return json.loads(path.read_text()) if path.is_file() else {}


@torch.no_grad()
def plausibilities(
    task: Task, model: Verifier, texts: Sequence[str], *, folder: Path
) -> Iterator[float]:
    """How plausible each text is, 0 to 1, in their order; a generator.

    The temperature is the one that the model's `folder` stores.
    """
    temperature = read_temperature(folder)
    for start in range(0, len(texts), _TOGETHER):
        batch = task.read([task.statement_ids(text) for text in texts[start : start + _TOGETHER]])
        logits_S = model(**to_device(batch))["logits"]
        yield from scores_of(logits_S.double().cpu(), temperature=temperature).tolist()
