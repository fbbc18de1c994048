"""A trained language model: programs that load its export, and its continuations of prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.data.padding import pad_right
from trainer.data.readers import fields
from trainer.errors import ConfigError
from trainer.models.adapters import are_in, loading
from trainer.protocol.abilities import Prediction, Usage, by_row
from trainer.runtime import distributed
from trainer.tasks.causal_lm.chat_rows import opened
from trainer.tasks.causal_lm.config import Config
from trainer.tasks.generated import predictions, text_of

if TYPE_CHECKING:
    from torch import nn

    from trainer.protocol.task import Row

_MAX_TOKENS = 256  # of a prediction, without --max_tokens

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


def row_to_predict(task: Any, raw: Row, place: str) -> Row:
    """{"text"}: the text to continue, from messages or a prompt of a conversation, else from prompt
    or text.
    """
    if task.chat is not None:
        return {"text": task.chat.opened(opened(raw, place))}
    name, text = fields.first_given(raw, ("prompt", "text"))
    return {"text": fields.text(text, place, name)}


@torch.no_grad()
def predict(
    task: Any, model: nn.Module, rows: Sequence[Row], how: Prediction
) -> list[dict[str, Any]]:
    """Continuations as generated.predictions returns them. A prompt too long for the model loses
    its beginning.
    """
    base: Any = model.base
    search, most = how.search, how.max_tokens or _MAX_TOKENS
    ids = task.tokenizer([row["text"] for row in rows], add_special_tokens=False)["input_ids"]
    room = (getattr(base.config, "max_position_embeddings", None) or 1 << 30) - most
    if room < 1:
        raise ConfigError(
            f"--max_tokens {most}: the model has {room + most} positions, which leaves none for a "
            f"prompt. Use at most {room + most - 1}."
        )
    reversed_ids, mask = pad_right([row[-room:][::-1] for row in ids], task.pad)
    device = distributed.device()
    prompts, mask = reversed_ids.flip(1).to(device), mask.flip(1).to(device)
    sampling = {"temperature": search.temperature, "top_p": search.top_p, "top_k": 0}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        digest = hashlib.sha256(f"{search.seed}:{ids}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        tokens = base.generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=most,
            num_beams=search.num_beams,
            num_return_sequences=search.num_answers,
            do_sample=search.temperature is not None,
            eos_token_id=[task.turn_end, task.end],
            pad_token_id=task.pad,
            **(sampling if search.temperature is not None else {}),
        )
    written = tokens[:, prompts.shape[1] :].tolist()
    ends = (task.turn_end, task.end)
    texts = [text_of(task.tokenizer, row, ends=ends) for row in written]
    return predictions(by_row(texts, search))
