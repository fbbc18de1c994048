"""A model that was trained on preferences: programs that load its export, and what it makes of an
answer: a reward, or its log-probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.errors import ConfigError, DataError
from trainer.models.adapters import are_in, loading
from trainer.models.head import HEAD_FILE
from trainer.protocol.abilities import CutRow, Prediction, Usage
from trainer.protocol.task import Cut
from trainer.runtime.batch import to_device
from trainer.tasks.preference import rows as rows_of_task
from trainer.tasks.preference.config import Config

if TYPE_CHECKING:
    from torch import nn

    from trainer.protocol.task import Row

_ANSWERS = """\
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = "."  # of this card
{loading}
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
text = "Where is the red key?"
prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
made = model.generate(**prompt, max_new_tokens=32, do_sample=False)
print(tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
"""
_SCORES = """\
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

FOLDER = "."  # of this card
{loading}
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
head = load_file(FOLDER + "/{head}")
text = "Where is the red key? In the cellar." + tokenizer.eos_token
ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
with torch.no_grad():
    last = model(**ids)[0][0, -1].float()
print(float(head["weight"].float() @ last))  # the reward
"""


def usage(cfg: Config, folder: Path) -> Usage:
    """Programs and limits of the export in `folder`."""
    is_reward = cfg.preference.loss == "reward"
    kind = "AutoModel" if is_reward else "AutoModelForCausalLM"
    program = (_SCORES if is_reward else _ANSWERS).format(
        loading=loading(kind, folder), **({"head": HEAD_FILE} if is_reward else {})
    )
    what = (
        "A reward says how well an answer fits what people preferred in its training; only the "
        "difference of two answers to one prompt has a meaning."
        if is_reward
        else "It learnt which of two answers people prefer; what it says may be wrong."
    )
    limits = [f"It was trained on at most {cfg.data.max_tokens} tokens of prompt and answer.", what]
    return Usage("peft" if are_in(folder) else "transformers", [("Load it", program)], limits)


def row_to_predict(task: Any, raw: Row, place: str) -> Row:
    """{"ids", "scored"} of an object with "prompt" and "completion", as the task writes them."""
    if raw.get("prompt") is None or raw.get("completion") is None:
        raise DataError(
            f"{place}: want 'prompt' and 'completion', the answer that is scored (keys: "
            f"{', '.join(raw) or 'none'}).",
            place=place,
        )
    write = rows_of_task.text if task.chat is None else rows_of_task.conversation
    answer = write(raw["prompt"], raw["completion"], raw, place)
    return dict(task.whole_answers([answer])[0])


def cut_row(task: Any, model: nn.Module, row: Row, how: Prediction) -> CutRow:
    """What data.max_tokens cuts off an answer with its prompt."""
    return CutRow({"answers": Cut("data.max_tokens", task.cfg.data.max_tokens, [len(row["ids"])])})


@torch.no_grad()
def predict(
    task: Any, model: nn.Module, rows: Sequence[Row], how: Prediction
) -> list[dict[str, Any]]:
    """{"reward"} of each answer by a reward model; else {"log_probability", "tokens"}."""
    cut = [task.cut_answer(row) for row in rows]
    batch = task.read_answers([ids for ids, _ in cut], [scored for _, scored in cut])
    out = model(**to_device(batch))
    if "scores" in out:
        return [{"reward": score} for score in out["scores"].double().tolist()]
    pairs = zip(out["logps"].double().tolist(), cut, strict=True)
    return [{"log_probability": one, "tokens": sum(scored[1:])} for one, (_, scored) in pairs]


def language_model(task: Any, model: Any) -> Any:
    """The model of transformers, with its output layer, that continues texts. ConfigError for a
    reward model, which has none.
    """
    if task.how.loss == "reward":
        raise ConfigError(
            "a reward model writes no texts: it has a score in place of an output layer. Give a "
            "model that was trained by another preference.loss."
        )
    return model.base
