"""Questions, passages and answers as token ids.

The reader sees "question: Q title: T context: C" for every passage. The question and the passage
are tokenised apart, each once: T5's and byte-level tokenizers always cut at a space, so the ids of
both halves, joined, are those of the whole. (Llama 2's puts a blank of its own before the second
half.) Source of the prompt: facebookresearch/FiD and karlstratos/minFiD, which agree on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trainer.data.control_tokens import ControlTokens
from trainer.data.padding import unflat
from trainer.data.vocabulary import eos_id
from trainer.protocol.abilities import GeneratedText
from trainer.protocol.task import DRAW, Row
from trainer.tasks.generated import text_of

if TYPE_CHECKING:
    from trainer.tasks.fid.config import Data


class Prompts:
    """How one experiment turns text into ids."""

    def __init__(self, tokenizer: Any, data: Data) -> None:
        self.tokenizer, self.data = tokenizer, data
        self.end = eos_id(tokenizer)

    @cached_property
    def controls(self) -> ControlTokens:
        """The control tokens that a text may spell."""
        return ControlTokens(self.tokenizer)

    def question(self, text: str) -> list[int]:
        """Ids of the question, which stands before every passage.

        A question without passages has this prompt alone.
        """
        return self._ids([f"question: {text}"])[0]

    def passages(self, passages: Sequence[Mapping[str, str]]) -> list[list[int]]:
        """Ids of the passages, without the question, cut to data.passage_tokens.

        A missing title counts as an empty one.
        """
        return [ids[: self.data.passage_tokens] for ids in self.whole_passages(passages)]

    def whole_passages(self, passages: Sequence[Mapping[str, str]]) -> list[list[int]]:
        """Ids of the passages, without the question, uncut."""
        texts = [
            f" title: {passage.get('title', '')} context: {passage['text']}" for passage in passages
        ]
        return self._ids(texts)

    def targets(self, row: Row) -> list[list[int]]:
        """Ids of the texts that the decoder may learn to write for `row`, each with its end token:
        the row's `target` if it has one, else every answer.

        They are cut to data.target_tokens, which may cut the end token off, as published.
        """
        return [ids[: self.data.target_tokens] for ids in self._whole_targets(row)]

    def lost_labels(self, row: Row) -> tuple[int, int]:
        """How many tokens of all targets data.target_tokens cuts off, and how many tokens all
        targets have; (0, 0) without a limit.
        """
        if self.data.target_tokens is None:
            return 0, 0
        lengths = [len(ids) for ids in self._whole_targets(row)]
        return sum(max(0, length - self.data.target_tokens) for length in lengths), sum(lengths)

    def _whole_targets(self, row: Row) -> list[list[int]]:
        texts = [row["target"]] if "target" in row else row["answers"]
        return [[*ids, self.end] for ids in self.controls.written_out(texts)]

    def answer(self, tokens: Sequence[int], *, ends: Collection[int] = ()) -> GeneratedText:
        """The text of generated tokens, without special tokens, up to the end or, if it comes
        first, one of `ends`.
        """
        cleans_up = self.data.clean_up_spaces
        ends = (self.end, *ends)
        return text_of(self.tokenizer, tokens, ends=ends, cleans_up_spaces=cleans_up)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []


def drawn_target(row: Mapping[str, Any], *, is_random: bool = True) -> Sequence[int]:
    """One target of an encoded row; [] when it has none.

    is_random: a training row, which carries a draw, gets a random target. Otherwise it is the
    first.
    """
    targets = unflat(row, "targets")
    if not targets:
        return []
    return targets[int(row[DRAW][0]) % len(targets) if is_random and DRAW in row else 0]
