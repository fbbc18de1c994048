"""How others load an exported verifier, for its card."""

from __future__ import annotations

from pathlib import Path

from trainer.models.head import HEAD_FILE
from trainer.tasks.abilities import Usage
from trainer.tasks.vera.config import Config

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
