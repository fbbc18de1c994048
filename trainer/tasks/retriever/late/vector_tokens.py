"""Which tokens of a text have a vector: a passage's without punctuation, a query's with mask tokens
behind it.

Sources: Khattab & Zaharia 2020 (ColBERT), section 3.2; sentence-transformers 6.2, MultiVectorMask
and query_expansion of its Transformer.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.data import vocabulary
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.protocol.abilities import Side
    from trainer.tasks.retriever.config import Late


class VectorTokens:
    """Tells of an experiment's texts which tokens have a vector."""

    def __init__(self, tokenizer: Any, how: Late, *, query_tokens: int) -> None:
        """query_tokens: how many tokens an expanded query has."""
        self.query_tokens = query_tokens
        self.mask: int | None = None  # what queries are filled up with
        if how.expand:
            self.mask = tokenizer.mask_token_id
            if self.mask is None:  # as PyLate and sentence-transformers do, of a decoder
                self.mask = vocabulary.eos_id(tokenizer)
        known = tokenizer.get_vocab()
        unknown = [word for word in how.skip if word not in known]
        if unknown:
            raise ConfigError(
                f"late.skip: {unknown[0]!r} is no token of {tokenizer.name_or_path!r}, want words "
                "as its vocabulary spells them. Correct or leave it out."
            )
        marks = [mark for mark in string.punctuation if how.skip_punctuation and mark in known]
        self.skipped_words = [*how.skip, *marks]
        self._skipped = frozenset(known[word] for word in self.skipped_words)

    def expanded(self, query: Sequence[int]) -> list[int]:
        """The ids of a query with mask tokens up to its limit; the same ids without expansion."""
        if self.mask is None:
            return [*query]
        return [*query, *[self.mask] * (self.query_tokens - len(query))]

    def places(self, ids: Sequence[int], side: Side) -> list[int]:
        """Where in a text the tokens stand that have a vector: of a query all, of a passage those
        that are not skipped. A passage of nothing else keeps them all.
        """
        every = range(len(ids))
        if side == "query":
            return [*every]
        return [place for place in every if ids[place] not in self._skipped] or [*every]
