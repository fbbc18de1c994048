"""A trained language model: programs that load its export, and its continuations of prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.data import vocabulary
from trainer.data.chat.chat_template import ChatTemplate
from trainer.data.padding import pad_right
from trainer.errors import ConfigError
from trainer.models.adapters import are_in, loading
from trainer.models.generation.texts import Fit, GrowingText, chance_of, fitted, grown
from trainer.protocol.abilities import (
    GREEDY,
    CutRow,
    Prediction,
    ReplyText,
    Search,
    Usage,
    by_row,
)
from trainer.protocol.task import Cut
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


def usage(cfg: Config, folder: Path) -> Usage:
    """Programs and limits of the export in `folder`."""
    is_chat = cfg.data.purpose == "conversation"
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
    limits = [
        f"It was trained on at most {cfg.data.max_tokens} tokens at a time; what it says may be "
        "wrong.",
        "Of a prompt that fills all positions of the model `python -m trainer predict` leaves out "
        "the beginning; the program above refuses it.",
    ]
    library = "peft" if are_in(folder) else "transformers"
    return Usage(library, [("Load it", start + prompt + write)], limits)


def row_to_predict(task: Any, raw: Row, place: str) -> Row:
    """{"ids", "is_turn"}: the ids to continue (Task.prompt_ids), and whether they are a
    conversation.
    """
    return {"ids": task.prompt_ids(raw, place), "is_turn": is_turn(task, raw)}


def cut_row(task: Any, model: nn.Module, row: Row, how: Prediction) -> CutRow:
    """The prompt that is longer than the model's positions, or that leaves a text too few."""
    base: Any = model.base
    fit, length, limit = _fit(task, base, row, how), len(row["ids"]), _positions(base) - 1
    cut = Cut("positions of the model", limit, [length], kept=length - fit.cut_tokens)
    doubts: list[str] = []
    if fit.cut_tokens:
        doubts = [f"prompts of more than {limit} tokens (the beginning is cut)"]
    elif fit.most < _most(how):
        doubts = [f"prompts that leave fewer than {_most(how)} positions for the text"]
    return CutRow({"prompts": cut}, doubts)


def is_turn(task: Any, raw: Row) -> bool:
    """Whether the prompt of a row is a conversation, in which the assistant speaks next."""
    is_prompt = task.chat is not None and raw.get("prompt") is not None
    return raw.get("messages") is not None or is_prompt


def continuations(
    task: Any,
    base: Any,
    row: Row,
    search: Search,
    *,
    max_tokens: int,
    **more: Any,
) -> list[GrowingText]:
    """search.num_answers texts that continue a row of row_to_predict, not begun yet: the one way
    from a prompt to a text, for predict and the service.

    search: greedy or with a temperature. more: `stops`, `is_told`, `num_likeliest` of GrowingText.
    ConfigError for a prompt without tokens, or that leaves the model no position.
    """
    ids: list[int] = row["ids"]
    limit = _positions(base)
    if not ids or len(ids) >= limit:
        raise ConfigError(f"the prompt has {len(ids)} tokens, want 1 to {limit - 1}")
    room = fitted(ids, positions=limit, most=max_tokens)

    def spell(tokens: Sequence[int]) -> str:
        text = text_of(task.tokenizer, tokens, ends=()).text
        # the training texts of some templates have a blank before the answer
        return text.removeprefix(" ") if row["is_turn"] else text

    return [
        GrowingText(
            prompt=ids,
            most=room.most,
            ends=frozenset(task.ends),
            closing=task.closing if row["is_turn"] else "",
            spell=spell,
            temperature=search.temperature,
            top_p=search.top_p,
            chance=chance_of(search.seed, ids, number),
            **more,
        )
        for number in range(search.num_answers)
    ]


@torch.no_grad()
def predict(
    task: Any, model: nn.Module, rows: Sequence[Row], how: Prediction
) -> list[dict[str, Any]]:
    """Continuations as generated.predictions returns them, of prompts as texts.fitted fits them. A
    prediction that has room for fewer tokens than were asked for says so: "max_tokens".
    """
    base: Any = model.base
    most = _most(how)
    fits = [_fit(task, base, row, how) for row in rows]
    texts = [
        text
        for row, fit in zip(rows, fits, strict=True)
        for text in continuations(task, base, {**row, "ids": fit.ids}, how.search, max_tokens=most)
    ]
    if how.search.num_beams > 1:
        for length in sorted({text.most for text in texts}):  # more would pass the positions
            _search_beams(task, base, [one for one in texts if one.most == length], how.search)
    else:
        for start in range(0, len(texts), len(rows)):  # as many in one forward as there are rows
            for _ in grown(base, texts[start : start + len(rows)], pad=task.pad):
                pass
    of_rows = by_row([text.whole() for text in texts], how.search)
    results = predictions([[one.text for one in of_row] for of_row in of_rows])
    for one, fit in zip(results, fits, strict=True):
        if fit.most < most:
            one["max_tokens"] = fit.most
    return results


@torch.no_grad()
def replies(task: Any, base: Any, rows: Sequence[Row], *, max_tokens: int) -> list[ReplyText]:
    """The likeliest text behind each row of Task.reply_row, of at most max_tokens tokens."""
    texts = [
        text
        for row in rows
        for text in continuations(task, base, row, GREEDY, max_tokens=max_tokens, num_likeliest=1)
    ]
    for _ in grown(base, texts, pad=task.pad):
        pass
    sums = [sum(choice.logprob for choice in text.chosen) for text in texts]
    return [
        ReplyText(text.whole().text, math.exp(total))
        for text, total in zip(texts, sums, strict=True)
    ]


def reply_row(task: Any, ids: Sequence[int], scored: Sequence[int], *, most: int) -> Row | None:
    """What Replies.reply_row says, of the ids of a whole row and which of them are answers.

    most: ids of a row; where there are so many, some may have been cut off.
    """
    flags = [int(one) for one in scored]
    if not any(flags) or len(ids) >= most:
        return None
    end = len(flags) - flags[::-1].index(1)  # behind the last answer
    start = end
    while start and flags[start - 1]:
        start -= 1
    if not start:
        return None
    tokens = [int(one) for one in ids]
    reference = text_of(task.tokenizer, tokens[start:end], ends=task.ends).text
    is_chat = task.chat is not None
    text = reference.strip().removesuffix(task.closing) if is_chat else reference
    prompt: Row = {"ids": tokens[:start], "is_turn": is_chat}
    return {**prompt, "reference": text, "reference_tokens": end - start}


def _search_beams(task: Any, base: Any, texts: Sequence[GrowingText], search: Search) -> None:
    """Give each text its tokens, by transformers' search of beams; those of one prompt stand side
    by side, the best first.
    """
    of_prompts = [text.prompt for text in texts[:: search.num_answers]]
    reversed_ids, mask = pad_right([ids[::-1] for ids in of_prompts], task.pad)
    prompts = reversed_ids.flip(1).to(base.device)
    tokens = base.generate(
        prompts,
        attention_mask=mask.flip(1).to(base.device),
        max_new_tokens=max(text.most for text in texts),
        num_beams=search.num_beams,
        num_return_sequences=search.num_answers,
        do_sample=False,
        eos_token_id=task.ends,
        pad_token_id=task.pad,
    )
    for text, row in zip(texts, tokens[:, prompts.shape[1] :].tolist(), strict=True):
        for token in row:
            text.take(token)
            if text.finish:
                break


def _positions(base: Any) -> int:
    return getattr(base.config, "max_position_embeddings", None) or 1 << 30


def _most(how: Prediction) -> int:
    return how.max_tokens or _MAX_TOKENS


def _fit(task: Any, base: Any, row: Row, how: Prediction) -> Fit:
    return fitted(row["ids"], positions=_positions(base), most=_most(how), opening=task.opening)


def language_model(task: Any, model: Any) -> Any:
    """The model of transformers, with its output layer, that continues texts."""
    return model.base
