"""Attention of ranks that share a stream: before it, each rank has all heads of its own tokens;
inside, some heads of all tokens. Source: DeepSpeed-Ulysses, Jacobs et al. 2023 (arXiv 2309.14509).

DeepSpeed 0.19.8 has a class for it (DistributedAttention), which knows no rows of a stream.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainer.runtime import distributed

# P ranks, L tokens of a stretch, M = P x L, H heads, h = H / P, C width of a head


def repeats(key_value_heads: int, ranks: int) -> int:
    """How often each key-value head is repeated, so that every rank has equally many."""
    return ranks // math.gcd(key_value_heads, ranks)


def to_heads(x_1HLC: Tensor, ranks: int) -> Tensor:
    """(1, H, L, C) of the tokens of this rank -> (1, h, M, C) of all tokens: the heads of this
    rank. A collective of the neighbours, also in the backward pass.
    """
    parts_PhLC = x_1HLC.squeeze(0).unflatten(0, (ranks, -1))
    return exchange(parts_PhLC.transpose(1, 2)).flatten(0, 1).transpose(0, 1).unsqueeze(0)


def to_tokens(x_1MhC: Tensor, ranks: int) -> Tensor:
    """(1, M, h, C) of all tokens -> (1, L, H, C) of the tokens of this rank. A collective of the
    neighbours, also in the backward pass.
    """
    parts_PLhC = exchange(x_1MhC.squeeze(0).unflatten(0, (ranks, -1)))
    return parts_PLhC.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def exchange(parts: Tensor) -> Tensor:
    """distributed.exchanged of (P, ...), with the gradients sent back the same way."""
    return _Exchange.apply(parts)  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return distributed.exchanged(parts.contiguous())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return distributed.exchanged(gradient.contiguous())
