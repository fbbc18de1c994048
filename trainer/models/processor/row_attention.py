"""Attention of a processor on a stream of rows: each row where it lies, without pads and without
grids; neighbours of equal length together.

Autograd sees one operator however many rows there are, and each row's results are written to their
place in one tensor. Slices in a graph would cost a tensor of zeros as long as the stream for each
row, in the backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from trainer.switches import uses_cpu_kernels

# M query tokens and S key tokens of all rows, H heads, G key-value heads, C width of one; of a
# piece: N rows, Q queries and L keys of each

_HOST = torch.device("cpu")
_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_softmax: Any = torch.ops.aten._softmax.out  # in place, if the result is its input
# Keys of a row up to which 16-bit gradients are computed in fp32: torch 2.13 takes 2.2 times as
# long in bf16 at 256, 8 times at 64, and as long at 512 (an Intel Xeon with AMX).
FEW_KEYS = 384


# Rows of up to SHORT tokens are copied to lie together, MOST_COPIED tokens at a time: the calls for
# each of them alone take longer than its numbers.
SHORT, MOST_COPIED = 32, 1024


@dataclass(frozen=True)
class Piece:
    """Rows of a stream that have equally many queries, and equally many keys: neighbours, or short
    rows at any places.
    """

    rows: int
    first_query: int  # its place in the stream
    first_key: int
    num_queries: int  # of each row
    num_keys: int
    query_places: Tensor | None = field(default=None, compare=False)  # (N x Q,); None: neighbours
    key_places: Tensor | None = field(default=None, compare=False)  # (N x L,)

    @property
    def num_scores(self) -> int:
        """Of one head."""
        return self.rows * self.num_queries * self.num_keys

    def queries(self, x_MHC: Tensor) -> Tensor:
        """(N, H, Q, C): of neighbours a view."""
        if self.query_places is not None:
            return _of_rows(x_MHC.index_select(0, self.query_places), self.rows)
        return _of_rows(x_MHC.narrow(0, self.first_query, self.rows * self.num_queries), self.rows)

    def keys(self, x_SGC: Tensor) -> Tensor:
        """(N, G, L, C): of neighbours a view."""
        if self.key_places is not None:
            return _of_rows(x_SGC.index_select(0, self.key_places), self.rows)
        return _of_rows(x_SGC.narrow(0, self.first_key, self.rows * self.num_keys), self.rows)

    def put_queries(self, x_MHC: Tensor, own_NHQC: Tensor) -> None:
        """Write what queries() would read."""
        if self.query_places is None:
            self.queries(x_MHC).copy_(own_NHQC)
        else:
            x_MHC.index_copy_(0, self.query_places, _stream(own_NHQC).to(x_MHC.dtype))

    def put_keys(self, x_SGC: Tensor, own_NGLC: Tensor) -> None:
        """Write what keys() would read."""
        if self.key_places is None:
            self.keys(x_SGC).copy_(own_NGLC)
        else:
            x_SGC.index_copy_(0, self.key_places, _stream(own_NGLC).to(x_SGC.dtype))


def _of_rows(x: Tensor, rows: int) -> Tensor:
    return x.unflatten(0, (rows, -1)).transpose(1, 2)


def _stream(x_NHLC: Tensor) -> Tensor:
    """(N x L, H, C): a view of what torch's fused kernel writes."""
    return x_NHLC.transpose(1, 2).flatten(0, 1)


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


def with_short_rows_together(pieces: Sequence[Piece]) -> list[Piece]:
    """The same rows for attend_biased(), which makes many calls for a piece: short ones of equal
    length are in few pieces.
    """
    alike: dict[tuple[int, int], list[Piece]] = {}
    found: list[Piece] = []
    for piece in pieces:
        sizes = piece.num_queries, piece.num_keys
        if min(sizes) > 0 and max(sizes) <= SHORT:
            alike.setdefault(sizes, []).append(piece)
        else:
            found.append(piece)
    for (num_queries, num_keys), several in alike.items():
        if len(several) == 1:
            found += several
            continue
        starts = [
            (one.first_query + n * num_queries, one.first_key + n * num_keys)
            for one in several
            for n in range(one.rows)
        ]
        most = MOST_COPIED // max(num_queries, num_keys)
        for at in range(0, len(starts), most):
            of_queries, of_keys = torch.tensor(starts[at : at + most]).unbind(1)
            places = (
                (of_queries[:, None] + torch.arange(num_queries)).flatten(),
                (of_keys[:, None] + torch.arange(num_keys)).flatten(),
            )
            found.append(Piece(len(of_queries), *starts[at], num_queries, num_keys, *places))
    return found


def each(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces one by one. The memory plan has one stand for others like it."""
    return iter(pieces)


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
    if torch.is_autocast_enabled("cpu"):  # it knows torch's attention, and not the fused operator
        dtype = torch.get_autocast_dtype("cpu")
        q_MHC, k_SGC, v_SGC = (x.to(dtype) for x in (q_MHC, k_SGC, v_SGC))
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
        def of_piece(piece: Piece) -> tuple[Tensor, Tensor]:
            qkv = piece.queries(q), piece.keys(k), piece.keys(v)
            own, sums_NHQ = _flash(*qkv, 0.0, is_causal, attn_mask=None, scale=scale)
            return own, sums_NHQ.unsqueeze(-1)

        if _is_one(pieces, q, k):
            mixed, log_sums_MH1 = map(_stream, of_piece(pieces[0]))
            # no view: blocks would be compiled anew for the shape of what it is a view of
            mixed = mixed.data
        else:
            wide = torch.promote_types(q.dtype, torch.float32)
            mixed, log_sums_MH1 = q.new_empty(q.shape), q.new_empty(*q.shape[:2], 1, dtype=wide)
            for piece in each(pieces):
                own, own_sums = of_piece(piece)
                piece.put_queries(mixed, own)
                piece.put_queries(log_sums_MH1, own_sums)
        ctx.save_for_backward(q, k, v, mixed, log_sums_MH1)
        ctx.pieces, ctx.is_causal, ctx.scale = pieces, is_causal, scale
        return mixed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, mixed, log_sums_MH1 = ctx.saved_tensors

        def of_piece(piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
            qkv = piece.queries(q), piece.keys(k), piece.keys(v)
            sums_NHQ = piece.queries(log_sums_MH1).squeeze(-1)
            given = (piece.queries(gradient), *qkv, piece.queries(mixed))
            if piece.num_keys <= FEW_KEYS:
                given = tuple(x.to(log_sums_MH1.dtype) for x in given)
            how: Any = {"attn_mask": None, "scale": ctx.scale}
            return _flash_backward(*given, sums_NHQ, 0.0, ctx.is_causal, **how)

        if _is_one(ctx.pieces, q, k):
            found = zip(of_piece(ctx.pieces[0]), (q, k, v), strict=True)
            return *(_stream(own).to(of.dtype) for own, of in found), None, None, None
        of_q, of_k, of_v = _gradients(q, k, v, ctx.pieces)
        for piece in each(ctx.pieces):
            own_q, own_k, own_v = of_piece(piece)
            piece.put_queries(of_q, own_q)
            piece.put_keys(of_k, own_k)
            piece.put_keys(of_v, own_v)
        return of_q, of_k, of_v, None, None, None


def _is_one(pieces: Sequence[Piece], q: Tensor, k: Tensor) -> bool:
    """Whether one piece has all queries and keys: its results are those of the stream."""
    spans = [(one.rows * one.num_queries, one.rows * one.num_keys) for one in pieces[:2]]
    return spans == [(len(q), len(k))]  # its rows are neighbours, as there is no other


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
        mixed = q.new_empty(q.shape)
        every_share = q.new_empty(q.shape[1] * sum(piece.num_scores for piece in pieces))
        is_kept = torch.empty_like(every_share, dtype=torch.bool) if dropout else None
        if is_kept is not None:
            is_kept.bernoulli_(1 - dropout)
        for piece, place in _placed(pieces, q.shape[1]):
            shares_BQL = _shares(piece, q, k, bias_HLL, every_share[place])
            applied_BQL = _dropped(shares_BQL, is_kept, place, dropout)
            own_BQC = torch.bmm(applied_BQL, _batch(piece.keys(v)))
            piece.put_queries(mixed, own_BQC.unflatten(0, (piece.rows, -1)))
        ctx.save_for_backward(q, k, v, bias_HLL, mixed, every_share, is_kept)
        ctx.pieces, ctx.dropout = pieces, dropout
        return mixed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, bias_HLL, mixed, every_share, is_kept = ctx.saved_tensors
        of_q, of_k, of_v = _gradients(q, k, v, ctx.pieces)
        of_bias = None
        if bias_HLL is not None and ctx.needs_input_grad[3]:
            of_bias = torch.zeros_like(bias_HLL)
        # the sum over keys of share x gradient of the share
        means_MH1 = (gradient * mixed).sum(-1, keepdim=True)
        for piece, place in _placed(ctx.pieces, q.shape[1]):
            own_BQC = _batch(piece.queries(gradient))
            shares = every_share[place].view(-1, piece.num_queries, piece.num_keys)
            of_shares = torch.bmm(own_BQC, _batch(piece.keys(v)).transpose(1, 2))
            of_scores = _dropped(of_shares, is_kept, place, ctx.dropout)
            of_scores.sub_(_batch(piece.queries(means_MH1))).mul_(shares)
            applied = _dropped(shares, is_kept, place, ctx.dropout)
            by_keys, by_queries = of_scores.transpose(1, 2), _batch(piece.queries(q))
            for put, total, product in (
                (piece.put_queries, of_q, torch.bmm(of_scores, _batch(piece.keys(k)))),
                (piece.put_keys, of_k, torch.bmm(by_keys, by_queries)),
                (piece.put_keys, of_v, torch.bmm(applied.transpose(1, 2), own_BQC)),
            ):
                put(total, product.unflatten(0, (piece.rows, -1)))
            if of_bias is not None:
                of_rows = of_scores.unflatten(0, (piece.rows, -1))
                of_piece = of_rows[0] if piece.rows == 1 else of_rows.sum(0)
                of_bias[:, : piece.num_queries, : piece.num_keys] += of_piece
        return of_q, of_k, of_v, of_bias, None, None


def _shares(piece: Piece, q: Tensor, k: Tensor, bias_HLL: Tensor | None, place: Tensor) -> Tensor:
    """(B, Q, L) of a piece: the softmax of its scores, computed where they are kept."""
    own, others = _batch(piece.queries(q)), _batch(piece.keys(k)).transpose(1, 2)
    scores = place.view(-1, piece.num_queries, piece.num_keys)
    if bias_HLL is None:
        torch.bmm(own, others, out=scores)
    else:
        bias = bias_HLL[:, : piece.num_queries, : piece.num_keys]
        scores.unflatten(0, (piece.rows, -1)).copy_(bias)
        scores.baddbmm_(own, others)
    return _softmax(scores, -1, False, out=scores)


def _placed(pieces: Sequence[Piece], heads: int) -> Iterator[tuple[Piece, slice]]:
    """Each piece, and where its scores lie among all."""
    starts = accumulate((heads * piece.num_scores for piece in pieces), initial=0)
    place_of = {id(piece): start for piece, start in zip(pieces, starts, strict=False)}
    for piece in each(pieces):
        start = place_of[id(piece)]
        yield piece, slice(start, start + heads * piece.num_scores)


def _dropped(x_BQL: Tensor, is_kept: Tensor | None, place: slice, rate: float) -> Tensor:
    """The same without what dropout takes, scaled up."""
    if is_kept is None:
        return x_BQL
    return (x_BQL * is_kept[place].view(x_BQL.shape)).div_(1 - rate)


def _batch(x_NHLC: Tensor) -> Tensor:
    """(B, L, C) with B = N x H: a view of one row, a copy of several."""
    return x_NHLC[0] if len(x_NHLC) == 1 else x_NHLC.flatten(0, 1)


def is_here(x: Tensor) -> bool:
    """Whether rows are attended to one by one: on a processor, unless LATHE_CPU_KERNELS=0 is set,
    or the run began so: last bits differ (docs/decisions/0041-kernels-of-a-processor.md).
    """
    return x.device == _HOST and uses_cpu_kernels(os.environ)


def is_wide(x: Tensor) -> bool:
    """Whether attend_biased takes tensors like this one: a processor's, of 32 or 64 bits, whose
    products are not rounded to 16 bits by autocast: it would round the scores, too.
    """
    is_long = x.dtype in (torch.float32, torch.float64)
    return is_here(x) and is_long and not torch.is_autocast_enabled("cpu")
