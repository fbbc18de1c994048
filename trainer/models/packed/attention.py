"""T5's attention between the tokens of a row, on a stream of real tokens: in grids, in the stream
itself, or by torch's FlexAttention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.errors import ConfigError
from trainer.models.families import family_of
from trainer.models.packed.layout import grids_of
from trainer.models.packed.rectangles import in_rectangles, in_stream
from trainer.models.packed.stream_attention import Biases, RowStarts
from trainer.models.packed.stream_attention import attend as stream_attend
from trainer.models.processor import row_attention

# M tokens, I width of all heads together, H heads, C width of one, N passages of a grid, L its
# length

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (M, I) queries, keys, values -> (M, I)
# A T5Attention that holds a table of position biases -> attention with these biases.
AttendBy = Callable[[Any], Attend]


def in_grids(table: Any, grids: Sequence[Tensor], cells: Tensor, *, dropout: float) -> Attend:
    """Attention within passages that are laid out in grids (layout.pack).

    table: the T5Attention that holds the table of position biases. Bias and mask are added here,
    once for all blocks that share the table.
    """
    longest = max(grid.shape[1] for grid in grids)
    bias_1HLL = table.compute_bias(longest, longest, cells.device)
    lowest = torch.finfo(bias_1HLL.dtype).min
    biases = [
        bias_1HLL[..., : g.shape[1], : g.shape[1]].masked_fill(~g[:, None, None], lowest)
        for g in grids
    ]
    sizes = [grid.numel() for grid in grids]

    def attend(q_MI: Tensor, k_MI: Tensor, v_MI: Tensor) -> Tensor:
        of_grids = zip(*(in_rectangles(x, cells, sizes) for x in (q_MI, k_MI, v_MI)), strict=True)
        mixed = [_attend(qkv, bias, dropout) for qkv, bias in zip(of_grids, biases, strict=True)]
        return in_stream(mixed, cells)

    return attend


def _attend(qkv: Sequence[Tensor], bias_NHLL: Tensor, dropout: float) -> Tensor:
    """(N * L, I) of queries, keys and values, each (N * L, I). T5 does not scale its scores."""
    num_passages, num_heads, length, _ = bias_NHLL.shape
    q, k, v = (
        x.view(num_passages, length, num_heads, -1).transpose(1, 2) for x in qkv
    )  # (N, H, L, C)
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias_NHLL, dropout_p=dropout, scale=1.0
    )
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def in_streams(table: Any, batch: Mapping[str, Tensor], *, dropout: float) -> Attend:
    """Attention within the rows of a packed batch, without grids, in memory that is linear in their
    length.
    """
    # the grids tell the longest row; reading the lengths would wait for the device
    longest = max(grid.shape[1] for grid in grids_of(batch))
    return in_rows(table, RowStarts(batch["starts"], batch["starts"], longest), dropout=dropout)


def in_short_rows(table: Any, rows: RowStarts, *, dropout: float) -> Attend:
    """The same as in_rows, on a processor: it keeps the shares of every row."""
    longest = rows.longest_piece
    bias_HLL = table.compute_bias(longest, longest, rows.queries.device).squeeze(0)
    if rows.is_causal:
        is_later = torch.ones(longest, longest, dtype=torch.bool).triu(1)
        bias_HLL = bias_HLL.masked_fill(is_later, -torch.inf)

    def attend(q_MI: Tensor, k_MI: Tensor, v_MI: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (table.n_heads, -1)) for x in (q_MI, k_MI, v_MI))
        pieces = rows.short_together
        mixed_MHC = row_attention.attend_biased(q, k, v, bias_HLL, pieces, dropout=dropout)
        return mixed_MHC.flatten(1)

    return attend


def in_rows(table: Any, rows: RowStarts, *, dropout: float) -> Attend:
    """Attention within rows; causal if the table is a decoder's."""
    buckets = torch.arange(table.relative_attention_num_buckets, device=rows.queries.device)
    # all distances beyond the largest one are in the last bucket
    num_distances = table.relative_attention_max_distance + 1
    bucket_of = _buckets(table, num_distances, buckets.device)[1:].to(torch.int32)
    # called as a module, for under ZeRO-3 a call gathers the table
    biases = Biases(table.relative_attention_bias(buckets), bucket_of)

    def attend(q_MI: Tensor, k_MI: Tensor, v_MI: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (table.n_heads, -1)) for x in (q_MI, k_MI, v_MI))
        return stream_attend(q, k, v, rows, biases=biases, dropout=dropout).flatten(1)

    return attend


def flex(passage: Tensor, position: Tensor) -> AttendBy:
    """Attention as one block-sparse product over the stream, without grids; CUDA only.

    torch's FlexAttention has no dropout on attention probabilities; other dropout is not affected.
    ConfigError without CUDA, where FlexAttention has no backward pass.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if passage.device.type != "cuda" and torch.is_grad_enabled():
        raise ConfigError('attention="flex" trains on CUDA only. Use "bucketed" or "padded" here.')
    length = int(position.max()) + 1

    def same_passage(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return passage[query] == passage[key]

    num = len(passage)
    is_cuda = passage.device.type == "cuda"
    blocks = create_block_mask(
        same_passage, None, None, num, num, device=passage.device, _compile=is_cuda
    )
    run: Any = torch.compile(flex_attention, dynamic=True) if is_cuda else flex_attention

    def by(table: Any) -> Attend:
        buckets = _buckets(table, length, passage.device)
        biases_H = table.relative_attention_bias(buckets).t().contiguous()

        def bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + biases_H[head, position[key] - position[query] + length]

        def attend(q_MI: Tensor, k_MI: Tensor, v_MI: Tensor) -> Tensor:
            q, k, v = (
                x.view(1, num, table.n_heads, -1).transpose(1, 2) for x in (q_MI, k_MI, v_MI)
            )
            return (
                run(q, k, v, score_mod=bias, block_mask=blocks, scale=1.0)
                .transpose(1, 2)
                .reshape(num, -1)
            )

        return attend

    return by


def _buckets(table: Any, length: int, device: torch.device) -> Tensor:
    """(2 * length,) bucket of every distance key - query from -length to length - 1."""
    distances = torch.arange(-length, length, device=device)
    if family_of(table.config).reads_buckets_from_config:
        return table._relative_position_bucket(distances)
    return table._relative_position_bucket(
        distances,
        bidirectional=not table.is_decoder,
        num_buckets=table.relative_attention_num_buckets,
        max_distance=table.relative_attention_max_distance,
    )
