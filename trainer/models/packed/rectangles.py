"""Copies the tokens of a stream into rectangles, for attention that needs them, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# M tokens, H heads, C width of one


def in_rectangles(x_MHC: Tensor, cells_M: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """(M, H, C) of the tokens of a stream -> (size, H, C) of each rectangle, cell after cell; 0
    where no token lies.
    """
    flat = x_MHC.new_zeros(sum(sizes), *x_MHC.shape[1:]).index_copy_(0, cells_M, x_MHC)
    # the backward pass of a split is a copy
    return (flat,) if len(sizes) == 1 else flat.split(list(sizes))


def in_stream(rectangles: Sequence[Tensor], cells_M: Tensor) -> Tensor:
    """The reverse of in_rectangles: (M, ...) of the tokens, out of (size, ...) of the cells."""
    flat = rectangles[0] if len(rectangles) == 1 else torch.cat(list(rectangles))
    return _Taken.apply(flat, cells_M)  # pyright: ignore[reportReturnType] (a Tensor)


class _Taken(torch.autograd.Function):
    """index_select whose backward copies instead of adding: no cell is selected twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cells_M: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(cells_M)
        ctx.num_cells = len(x)
        return x.index_select(0, cells_M)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (cells_M,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.num_cells, *gradient.shape[1:]).index_copy_(
            0, cells_M, gradient
        ), None
