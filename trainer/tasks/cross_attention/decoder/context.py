"""A context that is ready to be attended to, and what a next token needs of those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from transformers import Cache

from trainer.errors import ConfigError
from trainer.tasks.cross_attention.decoder.attention import KeysValues

# B batch, L context tokens


class Context(NamedTuple):
    """A context, ready to be attended to: projected once, whatever number of forwards use it."""

    keys_values: tuple[KeysValues, ...]  # by added layer, bottom-up
    kept_BL: Tensor | None  # bool, False for pads; None: every key counts

    def repeat_rows(self, rows: int) -> Context:
        """The same for `rows` rows.

        Each context serves the same number of rows, which follow one another.
        """
        times, rest = divmod(rows, len(self.keys_values[0].keys_BHLK))
        if rest or not times:
            raise ConfigError(
                f"got {rows} rows for {len(self.keys_values[0].keys_BHLK)} contexts, want a "
                "context for each row, or for each of as many groups of rows of one size."
            )
        if times == 1:
            return self
        repeated: dict[int, KeysValues] = {}
        for pair in self.keys_values:  # a shared layer's stand here several times
            repeated.setdefault(
                id(pair), KeysValues(*(tensor.repeat_interleave(times, dim=0) for tensor in pair))
            )
        kept_BL = None if self.kept_BL is None else self.kept_BL.repeat_interleave(times, dim=0)
        return Context(tuple(repeated[id(pair)] for pair in self.keys_values), kept_BL)


@dataclass(frozen=True)
class ContextInputs:
    """Where a forward takes its context from: exactly one of tokens, states and an earlier forward.

    The names are those of a batch.
    """

    # (B, L) token ids, or (B, N, L) in chunks, and their mask of the same shape.
    context_input_ids: Tensor | None = None
    context_attention_mask: Tensor | None = None
    # (B, L, D) states, or one such tensor for each added layer from the bottom up, and their mask
    # (B, L).
    encoder_hidden_states: Tensor | Sequence[Tensor] | None = None
    encoder_attention_mask: Tensor | None = None
    # (B, L) positions of either; None: what the mask says.
    context_position_ids: Tensor | None = None
    # What an earlier forward with use_cache returned.
    past: Past | None = None

    def __post_init__(self) -> None:
        sources = (self.context_input_ids, self.encoder_hidden_states, self.past)
        count = sum(source is not None for source in sources)
        if count != 1:
            raise ConfigError(
                f"got {count} contexts, want one of context_input_ids, encoder_hidden_states, past."
            )


class Past(NamedTuple):
    """What the next one-token forward needs of the ones before it."""

    cache: Cache
    context: Context
