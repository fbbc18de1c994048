"""Texts as token ids, with the tokenizer's special tokens, cut to the limit of their side."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainer.data import vocabulary
from trainer.errors import ConfigError, DataError
from trainer.protocol.task import Cut

if TYPE_CHECKING:
    from trainer.protocol.abilities import Side
    from trainer.protocol.task import Row
    from trainer.tasks.retriever.config import Data


class Tokens:
    """How an experiment's texts become ids."""

    def __init__(self, tokenizer: Any, data: Data) -> None:
        self.tokenizer, self.data = tokenizer, data
        self.pad = vocabulary.pad_id(tokenizer)
        # Tevatron also takes the name of an attribute of the tokenizer, such as sep_token
        value = getattr(tokenizer, data.separator, None) if data.separator.isidentifier() else None
        self.separator = value if isinstance(value, str) else data.separator
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = tokenizer("a", add_special_tokens=True)["input_ids"]
        start = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), None)
        if start is None:
            raise ConfigError(
                f"tokenizer {tokenizer.name_or_path!r}: special tokens change how a text is cut "
                f"({plain} alone, {whole} "
                "with them). Use another tokenizer."
            )
        self.before, self.after = whole[:start], whole[start + len(plain) :]
        end = [vocabulary.eos_id(tokenizer)] if data.append_eos else []
        # whether an end is needed that the tokenizer does not write by itself
        self.appends_end = bool(end) and self.after[-1:] != end
        if self.appends_end:
            self.after = [*self.after, *end]
        around = len(self.before) + len(self.after)
        for side in ("query", "passage"):
            if self.limit(side) <= around:
                raise ConfigError(
                    f"data.{side}_tokens={self.limit(side)}: got no room for a text, for "
                    f"{around} special tokens stand around each one, want at least {around + 1}."
                )

    def limit(self, side: Side) -> int:
        """The most tokens that a text may have, special tokens included."""
        return self.data.query_tokens if side == "query" else self.data.passage_tokens

    def ids(self, texts: Sequence[str | Row | Sequence[int]], side: Side) -> list[list[int]]:
        """Ids, with special tokens and cut to the side's limit, of queries (text), of passages
        ({"text", "title"?}), or of token ids without special tokens.
        """
        return self.cut(self.plain_ids(texts, side), side)

    def cut(self, plain: Sequence[Sequence[int]], side: Side) -> list[list[int]]:
        """Adds special tokens to ids that have none, and cuts them to the side's limit. DataError
        for a text of no token at all, of which no model makes anything.
        """
        around = len(self.before) + len(self.after)
        if not around and not all(map(len, plain)):
            raise DataError(
                f"a {side} has no token, for {self.tokenizer.name_or_path!r} knows nothing in its "
                "text and puts none around it. Leave such texts out, or use data.append_eos."
            )
        room = self.limit(side) - around
        return [[*self.before, *tokens[:room], *self.after] for tokens in plain]

    def cut_of(self, plain: Sequence[Sequence[int]], side: Side) -> Cut:
        """How long the texts are with special tokens, beside the limit that `cut` applies."""
        around = len(self.before) + len(self.after)
        lengths = [len(ids) + around for ids in plain]
        return Cut(f"data.{side}_tokens", self.limit(side), lengths)

    def plain_ids(self, texts: Sequence[str | Row | Sequence[int]], side: Side) -> list[list[int]]:
        """Ids as `ids` takes texts, uncut and without special tokens."""
        spelled = [self._text(text, side) for text in texts if isinstance(text, (str, Mapping))]
        sequences = iter(
            self.tokenizer(spelled, add_special_tokens=False)["input_ids"] if spelled else []
        )
        return [
            next(sequences) if isinstance(text, (str, Mapping)) else list(text) for text in texts
        ]

    def _text(self, text: str | Row, side: Side) -> str:
        if isinstance(text, str):
            text = {"text": text}
        title = f"{text['title']}{self.separator}" if text.get("title") else ""
        prefix = self.data.query_prefix if side == "query" else self.data.passage_prefix
        return f"{prefix}{title}{text['text']}"

    def width(self, longest: int, side: Side) -> int:
        """The number of tokens to which a batch is padded when its longest text has `longest`."""
        multiple = self.data.pad_to_multiple_of
        return max(longest, min(-(-longest // multiple) * multiple, self.limit(side)))


def identity(ids: Sequence[int]) -> list[int]:
    """Two 32-bit numbers that identify a passage by its tokens; equal passages have equal ones."""
    digest = hashlib.blake2b(np.asarray(ids, dtype="<i4").tobytes(), digest_size=8).digest()
    return np.frombuffer(digest, dtype="<i4").tolist()


def passage_of(row: Mapping[str, Any], index: int) -> Any:
    """The ids of a row's passage `index`; the row stores the ids of all passages in one list."""
    start = int(np.sum(row["lengths"][:index]))
    return row["passages"][start : start + int(row["lengths"][index])]


def words_of(identities: Any) -> np.ndarray:
    """(2 * N,) 32-bit numbers -> (N,) int64."""
    return np.ascontiguousarray(identities, dtype="<i4").view("<i8")


def bits_of(scores: Tensor) -> Tensor:
    """The bits of fp32 scores as int32, so that they are exchanged together with ids."""
    return scores.view(torch.int32)
