"""A decoder's body on a stream of real tokens: no rectangle but inside attention."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.models.decoder.backbone import Backbone
from trainer.models.decoder.packed_attention import Rows

# M tokens, D width


def encode(backbone: Backbone, batch: Mapping[str, Tensor], *, recompute: bool = False) -> Tensor:
    """(M, D) states of the tokens of a packed batch (packing.pack), each row read causally by
    itself, after the final norm.

    recompute: every block is computed again in backward instead of kept.
    """
    positions_1M = batch["position"][None]
    hidden_1MD = backbone.embed(batch["tokens"][None], positions_1M)
    rows = Rows.by_window(batch, backbone.windows)
    surroundings = backbone.surroundings(hidden_1MD, rows, positions_1M, None)
    for index in range(backbone.num_blocks):
        given = (index, hidden_1MD, surroundings)
        if recompute:
            hidden_1MD = checkpoint(backbone.block, *given, use_reentrant=False)
        else:
            hidden_1MD = backbone.block(*given)
    return backbone.final_norm(hidden_1MD)[0]
