"""The optimizers: how each is made, and what it remembers of a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainer.models.optimizers.adamw8bit import AdamW8bit
from trainer.models.optimizers.adamw8bit import nbytes as adamw8bit_nbytes
from trainer.models.optimizers.lion import Lion
from trainer.models.optimizers.muon import Muon
from trainer.models.optimizers.rates import ADAMW

if TYPE_CHECKING:
    from trainer.config.schema import Optim

# Adafactor's constants as published (Shazeer & Stern 2018, arXiv 1804.04235, algorithm 6): beta2 =
# 1 - step ** -0.8, updates clipped at an RMS of 1, and weights of an RMS below 0.001 treated as if
# they had it.
BETA2_DECAY, CLIP_RMS, SMALLEST_WEIGHT = -0.8, 1.0, 1e-3
# torch 2.13 adds its epsilon elsewhere than the paper: its default, 1.2e-7, is what the squares of
# gradients of 3e-4 amount to. This one is never seen, and its square is still above 0 in fp32 (rows
# of an embedding without a gradient).
SMALLEST_SQUARE = 1e-16


def build(groups: list[dict[str, Any]], optim: Optim) -> torch.optim.Optimizer:
    """The optimizer of parameter groups (rates.param_groups).

    Its lr is 0 until the loop sets it, so that building it moves nothing.
    """
    if optim.name == "adafactor":
        return torch.optim.Adafactor(
            groups,
            lr=0.0,
            beta2_decay=BETA2_DECAY,
            eps=(SMALLEST_SQUARE, SMALLEST_WEIGHT),
            d=CLIP_RMS,
        )
    if optim.name == "sgd":
        momentum, nesterov = optim.momentum or 0.0, bool(optim.nesterov)
        return torch.optim.SGD(groups, lr=0.0, momentum=momentum, nesterov=nesterov, fused=True)
    if optim.name == "lion":
        return Lion(groups, betas=optim.betas)
    if optim.name == "muon":
        return Muon(groups, optim)
    if optim.name == "adamw8bit":
        return AdamW8bit(groups, optim)
    return torch.optim.AdamW(groups, lr=0.0, betas=optim.betas, eps=optim.eps, fused=True)


def state_shapes(optim: Optim, shape: torch.Size, *, rule: str) -> dict[str, torch.Size]:
    """What a checkpoint holds of what the optimizer remembers of a weight of `shape`.

    The shape of each tensor, by torch's names for them. rule: of rates.rules.
    """
    if optim.name == "adamw" or rule == ADAMW:
        return {"exp_avg": shape, "exp_avg_sq": shape}
    if optim.name == "adamw8bit":
        return {"code1": shape, "code2": shape, "scale1": shape, "scale2": shape}
    if optim.name == "lion":
        return {"exp_avg": shape}
    if optim.name in ("sgd", "muon"):
        return {"momentum_buffer": shape} if optim.momentum else {}
    if len(shape) < 2:
        return {"variance": shape}
    return {
        "row_var": torch.Size([*shape[:-1], 1]),
        "col_var": torch.Size([*shape[:-2], 1, shape[-1]]),
    }


def saved_nbytes(optim: Optim, shape: torch.Size, *, rule: str) -> int:
    """Bytes of what a checkpoint holds of what the optimizer remembers of a weight."""
    saved = state_shapes(optim, shape, rule=rule)
    return sum(one.numel() * (1 if key.startswith("code") else 4) for key, one in saved.items())


def state_nbytes(optim: Optim, shape: torch.Size, *, rule: str) -> int:
    """Bytes of what the optimizer remembers of a weight on the device, masters not counted."""
    if optim.name == "adamw8bit" and rule != ADAMW:
        return adamw8bit_nbytes(shape.numel())
    return 4 * sum(one.numel() for one in state_shapes(optim, shape, rule=rule).values())
