"""Dropout whose mask is drawn again in the backward pass, with the bits of F.dropout.

A mask follows from the state of the device's generator before the draw: seed and offset on CUDA,
which the host knows without waiting for the device, and the whole state (5,056 bytes) on the CPU.
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
    """A tensor after its dropout, and what its gradient is multiplied with: on the CPU 0 or
    1 / (1 - rate) in the tensor's dtype, elsewhere a mask of one byte.
    """

    values: Tensor
    mask: Tensor


class Draw(Protocol):
    """The dropout of one tensor, drawn in the forward pass and again in the backward pass."""

    def first(self, input: Tensor) -> Tensor:
        """The tensor after its dropout. Called once."""
        ...

    def again(self, input: Tensor) -> Dropped:
        """The same dropout of a tensor of the same shape, strides and dtype."""
        ...

    def gradient(self, of_values: Tensor, dropped: Dropped) -> Tensor:
        """The gradient of the input, of that of `dropped.values`."""
        ...


class TorchDraw(Draw):
    """F.dropout at a rate. Made just before the first draw; draws of others in between are
    not disturbed.
    """

    def __init__(self, device: torch.device, rate: float) -> None:
        self._rate, self._device = rate, device
        self._state = _state_of(device) if rate else None

    def first(self, input: Tensor) -> Tensor:
        return F.dropout(input, self._rate) if self._rate else input

    def again(self, input: Tensor) -> Dropped:
        if self._state is None or not input.numel():
            return Dropped(input, input)
        now = _state_of(self._device)
        _set_state(self._device, self._state)
        try:
            return _dropped(input, self._rate)
        finally:
            _set_state(self._device, now)

    def gradient(self, of_values: Tensor, dropped: Dropped) -> Tensor:
        if self._state is None or not of_values.numel():
            return of_values
        if of_values.device.type == "cpu" or self._rate == 1.0:
            return of_values * dropped.mask
        return _aten.native_dropout_backward(of_values, dropped.mask, 1 / (1 - self._rate))


def _dropped(input: Tensor, rate: float) -> Dropped:
    """F.dropout of a tensor with numbers in it, as torch 2.11 to 2.13 computes it (ATen,
    native/Dropout.cpp).
    """
    if rate == 1.0:
        mask = torch.zeros_like(input)
        return Dropped(input * mask, mask)
    if input.device.type == "cpu":
        mask = torch.empty_like(input).bernoulli_(1 - rate).div_(1 - rate)
        return Dropped(input * mask, mask)
    return Dropped(*torch.native_dropout(input, rate, True))


def _state_of(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
