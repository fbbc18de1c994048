"""A query and a passage as the one text that a cross-encoder reads, with the special tokens of a
pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.protocol.task import Cut
from trainer.tasks.retriever.tokens import Tokens

if TYPE_CHECKING:
    from trainer.protocol.abilities import Side
    from trainer.protocol.task import Row
    from trainer.tasks.retriever.config import Data


class Pairs:
    """How an experiment's queries and passages become pairs of token ids."""

    def __init__(self, tokenizer: Any, data: Data) -> None:
        self.tokens = Tokens(tokenizer, data)
        self.data = data
        (one,) = self.tokens.plain_ids(
            [[*tokenizer("a", add_special_tokens=False)["input_ids"]]], "query"
        )
        encoded = tokenizer("a", "a")
        whole, width = encoded["input_ids"], len(one)
        starts = [at for at in range(len(whole)) if whole[at : at + width] == one]
        if len(starts) != 2:
            raise ConfigError(
                f"tokenizer {tokenizer.name_or_path!r}: special tokens change how a pair of texts "
                f"is cut ({one} alone, {whole} as a pair). Use another tokenizer."
            )
        first, second = starts
        self.before = whole[:first]
        self.between = whole[first + width : second]
        self.after = [*whole[second + width :], *self._end()]
        types = encoded.get("token_type_ids")
        # of BERT, the first text and the separator behind it are 0, all that follows is 1
        self.has_types = types is not None and types[second] != types[first]
        for side in ("query", "passage"):
            if self.room(side) < 1:
                around = self._limit(side) - self.room(side)
                raise ConfigError(
                    f"data.{side}_tokens={self._limit(side)}: got no room for a text, for "
                    f"{around} special tokens stand around each one, want at least {around + 1}."
                )

    def _end(self) -> list[int]:
        """The end token that data.append_eos adds where the tokenizer does not."""
        return self.tokens.after[-1:] if self.tokens.appends_end else []

    def _limit(self, side: Side) -> int:
        return self.data.query_tokens if side == "query" else self.data.passage_tokens

    def room(self, side: Side) -> int:
        """The most tokens of a text itself: the special tokens before a query count as its own,
        those between and behind as the passage's.
        """
        around = self.before if side == "query" else [*self.between, *self.after]
        return self._limit(side) - len(around)

    def plain(self, texts: Sequence[str | Row | Sequence[int]], side: Side) -> list[list[int]]:
        """Ids of texts without special tokens, uncut."""
        return self.tokens.plain_ids(texts, side)

    def cut(self, plain: Sequence[Sequence[int]], side: Side) -> list[list[int]]:
        """The same ids cut to the side's room."""
        room = self.room(side)
        return [list(ids[:room]) for ids in plain]

    def cut_of(self, plain: Sequence[Sequence[int]], side: Side) -> Cut:
        """How long texts are with their special tokens, beside the limit of their side."""
        limit = self._limit(side)
        around = limit - self.room(side)
        return Cut(f"data.{side}_tokens", limit, [len(ids) + around for ids in plain])

    def join(self, query: Sequence[int], passage: Sequence[int]) -> list[int]:
        """The ids of a pair."""
        return [*self.before, *query, *self.between, *passage, *self.after]

    def types(self, query: Sequence[int], passage: Sequence[int]) -> list[int]:
        """0 for each token of the query and for its special tokens, 1 for those behind."""
        first = len(self.before) + len(query) + len(self.between)
        return [0] * first + [1] * (len(passage) + len(self.after))
