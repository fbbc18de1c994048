"""A trained summariser: programs that load its export, and its summaries of unlabelled
documents.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.models.adapters import loading
from trainer.protocol.abilities import Usage
from trainer.tasks.generated import cut_row as cut_row
from trainer.tasks.generated import predict as predict
from trainer.tasks.summariser import data as documents
from trainer.tasks.summariser.config import Config

if TYPE_CHECKING:
    from trainer.protocol.task import Row

_WRITE = """\
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

FOLDER = "."  # of this card
{loading}
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
document = "Ada keeps the red key in the cellar. The attic is empty."
ids = tokenizer({prefix!r} + document.strip(), add_special_tokens=False)["input_ids"]
ids = torch.tensor([ids[:{room}] + [tokenizer.eos_token_id]])
made = model.generate(ids, attention_mask=torch.ones_like(ids))
ends = model.generation_config.eos_token_id  # of generation_config.json: one id, or several
ends = ends if isinstance(ends, list) else [ends]
new = made[0, 1:].tolist()
new = new[: next((at for at, token in enumerate(new) if token in ends), len(new))]
summary = tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
print(summary.strip())
"""


def usage(cfg: Config, folder: Path) -> Usage:
    """Programs and limits of the export in `folder`."""
    data = cfg.data
    code = _WRITE.format(
        loading=loading("AutoModelForSeq2SeqLM", folder),
        prefix=data.prefix,
        room=data.source_tokens - 1,
    )
    limits = [
        f"Of a document it reads the first {data.source_tokens} tokens, the prefix among them; a "
        "summary may say what the document does not.",
    ]
    return Usage("transformers", [("Load it", code)], limits)


def row_to_predict(task: Any, raw: Row, place: str) -> Row:
    """The row of an object's document; summaries are not read."""
    return documents.document_row(raw, task.cfg.data, place)
