"""Cross-attention of few queries over many states, without computing the states' keys and values.

A score is q.(W s) = (q W).s. So a head's weight of keys is applied to its few queries instead of to
all states, and its weight of values is applied to the mixed states. For an answer of 7 tokens and
heads of width 64 this takes an eighth of cross-attention's products, and no tensor as long as the
states is kept except the states. The result equals that of the ordinary form except for rounding,
with the same dropout. Source: the absorbed weights of DeepSeek-V2 2024 (arXiv 2405.04434), 2.1.2,
there for a cache, here for training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.packed.dropped import Dropout

# N query tokens of all rows, B rows, T most queries of a row, A = T x heads, S most states of a
# row, D width, H heads, C width of one head, I = H x C

_FEW = 0.5  # weights are absorbed if that takes at most this share of the ordinary form's products


@dataclass(frozen=True)
class FewQueries:
    """B rows of few queries, and the states that each row reads, as rectangles."""

    states_BSD: Tensor
    is_state_BS: Tensor | None  # False for padding; None: there is no padding
    cells_N: Tensor  # the place of each query among all B * T
    queries: int  # T

    @property
    def count(self) -> int:
        """B."""
        return len(self.states_BSD)


def is_few(queries: int, rows: int, heads: Any) -> bool:
    """Whether absorbing the weights is much less work. queries: those of all rows together."""
    return is_absorbable(heads) and queries * heads.n_heads <= _FEW * rows * heads.k.out_features


def is_absorbable(heads: Any) -> bool:
    """Whether a T5Attention has one plain weight for keys and one for values: without adapters, not
    quantized, not shared by the heads.
    """
    plain = all(type(layer) is nn.Linear and layer.bias is None for layer in (heads.k, heads.v))
    return plain and heads.k.out_features == heads.v.out_features == heads.q.out_features


def attend(heads: Any, rows: FewQueries, normed_ND: Tensor) -> Tensor:
    """(N, I): a T5Attention's values mixed for every query, before its output layer. Its modules
    are called in the order of the ordinary form, whatever other ranks do.
    """
    q_NHC = heads.q(normed_ND).unflatten(-1, (heads.n_heads, -1))
    q_NHD = _call_narrow(heads.k, q_NHC, is_back=False)
    rate = getattr(heads.dropout, "p", heads.dropout) if heads.training else 0.0
    drop = Dropout.with_seed(rate, q_NHD.device) if rate else None
    if rows.count > 1:  # zeros where a row has fewer queries
        cells = q_NHD.new_zeros(rows.count * rows.queries, *q_NHD.shape[1:])
        q_NHD = cells.index_copy(0, rows.cells_N, q_NHD)
    q_BAD = q_NHD.reshape(rows.count, -1, q_NHD.shape[-1])
    mixed_BAD = _Mix.apply(q_BAD, rows, drop, rows.states_BSD)
    mixed_NHD = mixed_BAD.reshape(-1, heads.n_heads, mixed_BAD.shape[-1])  # pyright: ignore[reportOptionalMemberAccess]
    if rows.count > 1:
        mixed_NHD = mixed_NHD.index_select(0, rows.cells_N)
    return _call_narrow(heads.v, mixed_NHD, is_back=True).flatten(1)


# A weight on the other side
# --------------------------------------------------------------------------------------------------


def _call_narrow(layer: nn.Module, x_NHX: Tensor, *, is_back: bool) -> Tensor:
    """_Narrow with the weight of `layer`, as a call of that layer: ZeRO-3 gathers its weight in the
    hooks of a call.

    The weight of keys maps each head's queries to (N, H, D); with is_back the weight of values maps
    each head's mixed states to (N, H, C).
    """
    with _instead(layer, lambda x: _Narrow.apply(x, layer.weight, is_back)):  # pyright: ignore[reportArgumentType]
        return layer(x_NHX)


@contextmanager
def _instead(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward  # the class's again


class _Narrow(torch.autograd.Function):
    """The product with a weight (I, D), head by head: from C to D or, with is_back, from D to C.

    It keeps the weight itself for the backward pass, and no view of it, so that ZeRO-3 can release
    the weight in between.
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
    """(B, A, D): the states mixed for every query. The fp32 scores are not kept, but computed again
    in the backward pass.
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
    """The batched product in fp32, without rounding to the inputs' dtype."""
    if one.dtype == torch.float32:
        return torch.bmm(one, other)
    if one.device.type == "cpu":  # torch 2.13 has no product with another output dtype there
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
    """Applies dropout in place: 0 where dropped, other values scaled up."""
    if drop is not None and is_dropped is not None:
        x.masked_fill_(is_dropped, 0.0).div_(1 - drop.rate)
    return x
