"""How others load an exported model of this task, for its card."""

from __future__ import annotations

from pathlib import Path

from trainer.models import adapters
from trainer.tasks.abilities import Usage
from trainer.tasks.cross_attention.config import Config

_READ = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = "."  # of this card
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
question = "Where is the red key?"
context = model.read(tokenizer, ["Ada keeps the red key in the cellar."]{asked})
print(model.answer(tokenizer, question, context)){again}
"""
_AGAIN = """
print(model.answer(tokenizer, "Who has a key?", context))  # the context is not read again"""


def usage(cfg: Config, folder: Path) -> Usage:
    """Programs and limits of the export in `folder`."""
    is_asked = cfg.data.question_on_context
    code = _READ.format(
        asked=", question=question" if is_asked else "", again="" if is_asked else _AGAIN
    )
    limits = [
        "`modeling_cross_attention.py` in this folder is the model's code; transformers runs it "
        "because of `trust_remote_code=True`. Read it first.",
        "It answers from the contexts that it is given, and knows of no others; what it "
        "says may be wrong.",
    ]
    if not (folder / "base").is_dir():
        limits.append(
            "The base is not in this folder: `config.json` says where it is expected. "
            "`python -m trainer export cross_attention FOLDER --out NEW --merge` writes a folder "
            "that holds it."
        )
    if adapters.are_in(folder):
        limits.append(
            "Adapters beside the layers belong to the decoder; loading them needs peft, and a "
            "local folder: download one from the Hub with `huggingface_hub.snapshot_download`."
        )
    return Usage("transformers", [("Load it", code)], limits)
