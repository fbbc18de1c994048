"""A trained language model: programs that load its export, and what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.models.adapters import are_in
from trainer.protocol.abilities import Usage
from trainer.tasks.causal_lm.config import Config
from trainer.tasks.continuation import cut_row as cut_row
from trainer.tasks.continuation import predict as predict
from trainer.tasks.continuation import row_to_predict as row_to_predict
from trainer.tasks.continuation_program import program


def usage(cfg: Config, folder: Path) -> Usage:
    """Programs and limits of the export in `folder`."""
    is_chat = cfg.data.purpose == "conversation"
    limits = [
        f"It was trained on at most {cfg.data.max_tokens} tokens at a time; what it says may be "
        "wrong.",
        "Of a prompt that fills all positions of the model `python -m trainer predict` leaves out "
        "the beginning; the program above refuses it.",
    ]
    library = "peft" if are_in(folder) else "transformers"
    return Usage(library, [("Load it", program(folder, is_chat=is_chat))], limits)


def language_model(task: Any, model: Any) -> Any:
    """The model of transformers, with its output layer, that continues texts."""
    return model.base
