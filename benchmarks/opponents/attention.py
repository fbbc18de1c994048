"""Attention of rows that lie one after the other, row by row: what a lean loop of torch does about
pads. Plain functions for T5's modules, and one that transformers' AttentionInterface hands to any
stock model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

# M tokens of all rows, H heads, C width of one, N rows of equal length L

NAME = "benchmark_rows"
_spans: list[tuple[int, int]] = []  # of the stream that a stock model reads now


def spans_of(lengths: Sequence[int], *, equal: bool) -> list[tuple[int, int]]:
    """(rows, length) of pieces of a stream: neighbours of equal length together, or each row by
    itself.
    """
    if not equal:
        return [(1, length) for length in lengths]
    return [(len(list(same)), length) for length, same in groupby(lengths)]


def begin(lengths: Sequence[int], *, equal: bool) -> None:
    """State the rows of the stream that a stock model reads next."""
    _spans[:] = spans_of(lengths, equal=equal)


def _of_stock(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: Any = None, **__: Any
) -> tuple[Tensor, None]:
    """(1, H, M, C) of a stream -> (1, M, H, C)."""
    how = {"is_causal": bool(getattr(module, "is_causal", False)), "scale": scaling}
    is_grouped, mixed = key.shape[1] != query.shape[1], []
    sizes = [rows * length for rows, length in _spans]
    pieces = zip(_spans, *(x.split(sizes, 2) for x in (query, key, value)), strict=True)
    for (rows, _length), *qkv in pieces:
        q, k, v = (x[0].unflatten(1, (rows, -1)).transpose(0, 1) for x in qkv)
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=is_grouped, **how)
        mixed.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(mixed)[None], None


AttentionInterface.register(NAME, _of_stock)


def by_row(
    q_MHC: Tensor,
    k_MHC: Tensor,
    v_MHC: Tensor,
    spans: Sequence[tuple[int, int, int]],
    *,
    bias_1HLL: Tensor | None = None,
    plain: bool,
    scale: float = 1.0,
) -> Tensor:
    """(M, H * C). spans: rows, queries and keys of each piece. plain: by products and a softmax of
    torch, not by scaled_dot_product_attention.
    """
    mixed = []
    for rows, q, k, v in _pieces(q_MHC, k_MHC, v_MHC, spans):
        own = None if bias_1HLL is None else bias_1HLL[..., : q.shape[2], : k.shape[2]]
        if plain:
            scores = q @ k.transpose(2, 3)
            scores = scores if scale == 1.0 else scores * scale
            out = (scores if own is None else scores + own).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=own, scale=scale)
        mixed.append(out.transpose(1, 2).reshape(rows * q.shape[2], -1))
    return torch.cat(mixed)


def _pieces(
    q_MHC: Tensor, k_MHC: Tensor, v_MHC: Tensor, spans: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    of_queries = q_MHC.split([rows * queries for rows, queries, _ in spans])
    keys = [rows * length for rows, _, length in spans]
    for (rows, *_), *qkv in zip(
        spans, of_queries, k_MHC.split(keys), v_MHC.split(keys), strict=True
    ):
        q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in qkv)
        yield rows, q, k, v


def t5_stack(
    stack: Any,
    ids_M: Tensor,
    lengths: Sequence[int],
    *,
    equal: bool,
    plain: bool,
    read: tuple[Tensor, Sequence[int]] | None = None,
) -> Tensor:
    """(M, D) states of a T5's encoder, or of its decoder over the states and lengths of `read`."""
    spans = [(rows, length, length) for rows, length in spans_of(lengths, equal=equal)]
    hidden, longest = stack.embed_tokens(ids_M), max(lengths)
    bias = stack.block[0].layer[0].SelfAttention.compute_bias(longest, longest)
    if read is not None:
        hides = torch.ones(longest, longest, dtype=torch.bool).triu(1)
        bias = bias.masked_fill(hides, -torch.inf)
        across = [(1, mine, others) for mine, others in zip(lengths, read[1], strict=True)]
    for block in stack.block:
        own, *more = block.layer
        heads, normed = own.SelfAttention, own.layer_norm(hidden)
        qkv = (part(normed).unflatten(-1, (heads.n_heads, -1)) for part in _qkv(heads))
        hidden = hidden + heads.o(by_row(*qkv, spans, bias_1HLL=bias, plain=plain))
        if read is not None:
            heads, normed = more[0].EncDecAttention, more[0].layer_norm(hidden)
            given = zip(_qkv(heads), (normed, read[0], read[0]), strict=True)
            qkv = (part(x).unflatten(-1, (heads.n_heads, -1)) for part, x in given)
            hidden = hidden + heads.o(by_row(*qkv, across, plain=plain))
        hidden = more[-1](hidden)
    return stack.final_layer_norm(hidden)


def _qkv(heads: Any) -> tuple[Any, Any, Any]:
    return heads.q, heads.k, heads.v
