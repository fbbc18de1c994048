"""A stock T5 encoder on a stream of real tokens: no rectangle but inside attention, and the modules
as they are.

The modules and parameter names stay as transformers made them; only the order in which they are
called is ours, and it is the same on every rank, whatever the tokens are, as ZeRO-3 wants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.models.packed.attention import Attend, in_grids
from trainer.models.packed.layout import grids_of

# M tokens, D width


def encode(
    encoder: Any,
    batch: Mapping[str, Tensor],
    *,
    attend: Attend | None = None,
    recompute_every: int | None = None,
) -> Tensor:
    """(M, D) states of the real tokens of a packed batch (packing.pack), after the final norm and
    dropout.

    encoder: a T5Stack. attend: None is attention in the batch's grids. recompute_every: in
    training, every so many blocks are computed again in backward instead of kept.
    """
    hidden_MD = encoder.dropout(encoder.embed_tokens(batch["tokens"]))
    if attend is None:
        first = encoder.block[0].layer[0].SelfAttention
        attend = in_grids(
            first,
            grids_of(batch),
            batch["cells"],
            dropout=first.dropout if encoder.training else 0.0,
        )
    for number, block in enumerate(encoder.block):
        if recompute_every and encoder.training and number % recompute_every == 0:
            hidden_MD = checkpoint(_encoder_block, block, hidden_MD, attend, use_reentrant=False)
        else:
            hidden_MD = _encoder_block(block, hidden_MD, attend)
    return encoder.dropout(encoder.final_layer_norm(hidden_MD))


def _encoder_block(block: Any, hidden_MD: Tensor, attend: Attend) -> Tensor:
    """One encoder block of T5 on tokens without an order or a batch; only attention knows which
    belong together.
    """
    first, feed_forward = block.layer[0], block.layer[-1]
    normed_MD, heads = first.layer_norm(hidden_MD), first.SelfAttention
    mixed_MI = attend(heads.q(normed_MD), heads.k(normed_MD), heads.v(normed_MD))
    hidden_MD = _within_fp16(hidden_MD + first.dropout(heads.o(mixed_MI)))
    return _within_fp16(feed_forward(hidden_MD))


def _within_fp16(hidden: Tensor) -> Tensor:
    """T5 overflows fp16; transformers clamps behind every sub-layer, and so it is done here."""
    if hidden.dtype != torch.float16:
        return hidden
    largest = torch.finfo(hidden.dtype).max
    limit = torch.where(torch.isinf(hidden).any(), largest - 1000, largest)
    return torch.clamp(hidden, min=-limit, max=limit)
