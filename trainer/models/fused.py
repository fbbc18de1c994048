"""Operators that stock transformers spells out, as the one kernel that a GPU has for them.

Eager mode reads and writes every step of a formula. T5's norm is five such steps and its gated GELU
eight, which are a quarter of an encoder's time on an H200 by counting (docs/log.md). On the CPU the
modules stay as they are, to the last bit.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CPU = torch.device("cpu")
# Those that multiply by their weight, not by 1 + weight as Gemma's do. Source: transformers 5.23.
_NORMS = (
    "T5LayerNorm",
    "MT5LayerNorm",
    "UMT5LayerNorm",
    "LlamaRMSNorm",
    "MistralRMSNorm",
    "Qwen2RMSNorm",
    "Qwen3RMSNorm",
    "Phi3RMSNorm",
)


def fuse(model: nn.Module) -> None:
    """From here on, RMS norms and the tanh form of GELU in `model` are one kernel each on a device
    that is not the CPU. The norm rounds once, behind the weight, where transformers rounds twice.
    """
    for module in model.modules():
        name = type(module).__name__
        if name in _NORMS:
            module.forward = functools.partial(_norm, module, module.forward)
        elif name == "NewGELUActivation":
            module.forward = functools.partial(_gelu, module.forward)


def _norm(module: Any, stock: Any, hidden: Tensor) -> Tensor:
    if hidden.device == _CPU:
        return stock(hidden)
    return rms_norm(hidden, module.weight, module.variance_epsilon)


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """(..., D): hidden / its root mean square x weight, in fp32 and rounded once."""
    shape, weight = hidden.shape[-1:], weight.to(hidden.dtype)
    if hidden.device.type not in ("cuda", "cpu"):
        # The memory plan's device, where torch 2.13 would spell the norm out. This one allocates as
        # much, and nobody reads what it computes.
        return F.layer_norm(hidden, shape, weight, None, epsilon)
    return F.rms_norm(hidden, shape, weight, epsilon)


def _gelu(stock: Any, hidden: Tensor) -> Tensor:
    return stock(hidden) if hidden.device == _CPU else F.gelu(hidden, approximate="tanh")
