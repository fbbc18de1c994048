"""Runs a stock T5 encoder on a stream of real tokens; only attention may use rectangles.

Modules and parameter names stay as transformers made them. Only the order of the calls is ours. It
is the same on every rank, whatever the tokens are, as ZeRO-3 requires.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.models import recomputation
from trainer.models.fused import apart, of_blocks
from trainer.models.packed.attention import (
    Attend,
    AttendBy,
    in_grids,
    in_short_rows,
    in_streams,
)
from trainer.models.packed.layout import grids_of
from trainer.models.packed.stream_attention import RowStarts
from trainer.models.processor.row_attention import is_here, is_wide

# M tokens, D width

# If the longest row has at least this many tokens, attention uses no grids. Measured on a processor
# and on an H200 (docs/log.md), where both ways take equally long at 512 tokens, and grids longer
# beyond. Row by row a processor is faster up to more tokens, in up to 11% more memory.
LONG, LONG_ELSEWHERE, LONG_BY_ROWS = {"cpu": 240}, 512, 384


def encode(
    encoder: Any,
    batch: Mapping[str, Tensor],
    *,
    attend_by: AttendBy | None = None,
    recompute_every: int | None = None,
) -> Tensor:
    """(M, D) states of the real tokens of a packed batch (layout.pack), after the final norm and
    dropout.

    encoder: a T5Stack, MT5Stack or UMT5Stack. attend_by: None is attention in the batch's grids, or
    in its stream where rows are long.
    recompute_every: in training, every so many blocks are computed again in backward instead of
    kept.
    """
    hidden_MD = encoder.dropout(encoder.embed_tokens(batch["tokens"]))
    attend_by = attend_by or _by_length(encoder, batch)
    # In umT5 every block has a table of position biases; in other models the first block's serves
    # all.
    is_shared = not encoder.block[-1].layer[0].SelfAttention.has_relative_attention_bias
    shared = attend_by(encoder.block[0].layer[0].SelfAttention) if is_shared else None
    run, every = of_blocks(_encoder_block), recompute_every if encoder.training else None
    for number, block in enumerate(encoder.block):
        arguments = (block, hidden_MD, shared, attend_by)
        hidden_MD = recomputation.run(run, *arguments, number=number, every=every)
    return encoder.dropout(encoder.final_layer_norm(hidden_MD))


def _by_length(encoder: Any, batch: Mapping[str, Tensor]) -> AttendBy:
    """Attention in grids, row by row or in the stream: the way that is faster, and takes less
    memory, here.
    """
    grids, cells = grids_of(batch), batch["cells"]
    longest = max(grid.shape[1] for grid in grids)
    rows = RowStarts(batch["starts"], batch["starts"], longest)
    is_long = longest >= LONG.get(cells.device.type, LONG_ELSEWHERE)

    def by(table: Any) -> Attend:
        dropout = table.dropout if encoder.training else 0.0
        # as an attribute its weight would be gathered at ZeRO-3, once more for each forward
        is_by_rows = is_here(cells) and is_wide(next(table.relative_attention_bias.parameters()))
        if is_by_rows and longest < LONG_BY_ROWS:
            return in_short_rows(table, rows, dropout=dropout)
        if is_long:
            return in_streams(table, batch, dropout=dropout)
        return in_grids(table, grids, cells, dropout=dropout)

    return by


def _encoder_block(
    block: Any, hidden_MD: Tensor, shared: Attend | None, attend_by: AttendBy
) -> Tensor:
    """One encoder block of T5 on tokens without an order or a batch; only attention knows which
    belong together.

    shared: attention with the biases that all blocks share; None: with the block's own biases,
    which are computed again when the block is recomputed.
    """
    first, feed_forward = block.layer[0], block.layer[-1]
    normed_MD, heads = first.layer_norm(hidden_MD), first.SelfAttention
    attend = apart(attend_by, heads) if shared is None else shared
    mixed_MI = apart(attend, heads.q(normed_MD), heads.k(normed_MD), heads.v(normed_MD))
    hidden_MD = within_fp16(hidden_MD + first.dropout(heads.o(mixed_MI)))
    return within_fp16(feed_forward(hidden_MD))


def within_fp16(hidden: Tensor) -> Tensor:
    """T5 overflows fp16; transformers clamps behind every sub-layer, and so it is done here."""
    if hidden.dtype != torch.float16:
        return hidden
    largest = torch.finfo(hidden.dtype).max
    limit = torch.where(torch.isinf(hidden).any(), largest - 1000, largest)
    return torch.clamp(hidden, min=-limit, max=limit)
