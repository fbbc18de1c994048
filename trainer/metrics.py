"""Numbers that merge exactly over batches and ranks: sums with counts, and pooled values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ratio:
    """A mean that is divided once: summed over batches and ranks, in fp64."""

    num: Tensor  # () any float dtype
    den: Tensor  # () integer or float

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.num.double() + other.num.double(), self.den.double() + other.den.double())

    def value(self) -> float:
        """The mean; NaN when nothing was counted."""
        return float(self.num.double() / self.den.double())


@dataclass(frozen=True)
class Pool:
    """Values that must be seen together (AUROC, calibration error): gathered from all ranks, then reduced."""

    values: Tensor  # (N, ...)
    reduce: Callable[[Tensor], float]

    def __add__(self, other: Pool) -> Pool:
        return Pool(torch.cat([self.values, other.values]), self.reduce)

    def value(self) -> float:
        return self.reduce(self.values)
