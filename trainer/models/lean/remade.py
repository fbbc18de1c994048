"""A tensor that is not kept for the backward pass, because it is computed again from others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Remade:
    """What a tensor is computed from: `remake(*sources)`, outside of a graph and with the same
    bits. Another operation keeps the sources for the backward pass anyway.
    """

    remake: Callable[..., Tensor]
    sources: tuple[Tensor, ...]


def call(layer: Any, input: Tensor, remade: Remade | None) -> Tensor:
    """layer(input), which keeps the sources of its input instead of the input if it can."""
    return layer(input, remade=remade) if getattr(layer, "takes_remade", False) else layer(input)
