"""Questions and contexts as token ids, and back: for training, evaluation and a served model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.data import vocabulary
from trainer.data.control_tokens import ControlTokens
from trainer.data.padding import flat, pad_right
from trainer.errors import DataError
from trainer.models.generation.texts import fitted
from trainer.protocol.abilities import GREEDY, GeneratedText, Search, by_row
from trainer.protocol.task import Batch, Cut, Encoded, Row
from trainer.tasks.cross_attention.decoder.context import Past
from trainer.tasks.cross_attention.decoder.generation import (
    greedy,
    most_prompt_tokens,
    search_beams,
)
from trainer.tasks.cross_attention.text import questions, templates
from trainer.tasks.cross_attention.text.contexts import state_batch, token_batch
from trainer.tasks.generated import text_of

if TYPE_CHECKING:
    from trainer.tasks.cross_attention.config import Data
    from trainer.tasks.cross_attention.encoder_states.reading import StateCache

# B batch, N answers of a row, C chunks, L context tokens, T prompt tokens


class Prompts:
    """One tokenizer and one way of writing questions, answers and contexts.

    states: a function that returns the prepared states of contexts, or None if the model encodes
    contexts itself. ends: a function that returns the tokens that end an answer, besides the
    tokenizer's end.
    """

    def __init__(
        self,
        tokenizer: Any,
        data: Data,
        states: Callable[[], StateCache | None] = lambda: None,
        ends: Callable[[], Sequence[int]] = lambda: (),
    ) -> None:
        self.tokenizer, self.data, self._states, self._more_ends = tokenizer, data, states, ends
        self.pad = vocabulary.pad_id(tokenizer)
        self.eos = vocabulary.eos_id(tokenizer)
        self.opening = vocabulary.opening_of(tokenizer)
        self.controls = ControlTokens(tokenizer)

    @cached_property
    def ends(self) -> list[int]:
        """The tokens that end an answer."""
        return list(dict.fromkeys([self.eos, *self._more_ends()]))

    def encode(self, row: Row, *, predicts_context: bool = False) -> Encoded:
        """Token ids of the decoder's text, with EOS, and of the context's chunks, each cut to its
        limit.

        The decoder's text is the question with its answer; with predicts_context it is the context.
        """
        data = self.data
        prompt, target = (
            ([], self._target(row)) if predicts_context else self._prompt_and_answer(row)
        )
        decoder = (prompt + target)[: data.decoder_tokens]
        if data.loss_on == "answer" and len(decoder) <= len(prompt):
            raise DataError(
                f"data.decoder_tokens={data.decoder_tokens} cuts off the whole answer of "
                f"{row['question']!r}: "
                f"its prompt alone has {len(prompt)} tokens. Raise data.decoder_tokens."
            )
        context = self._context(row["question"], questions.contexts_of(row))
        is_cut = (
            len(prompt) + len(target) > data.decoder_tokens
            or max(map(len, context)) > data.context_tokens
        )
        lengths = [len(chunk) for chunk in context]
        whole = [len(prompt) + len(target)]
        encoded = Encoded(
            {"decoder": decoder, "answer_start": [len(prompt)]},
            is_truncated=is_cut,
            # published recipes cut the contexts that they predict, so this is no loss
            lost_labels=(0, 0) if predicts_context else self._lost_labels(prompt, target),
            cuts={
                "contexts": Cut("data.context_tokens", data.context_tokens, lengths),
                "questions with answers": Cut("data.decoder_tokens", data.decoder_tokens, whole),
            },
        )
        encoded |= self._within_limit(context, "context")
        if "other" in row:
            encoded |= self._within_limit(self._context(row["question"], row["other"]), "other")
        return encoded

    def prompt_tokens(self, row: Row) -> int:
        """The tokens of the prompt of a row, uncut."""
        return len(self._prompt_and_answer(row)[0])

    def _lost_labels(self, prompt: list[int], target: list[int]) -> tuple[int, int]:
        """How many label tokens data.decoder_tokens cuts off, and how many there are. The first
        token of a text is no label.
        """
        first = len(prompt) if self.data.loss_on == "answer" else 1
        length = len(prompt) + len(target)
        return max(0, length - max(first, self.data.decoder_tokens)), length - first

    def contexts(self, rows: Sequence[Mapping[str, Any]], field: str) -> Batch:
        """A context field as tensors for the model, padded on the right: ids, or prepared
        states.
        """
        states = self._states()
        if states is not None:
            return state_batch(rows, field, states)
        return token_batch(rows, field, pad=self.pad, is_chunked=self.data.chunked)

    def answers(
        self,
        model: nn.Module,
        rows: Sequence[Mapping[str, Any]],
        *,
        search: Search = GREEDY,
        device: torch.device,
        is_synced: bool = False,
        max_tokens: int | None = None,
        past: Past | None = None,
    ) -> list[list[GeneratedText]]:
        """The answers to each encoded row, the best first, of at most max_tokens tokens; None:
        data.answer_tokens.

        is_synced: all ranks run the same number of forwards, though they answer different rows.
        past: one context for all rows, instead of their own.
        """
        most = self.data.answer_tokens if max_tokens is None else max_tokens
        prompts = self.asked(rows, most_prompt_tokens(model, most))
        if past is None:
            prompts |= self.contexts(rows, "context")
        prompts = {name: tensor.to(device) for name, tensor in prompts.items()}
        if past is not None:
            prompts["past"] = past
        texts = [
            self.generated(tokens)
            for tokens in self._generate(model, prompts, search, most, is_synced).tolist()
        ]
        return by_row(texts, search)

    def _generate(
        self, model: nn.Module, prompts: dict[str, Any], search: Search, most: int, is_synced: bool
    ) -> Tensor:
        """(B*N, G) tokens."""
        how: dict[str, Any] = {
            "max_new_tokens": most,
            "pad_token_id": self.pad,
            "eos_token_id": self.ends,
        }
        if search == GREEDY:
            return greedy(model, **prompts, **how, always_steps=is_synced).tokens_BG
        device = prompts["input_ids"].device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            # seeded by the questions: they draw the same on every rank and after any other batch
            content = f"{search.seed}:{prompts['input_ids'].tolist()}".encode()
            digest = hashlib.sha256(content).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            return search_beams(model, prompts, search, **how, is_synced=is_synced)

    def _prompt_and_answer(self, row: Row) -> tuple[list[int], list[int]]:
        """Ids of the prompt, and of the answer behind it, with EOS.

        Both are tokenised as one text if its ids begin with those of the prompt alone;
        SentencePiece would put a space before an answer that is tokenised alone.
        """
        text = templates.prompt(row["question"], self.data.template)
        reference = templates.answer(row["answers"][0], self.data.template)
        prompt, whole = self._ids(text), self._ids(text + reference)
        if self.controls.in_text(reference):  # an answer ends at its own end alone
            return prompt, [*self.controls.written_out([reference])[0], self.eos]
        is_beginning = whole[: len(prompt)] == prompt
        answer = whole[len(prompt) :] if is_beginning else self._ids(reference, is_opened=False)
        return prompt, [*answer, self.eos]

    def _target(self, row: Row) -> list[int]:
        """Ids of the context that the decoder predicts, with EOS; a chunked context is the joined
        text of its useful chunks.
        """
        contexts = questions.contexts_of(row)
        if self.data.chunked and "useful_contexts" in row:
            contexts = [
                text
                for text, is_useful in zip(contexts, row["useful_contexts"], strict=True)
                if is_useful
            ]
        text = templates.context_text("", contexts, self.data.template, question_on_context=False)
        return [*self._ids(text), self.eos]

    def _context(self, question: str, contexts: list[str]) -> list[list[int]]:
        how = {"question_on_context": self.data.question_on_context, "chunked": self.data.chunked}
        return [
            self._ids(text)
            for text in templates.context_texts(question, contexts, self.data.template, **how)
        ]

    def _within_limit(self, texts: list[list[int]], field: str) -> dict[str, list[int]]:
        return flat([ids[: self.data.context_tokens] for ids in texts], field)

    def _ids(self, text: str, *, is_opened: bool = True) -> list[int]:
        opening = self.opening if is_opened else []
        return [*opening, *self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def asked(self, rows: Sequence[Mapping[str, Any]], most: int) -> dict[str, Any]:
        """input_ids and attention_mask (B, T) of the prompts, padded on the left; a prompt of more
        than `most` tokens is cut as texts.fitted does.
        """
        prompts = [row["decoder"][: int(row["answer_start"][0])] for row in rows]
        how = {"positions": most, "most": 0, "least": 0}  # all of `most` are for the prompt
        fits = [fitted(list(prompt), **how, opening=self.opening) for prompt in prompts]
        ids, mask = pad_right([fit.ids[::-1] for fit in fits], self.pad)
        return {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}

    def generated(self, tokens: list[int]) -> GeneratedText:
        """The answer that generated tokens spell, up to the first token that ends it."""
        whole = text_of(self.tokenizer, tokens, ends=self.ends)
        return replace(whole, text=templates.answered(whole.text, self.data.template))

    def text(self, tokens: list[int]) -> str:
        """The text of that answer."""
        return self.generated(tokens).text
