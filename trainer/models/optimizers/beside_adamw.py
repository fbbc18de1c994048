"""An optimizer whose rule fits some weights only, and AdamW for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainer.models.optimizers.rates import ADAMW

if TYPE_CHECKING:
    from trainer.config.schema import Optim


class BesideAdamW(torch.optim.Optimizer):
    """Steps its groups one by one, those of the rule ADAMW by torch's AdamW, which shares groups
    and state with it: ZeRO replaces parameters in the groups, and steps groups alone.
    """

    def __init__(self, groups: list[dict[str, Any]], optim: Optim) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": optim.betas, "eps": optim.eps})
        others = [group for group in self.param_groups if group["rule"] == ADAMW]
        self._adamw: torch.optim.AdamW | None = None
        if others:
            self._adamw = torch.optim.AdamW(
                others, lr=0.0, betas=optim.betas, eps=optim.eps, fused=True
            )
            for group, complete in zip(others, self._adamw.param_groups, strict=True):
                group |= {key: value for key, value in complete.items() if key not in group}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step; `closure` is torch's and unused."""
        for group in self.param_groups:
            if group["rule"] != ADAMW:
                self.step_own(group)
                continue
            assert self._adamw is not None, "it was made for these groups"
            self._adamw.param_groups, self._adamw.state = [group], self.state
            self._adamw.step()

    def step_own(self, group: dict[str, Any]) -> None:
        """Step one group by the own rule."""
        raise NotImplementedError
