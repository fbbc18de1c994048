"""Lion: each number moves by the rate, in the direction of the sign of a momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 2**22  # numbers of a large vector that are stepped at once: one copy of them is made


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2), with decoupled weight decay.

    The state of a weight is `exp_avg`, in its dtype. A weight without a gradient is left out.
    """

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step; `closure` is torch's and unused."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weight)
                flat: list[Tensor] = [
                    tensor.reshape(-1) if tensor.is_contiguous() else tensor
                    for tensor in (weight, weight.grad, state["exp_avg"])
                ]
                for parts in zip(*(tensor.split(CHUNK) for tensor in flat), strict=True):
                    _step(*parts, group=group)


def _step(weight: Tensor, gradient: Tensor, average: Tensor, *, group: dict[str, Any]) -> None:
    first, second = group["betas"]
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    direction = average.lerp(gradient, 1 - first).sign_()
    weight.add_(direction, alpha=-group["lr"])
    average.lerp_(gradient, 1 - second)
