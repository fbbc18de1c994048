"""A network and rows that optimizers and engines are tried on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STEPS, ROWS = 6, 8


def network() -> nn.Module:
    """A frozen first layer, odd sizes (ZeRO-3 has to pad), a norm and biases that must not
    decay.
    """
    with torch.random.fork_rng():
        torch.manual_seed(7)
        net = nn.Sequential(
            nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)
        )
    net[0].requires_grad_(False)
    return net


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(STEPS, ROWS, 5, generator=generator), torch.randn(
        STEPS, ROWS, generator=generator
    )
