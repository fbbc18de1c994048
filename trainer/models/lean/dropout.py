"""Dropout whose output is computed again in the backward pass, with the bits of F.dropout.

On a GPU the mask is drawn again: it follows from the state of the device's generator before the
draw, seed and offset, which the host knows without waiting for the device. A processor takes 5 ns
to draw a number, as long as for a product of 16 ranks, so that there a mask of one byte is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_aten: Any = torch.ops.aten


def rate_of(dropout: nn.Module) -> float:
    """The share that a module drops now: 0 in evaluation, and of an nn.Identity."""
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


class Dropped(NamedTuple):
    """A tensor after its dropout, and what has to be kept to repeat it."""

    values: Tensor
    kept: tuple[Tensor, ...]


class DroppedAgain(NamedTuple):
    """A tensor after its dropout, and the gradient of the tensor."""

    values: Tensor
    gradient: Tensor | None


class Draw(Protocol):
    """The dropout of one tensor in the forward pass, and the same one in the backward pass."""

    def first(self, input: Tensor) -> Dropped:
        """The tensor after its dropout. Called once."""
        ...

    def again(self, input: Tensor, of_values: Tensor | None, *kept: Tensor) -> DroppedAgain:
        """The same dropout of a tensor of the same shape, strides and dtype, and its gradient.

        of_values: the gradient of the values, which is overwritten; None: no gradient is wanted.
        """
        ...


class TorchDraw(Draw):
    """F.dropout at a rate, as torch 2.11 to 2.13 computes it (ATen, native/Dropout.cpp). Made just
    before the first draw; draws of others in between are not disturbed.
    """

    def __init__(self, device: torch.device, rate: float) -> None:
        self.rate = rate
        self._draws = 0.0 < rate < 1.0  # torch computes a rate of 1 without a draw
        self._device = None if device.type == "cpu" else device
        self._state = _state_of(device) if self._draws and self._device else None

    def first(self, input: Tensor) -> Dropped:
        if not self.rate or not input.numel():
            return Dropped(input, ())
        if self._state is not None:
            return Dropped(F.dropout(input, self.rate), ())
        # not bool, which torch 2.13 converts to floats three times as slowly
        mask = torch.empty_like(input, dtype=torch.uint8)
        mask = mask.bernoulli_(1 - self.rate) if self._draws else mask.zero_()
        return Dropped(self._factor(mask, input.dtype).mul_(input), (mask,))

    def again(self, input: Tensor, of_values: Tensor | None, *kept: Tensor) -> DroppedAgain:
        if kept:
            factor = self._factor(kept[0], input.dtype)
            gradient = None if of_values is None else of_values.mul_(factor)
            return DroppedAgain(factor.mul_(input), gradient)
        if self._state is None or self._device is None or not input.numel():
            return DroppedAgain(input, of_values)
        now = _state_of(self._device)
        _set_state(self._device, self._state)
        try:
            values, mask = torch.native_dropout(input, self.rate, True)
        finally:
            _set_state(self._device, now)
        if of_values is None:
            return DroppedAgain(values, None)
        scale = 1 / (1 - self.rate)
        return DroppedAgain(values, _aten.native_dropout_backward(of_values, mask, scale))

    def _factor(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """What numbers are multiplied with: 0 or 1 / (1 - rate) in their dtype."""
        return mask.to(dtype).div_(1 - self.rate) if self._draws else mask.to(dtype)


def _state_of(device: torch.device) -> Tensor:
    return torch.get_device_module(device).get_rng_state(device)


def _set_state(device: torch.device, state: Tensor) -> None:
    torch.get_device_module(device).set_rng_state(state, device)
