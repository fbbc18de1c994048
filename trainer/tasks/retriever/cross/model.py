"""The model of a cross-encoder: a body, and on its pooled state the head that scores a pair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainer.models.masks import of_right_padded
from trainer.tasks.retriever.cross.heads import RankingHead, pooling_of
from trainer.tasks.retriever.model import pooled, pooled_stream

if TYPE_CHECKING:
    from trainer.models.decoder.streams import Read

# P pairs, L tokens of the longest, M tokens of all of them, D width of a state


class Ranker(nn.Module):
    """Token ids of pairs to their scores."""

    def __init__(
        self, base: Any, read: Read | None, *, seed: int, dropout: float | None = None
    ) -> None:
        """read: how the body reads streams (streams.reader_of); None: rows are padded."""
        super().__init__()
        if hasattr(base.config, "use_cache"):
            base.config.use_cache = False  # a decoder's body would fill one in training
        self.base, self._read = base, read
        self.head = RankingHead(base, seed=seed, dropout=dropout)
        self._pooling = pooling_of(base.config)

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        """{"scores": (P,) fp32}. batch: a stream (layout.pack), or (P, L) right-padded input_ids
        and attention_mask; of a BERT also the types of the tokens.
        """
        if "tokens" in batch:
            assert self._read is not None
            states_PD = pooled_stream(self._read(batch), batch, self._pooling)
        else:
            mask_PL = batch["attention_mask"]
            types = {"token_type_ids": batch["types"]} if "types" in batch else {}
            states_PLD = self.base(
                input_ids=batch["input_ids"],
                attention_mask=of_right_padded(mask_PL, self.base.config),
                **types,
            ).last_hidden_state
            states_PD = pooled(states_PLD, mask_PL, self._pooling)
        return {"scores": self.head(states_PD)}
