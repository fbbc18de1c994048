"""How others load an exported language model, for its card."""

from __future__ import annotations

from pathlib import Path

from trainer.models.adapters import are_in, loading
from trainer.tasks.abilities import Usage
from trainer.tasks.causal_lm.config import Config

_START = """\
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = "."  # of this card
{loading}
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
"""
_CHAT = """\
messages = [{"role": "user", "content": "Where is the red key?"}]
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
"""
_TEXT = """\
text = "Where is the red key?"
"""
_WRITE = """\
ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
print(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
"""


def usage(cfg: Config, folder: Path) -> Usage:
    """Programs and limits of the export in `folder`."""
    start = _START.format(loading=loading("AutoModelForCausalLM", folder))
    code = start + (_CHAT if cfg.data.source == "chat" else _TEXT) + _WRITE
    limits = [
        f"It was trained on at most {cfg.data.max_tokens} tokens at a time; what it says may be "
        "wrong.",
    ]
    return Usage("peft" if are_in(folder) else "transformers", [("Load it", code)], limits)
