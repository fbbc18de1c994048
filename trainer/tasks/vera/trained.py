"""A trained verifier: programs that load its export, and its scores for unlabelled statements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.data.readers import fields
from trainer.models.head import HEAD_FILE
from trainer.protocol.abilities import CutRow, Prediction, Usage
from trainer.protocol.task import Cut
from trainer.runtime.batch import to_device
from trainer.tasks.vera.calibration import scores_of
from trainer.tasks.vera.config import Config

if TYPE_CHECKING:
    from torch import nn

    from trainer.protocol.task import Row

_SCORE = """\
from transformers.dynamic_module_utils import get_class_from_dynamic_module

FOLDER = "."  # of this card, or a Hub id
Scorer = get_class_from_dynamic_module("plausibility.PlausibilityScorer", FOLDER)
scorer = Scorer.from_pretrained(FOLDER)
statements = ["Ada keeps the red key in the cellar.", "The attic keeps Ada in the red key."]
print(scorer(statements))  # 0 to 1 each
"""


def usage(cfg: Config, folder: Path) -> Usage:
    """Programs and limits of the export in `folder`."""
    limits = [
        f"It reads the first {cfg.data.max_tokens} tokens of a statement. A score says how "
        "plausible a statement looks to it, not whether it is true.",
    ]
    if not (folder / HEAD_FILE).is_file():
        limits.append(
            "Head, bias and temperature stand in unused rows of the embedding, as in "
            "liujch1998/vera: its programs unpack them."
        )
        return Usage("transformers", [], limits)
    limits += [
        "`plausibility.py` in this folder is the code that is run. Read it first.",
        "Scores are as calibrated as the data that `vera.json`'s temperature was fitted on; a "
        "temperature of 1.0 means that nobody has.",
    ]
    return Usage("transformers", [("Load it, and score statements", _SCORE)], limits)


def row_to_predict(task: Any, raw: Row, place: str) -> Row:
    """{"statement"} of an object with one, or {"statements"} of an object with several."""
    if raw.get("statements") is not None:
        return {"statements": fields.texts(raw["statements"], place, "statements")}
    return {"statement": fields.required_text(raw, "statement", place)}


def cut_row(task: Any, model: nn.Module, row: Row, how: Prediction) -> CutRow:
    """What data.max_tokens cuts off the statements."""
    lengths = [task.statement_length(text) for text in _statements(row)]
    return CutRow({"statements": Cut("data.max_tokens", task.cfg.data.max_tokens, lengths)})


def _statements(row: Row) -> list[str]:
    return row["statements"] if "statements" in row else [row["statement"]]


@torch.no_grad()
def predict(
    task: Any, model: nn.Module, rows: Sequence[Row], how: Prediction
) -> list[dict[str, Any]]:
    """{"score"} for a row of one statement, 0 to 1; {"scores"} for a row of several."""
    texts = [text for row in rows for text in _statements(row)]
    batch = task.read([task.statement_ids(text) for text in texts])
    logits_S = model(**to_device(batch))["logits"].double().cpu()
    scores = iter(scores_of(logits_S, temperature=task.temperature).tolist())
    return [
        {"scores": [next(scores) for _ in row["statements"]]}
        if "statements" in row
        else {"score": next(scores)}
        for row in rows
    ]
