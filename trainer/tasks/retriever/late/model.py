"""The model of late interaction: a body for both sides, and a projection of each token's state to a
vector of length 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.errors import ConfigError
from trainer.models import recomputation
from trainer.models.head import Head
from trainer.models.masks import of_right_padded
from trainer.tasks.retriever.config import Encoder
from trainer.tasks.retriever.model import Retriever, pieces_of

if TYPE_CHECKING:
    from trainer.models.decoder.streams import Read
    from trainer.protocol.abilities import Side

# N texts, L tokens of the longest, K tokens that have a vector, D width of a state, E of a vector

_LENGTHS: dict[Side, str] = {"query": "query_lengths", "passage": "passage_lengths"}


class LateRetriever(Retriever):
    """Token ids of queries, of passages, or of both, to a vector for each token that has one."""

    def __init__(self, base: Any, read: Read | None, *, width: int, seed: int) -> None:
        """read: how the body reads streams (streams.reader_of); None: rows are padded. ConfigError
        when vectors would have more numbers than the states that they are made of.
        """
        states = base.config.hidden_size
        if width > states:
            raise ConfigError(
                f"late.width: got {width}, but the states of this model have {states} numbers, "
                f"want at most so many. Use {min(128, states)}, for example."
            )
        super().__init__(base, None, how=Encoder(), read={"query": read, "passage": read})
        self.head = Head(base, width, seed=seed, has_bias=False)

    def forward(self, *arguments: Any, **batch: Any) -> dict[str, Tensor]:
        """{"queries": (K, E), "passages": (K, E)} in fp32, the vectors of one text after the
        other, and how many each text has: "query_lengths" (N,), "passage_lengths" (N,). For each
        side that the batch holds, as LateBatches lays it out; arguments: as Retriever takes them.
        """
        by_side = super().forward(*arguments, **batch)
        for side, name in _LENGTHS.items():
            pieces = pieces_of(batch, side)
            if pieces:
                by_side[name] = torch.cat([piece["lengths"] for piece in pieces])
        return by_side

    def _of_layers(self, side: Side, piece: Mapping[str, Tensor]) -> Tensor:
        """(K, 1, E) of the texts of one piece."""
        # chosen behind the projection: a copy of the states would be kept for the backward pass
        vectors_KE = self.head(self._states(side, piece)).index_select(0, piece["kept"])
        return F.normalize(vectors_KE, dim=-1)[:, None]

    def _states(self, side: Side, piece: Mapping[str, Tensor]) -> Tensor:
        """The states of a stream, or those of flattened padded rows."""
        read = self._read[side]
        if "tokens" in piece:
            assert read is not None
            return read(piece)
        body: Any = self.query_model
        seen_NL = piece.get("seen")
        visible = of_right_padded(piece["mask"], body.config) if seen_NL is None else seen_NL
        # blocks that would be computed again would attend as on a stream
        with nullcontext() if read is None else recomputation.nothing_of(body):
            states_NLD = body(input_ids=piece["ids"], attention_mask=visible).last_hidden_state
        return states_NLD.flatten(0, 1)
