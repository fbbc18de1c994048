"""A language model that continues prompts: what its task says of prompts and of ends, and the texts
that it writes, for `predict` and the service.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from trainer.data import left_out, vocabulary
from trainer.data.chat.chat_template import ChatTemplate
from trainer.data.chat.unwritten import TOOLS
from trainer.data.formats.conversation import opened, with_input
from trainer.data.padding import pad_right
from trainer.data.readers import fields
from trainer.errors import ConfigError
from trainer.models.generation.texts import Fit, GrowingText, chance_of, fitted, grown
from trainer.protocol.abilities import GREEDY, CutRow, Prediction, ReplyText, Search, by_row
from trainer.protocol.task import Cut
from trainer.tasks.generated import predictions, text_of
from trainer.tasks.token_task import C, TokenTask

if TYPE_CHECKING:
    from torch import nn

    from trainer.protocol.task import Row

MAX_TOKENS = 256  # of a prediction, without --max_tokens


class ContinuationTask(TokenTask[C]):
    """What a task on a language model says of prompts."""

    chat: ChatTemplate | None  # how conversations are written; None: the model learns from texts

    @property
    def continues_prompts(self) -> bool:
        """Whether the model of this experiment writes texts behind prompts."""
        return True

    @cached_property
    def ends(self) -> list[int]:
        """The token that ends a turn of a conversation, the end token, and those of the base's own
        generation_config.json.
        """
        return list(dict.fromkeys([self.turn_end, *super().ends]))

    @cached_property
    def turn_end(self) -> int:
        """The token behind an answer: in a conversation the one that ends a turn, else the end
        token.
        """
        return self.end if self.chat is None else self.chat.turn_end(self.end)

    @cached_property
    def closing(self) -> str:
        """What a conversation's template writes behind an answer before its end token, without a
        token of its own: "" of texts.
        """
        return "" if self.chat is None else self.chat.closing

    @cached_property
    def opening(self) -> list[int]:
        """The ids that begin every text: the beginning-of-text token of a tokenizer that writes one
        by itself, as Llama's and Gemma's do.
        """
        return vocabulary.opening_of(self.tokenizer)

    def prompt_ids(self, raw: Row, place: str) -> list[int]:
        """The token ids that the model continues: the one way from a prompt to ids, for evaluation,
        predict and the service.

        raw: {"messages", "tools"?}: a conversation; its roles are checked, turns of the assistant
        at its end are left out, and the chat template opens the next one, on the date of training.
        {"prompt"}: a turn of the user if the task is trained on conversations, else a text.
        {"text"}: a text that is continued as it stands. place: where it was read, for messages.
        DataError for what cannot be read; ConfigError for messages if the task is not trained on
        conversations.
        """
        if raw.get("messages") is None and (self.chat is None or raw.get("prompt") is None):
            name, text = fields.first_given(raw, ("prompt", "text"))
            text = with_input(raw) if name == "prompt" else text
            return self._begun(self._ids(fields.text(text, place, name)))
        if self.chat is None:
            raise ConfigError(
                f"{place}: got messages, but the model has not learnt from conversations. Give a "
                '"prompt".'
            )
        row = opened(raw, place)
        if row.get("tools") and "tools" not in self.chat.words:
            left_out.note(place, TOOLS, field="tools")
        return self._ids(self.chat.opened(row))  # the template writes the opening

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _begun(self, ids: list[int]) -> list[int]:
        """The ids of a text with the opening before them, where they do not begin with it."""
        is_there = ids[: len(self.opening)] == self.opening
        return ids if is_there else [*self.opening, *ids]


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
    return how.max_tokens or MAX_TOKENS


def _fit(task: Any, base: Any, row: Row, how: Prediction) -> Fit:
    return fitted(row["ids"], positions=_positions(base), most=_most(how), opening=task.opening)
