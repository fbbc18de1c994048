"""Weights that stand still in some steps (train.freeze), at any stage of ZeRO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.models.optimizers.rates import TrainedAs


class Standstill:
    """What stands still, step by step.

    A weight that stands still gets no gradient: none is computed, and none counts in the norm that
    clips. The optimizer leaves its group out, so that the weight does not decay and its moments and
    their count of steps stay as they are; below fp32 its master stays, too.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], places: Mapping[str, TrainedAs]) -> None:
        """ConfigError when all weights stand still in a step."""
        self._weights = [
            (named[name], place.freeze) for name, place in places.items() if place.freeze
        ]
        freezes = [freeze for _, freeze in self._weights]
        changes = {1, *(one.since + 1 for one in freezes)}
        idle = [step for step in sorted(changes) if all(one.holds(step) for one in freezes)]
        if idle and len(freezes) == len(named):
            raise ConfigError(
                f"train.freeze: nothing would train in step {idle[0]}. Let an entry name fewer "
                "weights, or begin later."
            )
        self._hidden: list[tuple[Tensor, Tensor | None]] = []

    def __bool__(self) -> bool:
        """Whether anything ever stands still."""
        return bool(self._weights)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make every step of `optimizer` leave out what stands still: torch's optimizers and
        DeepSpeed's pass over a tensor without a gradient, and step what a group holds at the time.
        """
        for group in optimizer.param_groups:
            group["stands"] = False
        optimizer.register_step_pre_hook(self._hide)
        optimizer.register_step_post_hook(self._show)

    def begin(self, step: int, optimizer: Any) -> None:
        """Let stand still what does so in this step, until end(); the first step is 1.

        optimizer: DeepSpeed's.
        """
        if not self:
            return
        for group in optimizer.param_groups:
            freeze = group["freeze"]
            group["stands"] = freeze is not None and freeze.holds(step)
        for weight, freeze in self._weights:
            weight.requires_grad_(not freeze.holds(step))

    def end(self) -> None:
        """After the step: DeepSpeed shows no state of a weight that needs no gradient."""
        for weight, _ in self._weights:
            weight.requires_grad_(True)

    def _hide(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for tensor in group["params"] if group["stands"] else ():
                self._hidden.append((tensor, tensor.grad))
                tensor.grad = None

    def _show(self, *_: Any) -> None:
        while self._hidden:
            tensor, gradient = self._hidden.pop()
            tensor.grad = gradient
