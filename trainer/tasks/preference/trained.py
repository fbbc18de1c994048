"""A model that was trained on preferences: programs that load its export, and what it makes of an
answer: a reward, or its log-probability.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from trainer.data.readers import fields
from trainer.errors import ConfigError, DataError
from trainer.models import encoder_decoder
from trainer.models.adapters import ADAPTER, are_in, loading
from trainer.models.families import SUMMARISERS
from trainer.models.head import HEAD_FILE
from trainer.protocol.abilities import CutRow, GeneratedText, Prediction, Usage, by_row
from trainer.protocol.task import Cut
from trainer.runtime.batch import to_device
from trainer.tasks import continuation
from trainer.tasks.continuation_program import program
from trainer.tasks.generated import predictions, refuse_sampling, text_of
from trainer.tasks.preference import rows as rows_of_task
from trainer.tasks.preference.config import Config

if TYPE_CHECKING:
    from torch import nn

    from trainer.protocol.task import Row

_ANSWERS = """\
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

FOLDER = "."  # of this card
{loading}
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
prompt = "Where is the red key?"
ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
ids = torch.tensor([ids[:{room}] + [tokenizer.eos_token_id]])
made = model.generate(
    ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False
)
ends = model.generation_config.eos_token_id  # of generation_config.json: one id, or several
ends = ends if isinstance(ends, list) else [ends]
new = made[0, 1:].tolist()
new = new[: next((at for at, token in enumerate(new) if token in ends), len(new))]
print(tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False))
"""
_SCORES = """\
import torch
from safetensors.torch import load_file
from transformers import {kind}, AutoTokenizer

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
    is_reward, limit = cfg.preference.loss == "reward", cfg.data.max_tokens
    is_encoder_decoder = _is_encoder_decoder(folder)
    if is_reward:
        kind = "AutoModelForTextEncoding" if is_encoder_decoder else "AutoModel"
        code = _SCORES.format(loading=loading(kind, folder), kind=kind, head=HEAD_FILE)
    elif is_encoder_decoder:
        code = _ANSWERS.format(loading=loading("AutoModelForSeq2SeqLM", folder), room=limit - 1)
    else:
        code = program(folder, is_chat=cfg.data.source == "chat")
    what = (
        "A reward says how well an answer fits what people preferred in its training; only the "
        "difference of two answers to one prompt has a meaning."
        if is_reward
        else "It learnt which of two answers people prefer; what it says may be wrong."
    )
    limits = [f"It was trained on at most {cfg.data.max_tokens} tokens of prompt and answer.", what]
    return Usage("peft" if are_in(folder) else "transformers", [("Load it", code)], limits)


def _is_encoder_decoder(folder: Path) -> bool:
    """Whether the base of an export is one."""
    said, config = dict[str, Any](), folder / "config.json"
    if are_in(folder):
        said = json.loads((folder / ADAPTER).read_text())
        config = Path(said["base_model_name_or_path"] or "") / "config.json"
    if said.get("task_type") == "SEQ_2_SEQ_LM":
        return True
    return config.is_file() and json.loads(config.read_text())["model_type"] in SUMMARISERS


def row_to_predict(task: Any, raw: Row, place: str) -> Row:
    """Of an object with "prompt" and "completion", an answer that is scored, what the task makes of
    both. Of a prompt alone {"ids", "is_turn"}, which is answered.
    """
    has_prompt, has_answer = (raw.get(name) is not None for name in ("prompt", "completion"))
    if has_prompt and has_answer:
        write = rows_of_task.text if task.chat is None else rows_of_task.conversation
        answer = write(raw["prompt"], raw["completion"], raw, place)
        return dict(task.form.whole([answer])[0])
    if task.continues_prompts and not has_answer:
        return continuation.row_to_predict(task, raw, place)
    if has_answer or task.how.loss == "reward":
        raise DataError(
            f"{place}: want 'prompt' and 'completion', the answer that is scored (keys: "
            f"{', '.join(raw) or 'none'}).",
            place=place,
        )
    prompt = fields.required_text(raw, "prompt", place)
    (whole,) = task.form.whole([rows_of_task.text(prompt, prompt, raw, place)])
    return {"ids": whole["prompt"], "is_turn": False}


def cut_row(task: Any, model: nn.Module, row: Row, how: Prediction) -> CutRow:
    """What data.max_tokens cuts off an answer with its prompt, or off the prompt of an
    encoder-decoder; what the positions of a decoder cut off its prompt.
    """
    if "is_turn" not in row:
        return CutRow(task.form.cuts([row]))
    if task.continues_prompts:
        return continuation.cut_row(task, model, row, how)
    limit = task.cfg.data.max_tokens
    return CutRow({"prompts": Cut("data.max_tokens", limit, [len(row["ids"])])})


@torch.no_grad()
def predict(
    task: Any, model: nn.Module, rows: Sequence[Row], how: Prediction
) -> list[dict[str, Any]]:
    """{"reward"} of each answer by a reward model; else {"log_probability", "tokens"}. Of prompts
    what generated.predictions says.
    """
    numbers: dict[bool, list[int]] = {True: [], False: []}
    for number, row in enumerate(rows):
        numbers["is_turn" in row].append(number)
    of_rows: dict[int, dict[str, Any]] = {}
    for is_prompt, own in numbers.items():
        of_kind = _answer if is_prompt else _score
        if own:
            results = of_kind(task, model, [rows[number] for number in own], how)
            of_rows.update(zip(own, results, strict=True))
    return [of_rows[number] for number in range(len(rows))]


def _score(
    task: Any, model: nn.Module, rows: Sequence[Row], how: Prediction
) -> list[dict[str, Any]]:
    name, form = task.names[0], task.form
    encoded = [form.fields({name: form.cut(row)}) for row in rows]
    out = model(**to_device(form.batch(encoded, [name])))
    if "scores" in out:
        return [{"reward": score} for score in out["scores"].double().tolist()]
    pairs = zip(out["logps"].double().tolist(), encoded, strict=True)
    return [{"log_probability": one, "tokens": form.num_learnt(row, name)} for one, row in pairs]


def language_model(task: Any, model: Any) -> Any:
    """The model of transformers, with its output layer, that continues texts. ConfigError for a
    reward model, which has none, and for an encoder-decoder.
    """
    if not task.continues_prompts:
        raise ConfigError(
            "this model continues no texts: it is a reward model, which has a score in place of an "
            "output layer, or an encoder-decoder. Give a decoder that was trained by another "
            "preference.loss."
        )
    return model.base


def _answer(
    task: Any, model: nn.Module, rows: Sequence[Row], how: Prediction
) -> list[dict[str, Any]]:
    if task.continues_prompts:
        return continuation.predict(task, model, rows, how)
    texts = texts_to_prompts(task, model, rows, how)
    return predictions([[one.text for one in of_row] for of_row in texts])


@torch.no_grad()
def texts_to_prompts(
    task: Any, model: nn.Module, rows: Sequence[Row], how: Prediction
) -> list[list[GeneratedText]]:
    """What an encoder-decoder answers to each prompt of row_to_predict, the likeliest text first.
    ConfigError for a search that draws tokens.
    """
    search, base = how.search, cast("Any", model).base
    refuse_sampling(search, task="preference", texts="answers of an encoder-decoder")
    tokens = encoder_decoder.generate(
        base,
        to_device(task.form.prompts([row["ids"] for row in rows])),
        {
            "num_beams": max(search.num_beams, search.num_answers),
            "num_return_sequences": search.num_answers,
            "max_new_tokens": how.max_tokens or continuation.MAX_TOKENS,
            "do_sample": False,
            "eos_token_id": task.ends,
            "pad_token_id": task.pad,
        },
        recompute_every=None,
    )[:, 1:]
    texts = [text_of(task.tokenizer, row, ends=task.ends) for row in tokens.tolist()]
    return by_row(texts, search)
