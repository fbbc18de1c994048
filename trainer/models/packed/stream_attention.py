"""Attention inside the rows of a stream of tokens, with T5's biases, in memory that is linear in
the length: no grid, no tensor of scores, no tensor of biases.

A row's scores are computed for a block of queries at a time, once in the forward pass and once more
in the backward pass. Dropout comes from random numbers that are a function of a seed and of a
score's place, so both passes drop the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trainer.models.packed import stream_kernels
from trainer.models.packed.dropped import Dropout
from trainer.models.processor import row_attention

# M query tokens and S key tokens of all rows, H heads, C width of one, K buckets of distances; of a
# row: Q queries, L keys, A queries of a block, X distances = Q + L - 1

_QUERIES, _SCORES = 128, 1 << 19  # of a block; its scores lie in a processor's cache


@dataclass(frozen=True)
class Biases:
    """T5's position biases, which are added to scores; the distance from query to key decides."""

    table_KH: Tensor
    bucket_of: Tensor  # (2 * largest + 1,) of the distances -largest to largest, the last for all
    # beyond

    @property
    def largest(self) -> int:
        return len(self.bucket_of) // 2


@dataclass(frozen=True)
class RowStarts:
    """Where each row begins among the tokens, and where the last one ends: (rows + 1,) int32."""

    queries: Tensor
    keys: Tensor
    longest: int  # of either
    is_causal: bool = False  # a query sees the keys up to its own place

    @functools.cached_property
    def pieces(self) -> list[row_attention.Piece]:
        """On a processor: the rows, neighbours of equal length together."""
        return row_attention.pieces_of(self.queries, self.keys)

    @functools.cached_property
    def short_together(self) -> list[row_attention.Piece]:
        """The same, and short rows of equal length together wherever they lie."""
        return row_attention.with_short_rows_together(self.pieces)

    @property
    def longest_piece(self) -> int:
        """On a processor: the most queries of a row."""
        return max((piece.num_queries for piece in self.pieces), default=1)

    def __post_init__(self) -> None:
        for name in ("queries", "keys"):  # kernels read them as they lie in memory
            object.__setattr__(self, name, getattr(self, name).contiguous())


def attend(
    q_MHC: Tensor,
    k_SHC: Tensor,
    v_SHC: Tensor,
    rows: RowStarts,
    *,
    biases: Biases | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """(M, H, C): the values of its row mixed for every query, with scores that are not scaled.

    dropout: of the shares. Equal states of torch's generator drop the same.
    """
    drop = Dropout.with_seed(dropout, q_MHC.device) if dropout else None
    table = None if biases is None else biases.table_KH
    bucket_of = None if biases is None else biases.bucket_of
    return _Attention.apply(q_MHC, k_SHC, v_SHC, table, bucket_of, rows, drop)  # pyright: ignore[reportReturnType]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table_KH: Tensor | None,
        bucket_of: Tensor | None,
        rows: RowStarts,
        drop: Dropout | None,
    ) -> Tensor:
        biases = _biases(table_KH, bucket_of)
        run = _forward if q.device.type == "cpu" else stream_kernels.forward
        mixed_MHC, log_sums_MH = run(q, k, v, rows, biases, drop)
        ctx.save_for_backward(q, k, v, table_KH, bucket_of, mixed_MHC, log_sums_MH)
        ctx.rows, ctx.drop = rows, drop
        return mixed_MHC

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, table_KH, bucket_of, mixed_MHC, log_sums_MH = ctx.saved_tensors
        biases = _biases(table_KH, bucket_of)
        run = _backward if q.device.type == "cpu" else stream_kernels.backward
        saved = Saved(q, k, v, mixed_MHC, log_sums_MH)
        of_q, of_k, of_v, of_table = run(saved, gradient, ctx.rows, biases, ctx.drop)
        return of_q, of_k, of_v, of_table, None, None, None


@dataclass(frozen=True)
class Saved:
    """What a backward pass starts from."""

    q_MHC: Tensor
    k_SHC: Tensor
    v_SHC: Tensor
    mixed_MHC: Tensor
    log_sums_MH: Tensor  # of the exponentials of a query's scores, fp32


def _biases(table_KH: Tensor | None, bucket_of: Tensor | None) -> Biases | None:
    return None if table_KH is None or bucket_of is None else Biases(table_KH, bucket_of)


# On the processor, block by block
# --------------------------------------------------------------------------------------------------


def _forward(
    q: Tensor, k: Tensor, v: Tensor, rows: RowStarts, biases: Biases | None, drop: Dropout | None
) -> tuple[Tensor, Tensor]:
    mixed_MHC = torch.empty_like(q)
    log_sums_MH = q.new_empty(q.shape[:2], dtype=torch.float32)
    for row in _rows(q, k, v, rows, biases, drop):
        for block in row.blocks():
            shares = row.scores(block)
            largest_HA1 = shares.amax(-1, keepdim=True)
            sums_HA1 = shares.sub_(largest_HA1).exp_().sum(-1, keepdim=True)
            row.drop(block, shares)
            mixed_HAC = shares @ row.values(block)
            mixed_HAC /= sums_HA1 if drop is None else sums_HA1 * (1 - drop.rate)
            row.put(mixed_MHC, block, mixed_HAC)
            row.put(log_sums_MH, block, (sums_HA1.log_() + largest_HA1).squeeze(-1))
    return mixed_MHC, log_sums_MH


def _backward(
    saved: Saved, gradient: Tensor, rows: RowStarts, biases: Biases | None, drop: Dropout | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v = saved.q_MHC, saved.k_SHC, saved.v_SHC
    of_q, of_k, of_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    of_table = None if biases is None else torch.zeros_like(biases.table_KH, dtype=torch.float32)
    # the sum over keys of share x gradient of the share
    means_MH = (gradient.float() * saved.mixed_MHC.float()).sum(-1)
    for row in _rows(q, k, v, rows, biases, drop):
        of_keys, of_values = torch.zeros_like(row.k_HLC), torch.zeros_like(row.v_HLC)
        of_distances_HX = torch.zeros_like(row.biases_HX)
        for block in row.blocks():
            own_HAC = row.take(gradient, block).transpose(0, 1)
            if drop is not None:
                own_HAC = own_HAC / (1 - drop.rate)
            shares = row.scores(block)
            shares.sub_(row.take(saved.log_sums_MH, block).t()[..., None]).exp_()
            of_shares = own_HAC @ row.values(block).transpose(1, 2)
            row.drop(block, of_shares)
            of_shares.sub_(row.take(means_MH, block).t()[..., None])
            # shares x gradients, as a view of zeros of (H, A, L + A), which _diagonal_sums needs
            heads, queries, keys = shares.shape
            padded = shares.new_zeros(heads, queries, keys + queries)
            of_scores = torch.mul(shares, of_shares, out=padded[..., :keys])
            row.put(of_q, block, of_scores @ row.keys(block))
            at = (block.heads, block.keys)
            of_keys[at].baddbmm_(of_scores.transpose(1, 2), row.queries(block))
            of_distances_HX[block.heads, block.distances] += _diagonal_sums(of_scores)
            row.drop(block, shares)
            of_values[at].baddbmm_(shares.transpose(1, 2), own_HAC)
        of_k[row.keys_of] = of_keys.transpose(0, 1).to(of_k.dtype)
        of_v[row.keys_of] = of_values.transpose(0, 1).to(of_v.dtype)
        if of_table is not None and row.buckets_X is not None:
            of_table.index_add_(0, row.buckets_X, of_distances_HX.t())
    of_table = (
        of_table if of_table is None or biases is None else of_table.to(biases.table_KH.dtype)
    )
    return of_q, of_k, of_v, of_table


def _diagonal_sums(sheared: Tensor) -> Tensor:
    """(H, A + L - 1): the sums over all entries (a, l) of (A, L) that have the same a + l.

    Read in rows that are one shorter than in memory, such entries stand in one column.
    """
    num_heads, num_queries, num_keys = sheared.shape
    width = num_keys + num_queries - 1
    strides = (sheared.stride(0), width, 1)
    return sheared.as_strided((num_heads, num_queries, width), strides).sum(1)


@dataclass(frozen=True)
class _Block:
    """Some queries of a row, counted from its end, and some heads."""

    heads: slice
    queries: slice  # among the row's queries in reverse
    keys: slice  # those that any of them sees
    distances: slice


class _Row:
    """One row's tensors in fp32, head after head, with its queries in reverse order: so the biases
    of one query are those of the query before it, moved by one, and a block's biases are a view.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, spans: tuple[slice, slice], *, is_causal: bool
    ) -> None:
        self.queries_of, self.keys_of = spans
        self.is_causal = is_causal
        self._q_HQC = q[self.queries_of].flip(0).transpose(0, 1).float()
        self.k_HLC, self.v_HLC = (
            x[self.keys_of].transpose(0, 1).float().contiguous() for x in (k, v)
        )
        self.biases_HX = self._q_HQC.new_zeros(len(self._q_HQC), 0)
        self.buckets_X: Tensor | None = None
        self._has_biases = False
        self._drop: Dropout | None = None

    def biased(self, biases: Biases | None) -> _Row:
        """The same, with the biases of its distances: key - query from 1 - Q to L - 1."""
        num_queries, num_keys = self._q_HQC.shape[1], self.k_HLC.shape[1]
        self.biases_HX = self._q_HQC.new_zeros(len(self._q_HQC), num_queries + num_keys - 1)
        if biases is not None:
            self._has_biases = True
            distances_X = torch.arange(1 - num_queries, num_keys, device=self._q_HQC.device)
            places_X = distances_X.clamp(-biases.largest, biases.largest) + biases.largest
            self.buckets_X = biases.bucket_of.long()[places_X]
            self.biases_HX = biases.table_KH.float()[self.buckets_X].t().contiguous()
        return self

    def dropping(self, drop: Dropout | None) -> _Row:
        """The same, with dropout of its shares."""
        self._drop = drop
        return self

    def blocks(self) -> Iterator[_Block]:
        num_heads, num_queries, num_keys = *self._q_HQC.shape[:2], self.k_HLC.shape[1]
        for start in range(0, num_queries, _QUERIES):
            stop = min(start + _QUERIES, num_queries)
            # the last query of the block, which stands first in it, sees most
            num_visible = min(num_queries - start, num_keys) if self.is_causal else num_keys
            heads = max(1, _SCORES // ((stop - start) * num_visible))
            for head in range(0, num_heads, heads):
                yield _Block(
                    slice(head, min(head + heads, num_heads)),
                    slice(start, stop),
                    slice(0, num_visible),
                    slice(start, stop + num_visible - 1),
                )

    def queries(self, block: _Block) -> Tensor:
        return self._q_HQC[block.heads, block.queries]

    def keys(self, block: _Block) -> Tensor:
        return self.k_HLC[block.heads, block.keys]

    def values(self, block: _Block) -> Tensor:
        return self.v_HLC[block.heads, block.keys]

    def scores(self, block: _Block) -> Tensor:
        """(H, A, L) fp32 scores of a block, biases and causality included."""
        scores = self.queries(block) @ self.keys(block).transpose(1, 2)
        num_heads, num_queries, num_keys = scores.shape
        if self._has_biases:
            own_HX = self.biases_HX[block.heads]
            strides = (own_HX.stride(0), 1, 1)
            first = own_HX.storage_offset() + block.queries.start
            scores += own_HX.as_strided((num_heads, num_queries, num_keys), strides, first)
        if self.is_causal:
            queries_A = torch.arange(num_queries) + block.queries.start
            last_A1 = (self._q_HQC.shape[1] - 1 - queries_A)[:, None]
            scores.masked_fill_(torch.arange(num_keys) > last_A1, -torch.inf)
        return scores

    def drop(self, block: _Block, shares: Tensor) -> None:
        """Set those shares (H, A, L) of a block to 0 that dropout takes."""
        if self._drop is None:
            return
        num_heads = len(self._q_HQC)
        queries_A = self._tokens(block)
        is_dropped = self._drop.places(queries_A, num_heads, shares.shape[-1], block.heads)
        shares.masked_fill_(is_dropped, 0.0)

    def _tokens(self, block: _Block) -> Tensor:
        """(A,) where the queries of a block lie among all tokens."""
        return self.queries_of.stop - 1 - torch.arange(block.queries.start, block.queries.stop)

    def _span(self, block: _Block) -> slice:
        """The same as a slice, in the order of the tokens."""
        end = self.queries_of.stop
        return slice(end - block.queries.stop, end - block.queries.start)

    def take(self, x_MHC: Tensor, block: _Block) -> Tensor:
        """(A, H, ...) fp32: the values of a block's queries, in the reverse order of the block."""
        return x_MHC[self._span(block), block.heads].flip(0).float()

    def put(self, x_MHC: Tensor, block: _Block, values: Tensor) -> None:
        """Write (H, A, ...) values of a block to where its queries lie."""
        x_MHC[self._span(block), block.heads] = values.flip(1).transpose(0, 1).to(x_MHC.dtype)


def _rows(
    q: Tensor, k: Tensor, v: Tensor, rows: RowStarts, biases: Biases | None, drop: Dropout | None
) -> Iterator[_Row]:
    for spans in spans_of(rows):
        yield _Row(q, k, v, spans, is_causal=rows.is_causal).biased(biases).dropping(drop)


def spans_of(rows: RowStarts) -> Iterator[tuple[slice, slice]]:
    """For each row that has queries: where its queries lie, and where its keys lie."""
    queries, keys = (list(pairwise(starts.tolist())) for starts in (rows.queries, rows.keys))
    for own, others in zip(queries, keys, strict=True):
        if own[0] < own[1]:  # a document may have no summary
            yield slice(*own), slice(*others)
