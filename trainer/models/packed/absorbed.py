"""Cross-attention of few queries over many states, which makes no keys and no values of them.

A score is q.(W s) = (q W).s: a head's weight of keys is applied to its few queries instead of to
all states, and its weight of values to what was mixed of the states. For an answer of 7 tokens and
heads 64 wide that is an eighth of cross-attention's products, and nothing as long as the states is
kept but they themselves. Equal to the ordinary form but for rounding, with the same dropout.
Source: the absorbed weights of DeepSeek-V2 2024 (arXiv 2405.04434), 2.1.2, there for a cache, here
for training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.packed.dropped import Dropout

# N query tokens of all rows, B rows, T queries of the row that has most, A = T x heads, S states of
# the row that has most, D width, H heads, C width of one, I = H x C

_FEW = 0.5  # absorbed where it takes about so much of the ordinary form's products, or less


@dataclass(frozen=True)
class FewQueries:
    """B rows of few queries and the states that each reads, as rectangles."""

    states_BSD: Tensor
    is_state_BS: Tensor | None  # None: all are
    cells_N: Tensor  # where each query lies among all B * T
    queries: int  # T

    @property
    def count(self) -> int:
        """B."""
        return len(self.states_BSD)


def is_few(queries: int, rows: int, heads: Any) -> bool:
    """Whether absorbing is much less work, for so many queries of all rows together."""
    return is_absorbable(heads) and queries * heads.n_heads <= _FEW * rows * heads.k.out_features


def is_absorbable(heads: Any) -> bool:
    """Whether a T5Attention's keys and values are one plain weight each: not adapted, not
    quantized, not shared by the heads.
    """
    plain = all(type(layer) is nn.Linear and layer.bias is None for layer in (heads.k, heads.v))
    return plain and heads.k.out_features == heads.v.out_features == heads.q.out_features


def attend(heads: Any, rows: FewQueries, normed_ND: Tensor) -> Tensor:
    """(N, I): a T5Attention's values mixed for every query, before its output layer. Its modules
    are called in the order of the ordinary form, whatever other ranks do.
    """
    q_NHC = heads.q(normed_ND).unflatten(-1, (heads.n_heads, -1))
    q_NHD = _call_as(heads.k, _absorb, q_NHC)
    rate = getattr(heads.dropout, "p", heads.dropout) if heads.training else 0.0
    drop = Dropout.drawn(rate, q_NHD.device) if rate else None
    mixed_BAD = _Mix.apply(_spread(q_NHD, rows), rows, drop, rows.states_BSD)
    mixed_NHD = mixed_BAD.reshape(-1, heads.n_heads, mixed_BAD.shape[-1])  # pyright: ignore[reportOptionalMemberAccess]
    if rows.count > 1:
        mixed_NHD = mixed_NHD.index_select(0, rows.cells_N)
    return _call_as(heads.v, _values_of, mixed_NHD).flatten(1)


def _spread(q_NHD: Tensor, rows: FewQueries) -> Tensor:
    """(B, A, D), with zeros where a row has fewer queries."""
    if rows.count > 1:
        cells = q_NHD.new_zeros(rows.count * rows.queries, *q_NHD.shape[1:])
        q_NHD = cells.index_copy(0, rows.cells_N, q_NHD)
    return q_NHD.reshape(rows.count, -1, q_NHD.shape[-1])


# A weight on the other side
# --------------------------------------------------------------------------------------------------


def _call_as(
    layer: nn.Module, forward: Callable[[Tensor, Tensor], Tensor], inputs: Tensor
) -> Tensor:
    """forward(given, weight) as if it were the layer's own, so that whoever hooks into the layer
    has its weight there: ZeRO-3.
    """
    with _instead(layer, lambda x: forward(x, layer.weight)):  # pyright: ignore[reportArgumentType]
        return layer(inputs)


@contextmanager
def _instead(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward  # the class's again


def _absorb(q_NHC: Tensor, weight_ID: Tensor) -> Tensor:
    """(N, H, D): each head's queries times its rows of the weight."""
    return _Narrow.apply(q_NHC, weight_ID, False)  # pyright: ignore[reportReturnType]


def _values_of(mixed_NHD: Tensor, weight_ID: Tensor) -> Tensor:
    """(N, H, C): each head's rows of the weight times what it mixed."""
    return _Narrow.apply(mixed_NHD, weight_ID, True)  # pyright: ignore[reportReturnType]


class _Narrow(torch.autograd.Function):
    """Head by head through a weight (I, D), from C to D, or, `is_back`, from D to C.

    The weight itself is kept for the backward pass, no view of it, so that ZeRO-3 can take it away
    between the two.
    """

    @staticmethod
    def forward(ctx: Any, x_NHX: Tensor, weight_ID: Tensor, is_back: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x_NHX, weight_ID)
        ctx.is_back = is_back
        return _through(x_NHX, weight_ID, is_back=is_back)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_NHX, weight_ID = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _through(gradient, weight_ID, is_back=not ctx.is_back)
        if ctx.needs_input_grad[1]:
            left, right = (gradient, x_NHX) if ctx.is_back else (x_NHX, gradient)
            of_weight = torch.bmm(left.permute(1, 2, 0), right.transpose(0, 1)).flatten(0, 1)
        return of_x, of_weight, None


def _through(x_NHX: Tensor, weight_ID: Tensor, *, is_back: bool) -> Tensor:
    weight_HCD = weight_ID.unflatten(0, (x_NHX.shape[1], -1))
    weight = weight_HCD.transpose(1, 2) if is_back else weight_HCD
    return torch.bmm(x_NHX.transpose(0, 1), weight).transpose(0, 1)


# Attention whose keys and values are the states
# --------------------------------------------------------------------------------------------------


class _Mix(torch.autograd.Function):
    """(B, A, D): the states mixed for every query. Scores are not kept but computed twice, in
    fp32.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, q: Tensor, rows: FewQueries, drop: Dropout | None, states: Tensor
    ) -> Tensor:
        scores = _scores(q, states, rows)
        log_sums_BA1 = scores.logsumexp(-1, keepdim=True)
        shares = scores.sub_(log_sums_BA1).exp_()
        is_dropped = None if drop is None else _drop_mask(drop, shares, rows)
        _drop(shares, drop, is_dropped)
        mixed = torch.bmm(shares.to(states.dtype), states)
        ctx.save_for_backward(q, states, mixed, log_sums_BA1)
        ctx.rows, ctx.drop = rows, drop
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, states, mixed, log_sums_BA1 = ctx.saved_tensors
        drop, dtype = ctx.drop, states.dtype
        shares = _scores(q, states, ctx.rows).sub_(log_sums_BA1).exp_()
        is_dropped = None if drop is None else _drop_mask(drop, shares, ctx.rows)
        of_shares = _drop(_product(gradient, states.transpose(1, 2)), drop, is_dropped)
        # the sum over states of share x gradient of the share
        of_shares.sub_((gradient.float() * mixed.float()).sum(-1, keepdim=True))
        of_scores = of_shares.mul_(shares).to(dtype)
        of_q = torch.bmm(of_scores, states)
        of_states = None
        if ctx.needs_input_grad[3]:
            shares = _drop(shares, drop, is_dropped).to(dtype)
            both = torch.cat([of_scores, shares], 1).transpose(1, 2)
            of_states = torch.bmm(both, torch.cat([q, gradient], 1))
        return of_q, None, None, of_states


def _scores(q: Tensor, states: Tensor, rows: FewQueries) -> Tensor:
    """(B, A, S) fp32, not scaled; -inf where a row has no state."""
    scores = _product(q, states.transpose(1, 2))
    if rows.is_state_BS is not None:
        scores.masked_fill_(~rows.is_state_BS[:, None], -torch.inf)
    return scores


def _product(one: Tensor, other: Tensor) -> Tensor:
    """Their batched product, not rounded from fp32."""
    if one.dtype == torch.float32:
        return torch.bmm(one, other)
    if one.device.type == "cpu":  # torch 2.13 has no product there with an output of another kind
        return torch.bmm(one.float(), other.float())
    return torch.bmm(one, other, out_dtype=torch.float32)


def _drop_mask(drop: Dropout, shares: Tensor, rows: FewQueries) -> Tensor:
    """(B, A, S) bool of the shares that dropout takes, by a query's place in the stream."""
    queries = rows.count * rows.queries
    heads = shares.shape[:2].numel() // queries
    places = torch.arange(len(rows.cells_N), device=shares.device)
    if rows.count > 1:
        places = places.new_zeros(queries).index_copy(0, rows.cells_N, places)
    is_dropped_HAS = drop.places(places, heads, shares.shape[-1], slice(None))
    return is_dropped_HAS.transpose(0, 1).reshape(shares.shape)


def _drop(x: Tensor, drop: Dropout | None, is_dropped: Tensor | None) -> Tensor:
    """In place: 0 where dropped, and the rest made up for it."""
    if drop is not None and is_dropped is not None:
        x.masked_fill_(is_dropped, 0.0).div_(1 - drop.rate)
    return x
