"""The program of a card that loads an exported language model and has it continue a prompt."""

from __future__ import annotations

from pathlib import Path

from trainer.data import vocabulary
from trainer.data.chat.chat_template import ChatTemplate
from trainer.models.adapters import loading

_START = """\
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = "."  # of this card
{loading}
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
"""
_CHAT = """\
messages = [{{"role": "user", "content": "Where is the red key?"}}]
text = tokenizer.apply_chat_template(
    messages, tokenize=False, add_generation_prompt=True{more}
)
ids = tokenizer(text, add_special_tokens=False)["input_ids"]
"""
_ON_DAY = ', date_string="26 Jul 2024"'  # the date that chat_template.py has templates write
# A template may ask the clock of transformers: it stands still on the same day.
_STILL = """\
from datetime import datetime

from transformers.utils import chat_template_utils


class Day(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


chat_template_utils.datetime = Day
"""
_TEXT = """\
text = "Where is the red key?"
ids = tokenizer(text, add_special_tokens=False)["input_ids"]
"""
_OPENED = """\
if ids[:1] != {opening}:
    ids = {opening} + ids  # every text begins with this token, once
"""
_WRITE = """\
most = 32  # tokens to write
positions = getattr(model.config, "max_position_embeddings", None)
if positions is not None:
    most = min(most, positions - len(ids))
if most < 1:
    raise ValueError(f"the prompt has {{len(ids)}} tokens, want 1 to {{positions - 1}}")
prompt = torch.tensor([ids])
made = model.generate(
    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=most, do_sample=False
)
new = made[0, len(ids) :].tolist()
ends = model.generation_config.eos_token_id  # of generation_config.json: one id, or several
ends = ends if isinstance(ends, list) else [ends]
new = new[: next((at for at, token in enumerate(new) if token in ends), len(new))]
answer = tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
print(answer{blank})
"""


def program(folder: Path, *, is_chat: bool) -> str:
    """The program for the export in `folder`. is_chat: a prompt is a turn of a conversation."""
    tokenizer = vocabulary.load_tokenizer(str(folder), data_path=None, cache_dir=Path("tmp-cache"))
    opening = vocabulary.opening_of(tokenizer)
    start = _START.format(loading=loading("AutoModelForCausalLM", folder))
    prompt = _TEXT + (_OPENED.format(opening=opening) if opening else "")
    if is_chat:
        has_date = "date_string" in str(tokenizer.chat_template)
        prompt = _CHAT.format(more=_ON_DAY if has_date else "")
        if "strftime_now" in str(tokenizer.chat_template):
            prompt = _STILL + prompt
    closing = ChatTemplate(tokenizer, "of the export").closing if is_chat else ""
    blank = '.removeprefix(" ")' if is_chat else ""
    write = _WRITE.format(blank=blank + (f".removesuffix({closing!r})" if closing else ""))
    return start + prompt + write
