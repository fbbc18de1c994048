"""Attention of a processor on a stream of rows: each row where it lies, without pads and without
grids; neighbours of equal length together.

Autograd sees one operator however many rows there are, and each row's results are written to their
place in one tensor. Slices in a graph would cost a tensor of zeros as long as the stream for each
row, in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# M query tokens and S key tokens of all rows, H heads, G key-value heads, C width of one; of a
# piece: N rows, Q queries and L keys of each

_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_softmax: Any = torch.ops.aten._softmax.out  # in place, if the result is its input


@dataclass(frozen=True)
class Piece:
    """Neighbours in a stream that have equally many queries, and equally many keys."""

    rows: int
    first_query: int  # its place in the stream
    first_key: int
    num_queries: int  # of each row
    num_keys: int

    def queries(self, x_MHC: Tensor) -> Tensor:
        """(N, H, Q, C), a view."""
        return _laid_out(x_MHC, self.first_query, self.rows, self.num_queries)

    def keys(self, x_SGC: Tensor) -> Tensor:
        """(N, G, L, C), a view."""
        return _laid_out(x_SGC, self.first_key, self.rows, self.num_keys)


def _laid_out(x: Tensor, start: int, rows: int, length: int) -> Tensor:
    return x.narrow(0, start, rows * length).unflatten(0, (rows, length)).transpose(1, 2)


def pieces_of(query_starts: Tensor, key_starts: Tensor | None = None) -> list[Piece]:
    """The rows that have queries. starts: (rows + 1,) where rows begin, and the last one ends;
    key_starts None: queries and keys are the same tokens.
    """
    of_queries = query_starts.tolist()
    of_keys = of_queries if key_starts is None else key_starts.tolist()
    found: list[Piece] = []
    spans = zip(pairwise(of_queries), pairwise(of_keys), strict=True)
    for (start, stop), (first_key, last_key) in spans:
        if start == stop:  # a document may have no summary
            continue
        piece = Piece(1, start, first_key, stop - start, last_key - first_key)
        if found and _continues(found[-1], piece):
            before = found.pop()
            sizes = (before.num_queries, before.num_keys)
            piece = Piece(before.rows + 1, before.first_query, before.first_key, *sizes)
        found.append(piece)
    return found


def _continues(before: Piece, piece: Piece) -> bool:
    sizes = (before.num_queries, before.num_keys) == (piece.num_queries, piece.num_keys)
    return sizes and before.first_key + before.rows * before.num_keys == piece.first_key


# Without biases and dropout: torch's fused kernel
# --------------------------------------------------------------------------------------------------


def attend(
    q_MHC: Tensor,
    k_SGC: Tensor,
    v_SGC: Tensor,
    pieces: Sequence[Piece],
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(M, H, C): the values of its row mixed for every query. scale: of the scores, None is that of
    torch's scaled_dot_product_attention.
    """
    return _Fused.apply(q_MHC, k_SGC, v_SGC, pieces, is_causal, scale)  # pyright: ignore[reportReturnType]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pieces: Sequence[Piece],
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        mixed, log_sums = q.new_empty(q.shape), []
        for piece in pieces:
            qkv = piece.queries(q), piece.keys(k), piece.keys(v)
            own, sums = _flash(*qkv, 0.0, is_causal, attn_mask=None, scale=scale)
            piece.queries(mixed).copy_(own)
            log_sums.append(sums)
        ctx.save_for_backward(q, k, v, mixed, *log_sums)
        ctx.pieces, ctx.is_causal, ctx.scale = pieces, is_causal, scale
        return mixed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, mixed, *log_sums = ctx.saved_tensors
        of_q, of_k, of_v = _gradients(q, k, v, ctx.pieces)
        for piece, sums in zip(ctx.pieces, log_sums, strict=True):
            qkv = piece.queries(q), piece.keys(k), piece.keys(v)
            given = (piece.queries(gradient), *qkv, piece.queries(mixed), sums)
            how: Any = {"attn_mask": None, "scale": ctx.scale}
            own_q, own_k, own_v = _flash_backward(*given, 0.0, ctx.is_causal, **how)
            piece.queries(of_q).copy_(own_q)
            piece.keys(of_k).copy_(own_k)
            piece.keys(of_v).copy_(own_v)
        return of_q, of_k, of_v, None, None, None


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece]
) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors for the gradients: 0 where a row has keys and no queries."""
    is_whole = sum(piece.rows * piece.num_keys for piece in pieces) == len(k)
    of_k, of_v = (x.new_empty(x.shape) if is_whole else x.new_zeros(x.shape) for x in (k, v))
    return q.new_empty(q.shape), of_k, of_v


# With biases or dropout: products and a softmax
# --------------------------------------------------------------------------------------------------


def attend_biased(
    q_MHC: Tensor,
    k_SHC: Tensor,
    v_SHC: Tensor,
    bias_HLL: Tensor | None,
    pieces: Sequence[Piece],
    *,
    dropout: float = 0.0,
) -> Tensor:
    """(M, H, C) as `attend` without its scale, whose scores have the biases of a query's and a
    key's places added, -inf where a key is not seen. The shares of every row are kept.
    """
    return _Biased.apply(q_MHC, k_SHC, v_SHC, bias_HLL, pieces, dropout)  # pyright: ignore[reportReturnType]


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias_HLL: Tensor | None,
        pieces: Sequence[Piece],
        dropout: float,
    ) -> Tensor:
        mixed, kept = q.new_empty(q.shape), []
        for piece in pieces:
            shares_BQL = _shares(piece, q, k, bias_HLL)
            scales_BQL = None
            applied_BQL = shares_BQL
            if dropout:
                scales_BQL = torch.empty_like(shares_BQL).bernoulli_(1 - dropout).div_(1 - dropout)
                applied_BQL = shares_BQL * scales_BQL
            own_BQC = torch.bmm(applied_BQL, _batch(piece.keys(v)))
            piece.queries(mixed).copy_(own_BQC.unflatten(0, (piece.rows, -1)))
            kept += [shares_BQL, scales_BQL]
        ctx.save_for_backward(q, k, v, bias_HLL, mixed, *kept)
        ctx.pieces = pieces
        return mixed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, bias_HLL, mixed, *kept = ctx.saved_tensors
        of_q, of_k, of_v = _gradients(q, k, v, ctx.pieces)
        of_bias = None
        if bias_HLL is not None and ctx.needs_input_grad[3]:
            of_bias = torch.zeros_like(bias_HLL)
        # the sum over keys of share x gradient of the share
        means_MH1 = (gradient * mixed).sum(-1, keepdim=True)
        for piece, shares, scales in zip(ctx.pieces, kept[::2], kept[1::2], strict=True):
            own_BQC = _batch(piece.queries(gradient))
            of_scores = torch.bmm(own_BQC, _batch(piece.keys(v)).transpose(1, 2))
            if scales is not None:
                of_scores.mul_(scales)
            of_scores.sub_(_batch(piece.queries(means_MH1))).mul_(shares)
            applied = shares if scales is None else shares * scales
            for total, product in (
                (piece.queries(of_q), torch.bmm(of_scores, _batch(piece.keys(k)))),
                (piece.keys(of_k), torch.bmm(of_scores.transpose(1, 2), _batch(piece.queries(q)))),
                (piece.keys(of_v), torch.bmm(applied.transpose(1, 2), own_BQC)),
            ):
                total.copy_(product.unflatten(0, (piece.rows, -1)))
            if of_bias is not None:
                of_rows = of_scores.unflatten(0, (piece.rows, -1))
                of_piece = of_rows[0] if piece.rows == 1 else of_rows.sum(0)
                of_bias[:, : piece.num_queries, : piece.num_keys] += of_piece
        return of_q, of_k, of_v, of_bias, None, None


def _shares(piece: Piece, q: Tensor, k: Tensor, bias_HLL: Tensor | None) -> Tensor:
    """(B, Q, L) of a piece: the softmax of its scores, computed in one tensor."""
    own, others = _batch(piece.queries(q)), _batch(piece.keys(k)).transpose(1, 2)
    if bias_HLL is None:
        scores = torch.bmm(own, others)
    else:
        bias = bias_HLL[:, : piece.num_queries, : piece.num_keys]
        scores = bias.expand(piece.rows, *bias.shape).reshape(own.shape[0], *bias.shape[1:])
        scores = scores.clone() if scores._base is not None else scores  # reshape may be a view
        scores.baddbmm_(own, others)
    return _softmax(scores, -1, False, out=scores)


def _batch(x_NHLC: Tensor) -> Tensor:
    """(B, L, C) with B = N x H: a view of one row, a copy of several."""
    return x_NHLC[0] if len(x_NHLC) == 1 else x_NHLC.flatten(0, 1)


def is_wide(x: Tensor) -> bool:
    """Whether attend_biased takes tensors like this one: a processor's, of 32 or 64 bits."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)

