"""LoRA layers that keep their input once, and neither what dropout makes of it nor a mask.

peft computes base(x) + B(A(dropout(x))) * scale. torch keeps dropout(x) and its mask for each of
the layers that read the same x, seven times in a Llama's block. Here A keeps x, which these layers
share, or what x is made of (remade.py), and drops again in the backward pass (dropout.py). Every
bit is peft's: `base`, A and B are called as modules in peft's order, so that hooks see the same.
"""

# N tokens, D width of the input, R rank

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.models.fused import like, stock_of
from trainer.models.lean.dropout import Draw, TorchDraw, rate_of
from trainer.models.lean.remade import Remade


def keep_less(model: nn.Module) -> None:
    """Make the LoRA layers of peft in `model` keep less. DoRA and other variants of peft, merged
    adapters, and layers of other kinds run the code of peft; so do compiled blocks.
    """
    from peft.tuners.lora.layer import Linear

    for module in model.modules():
        if type(module) is Linear and not module.lora_variant:
            module.__class__ = _kind(Linear)  # pyright: ignore[reportAttributeAccessIssue]
            for down in module.lora_A.values():
                if type(down) is nn.Linear:
                    down.__class__ = Down  # pyright: ignore[reportAttributeAccessIssue]


class Down(nn.Linear):
    """The A of an adapter."""

    def forward(self, input: Tensor, rate: float = 0.0, remade: Remade | None = None) -> Tensor:
        """(..., D) -> (..., R): A of the input after dropout at this rate. remade: how the input is
        made again, which then is not kept.
        """
        if not rate and remade is None and input.dtype == self.weight.dtype:
            return F.linear(input, self.weight)
        return low_of(input, self.weight, TorchDraw(input.device, rate), remade)


def lowered(down: Any, dropout: Any, input: Tensor) -> Tensor:
    """down(dropout(input)) of an adapter, which keeps the input alone if the adapter can."""
    return down(input, rate=rate_of(dropout)) if isinstance(down, Down) else down(dropout(input))


def low_of(input: Tensor, weight_RD: Tensor, draw: Draw, remade: Remade | None = None) -> Tensor:
    """(..., D) -> (..., R): F.linear(dropped input in the weight's dtype, weight). It keeps the
    input, or what that is made of.
    """
    return _Low.apply(input, weight_RD, draw, remade)  # pyright: ignore[reportReturnType]


class _Low(torch.autograd.Function):
    """F.linear(dropout(input.to(weight.dtype)), weight)"""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, input: Tensor, weight: Tensor, draw: Draw, remade: Remade | None
    ) -> Tensor:
        sources = (input,) if remade is None else [one.detach() for one in remade.sources]
        values, kept = draw.first(input.to(weight.dtype))
        ctx.save_for_backward(weight, *sources, *kept)
        ctx.num_sources = len(sources)
        ctx.draw, ctx.remake = draw, remade and remade.remake
        ctx.shape, ctx.dtype = input.shape, input.dtype
        return F.linear(values, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight_RD, *tensors = ctx.saved_tensors
        sources, kept = tensors[: ctx.num_sources], tensors[ctx.num_sources :]
        input = sources[0] if ctx.remake is None else ctx.remake(*sources)
        gradient_NR = gradient.reshape(-1, gradient.shape[-1])
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        of_values = gradient_NR.mm(weight_RD).view(ctx.shape) if needs_input else None
        values, of_input = ctx.draw.again(input.to(weight_RD.dtype), of_values, *kept)
        of_weight = None
        if needs_weight:
            of_weight = gradient_NR.t().mm(values.reshape(-1, ctx.shape[-1]))
        if of_input is not None:
            of_input = of_input.to(ctx.dtype)
        return of_input, of_weight, None, None


@functools.cache
def _kind(stock: type[nn.Module]) -> type[nn.Module]:
    kind = like(stock, _forward)
    kind.takes_remade = True  # pyright: ignore[reportAttributeAccessIssue]
    return kind


def _forward(
    self: Any, x: Tensor, *given: Any, remade: Remade | None = None, **named: Any
) -> Tensor:
    is_stock = torch.compiler.is_compiling() or given or named
    name = None if is_stock else _plain_adapter(self)
    if name is None:
        return stock_of(self).forward(self, x, *given, **named)
    result = self.base_layer(x)
    dtype, up = result.dtype, self.lora_B[name]
    # by their names: hooks of ZeRO-3 look through what is given by place
    low = self.lora_A[name](x, rate=rate_of(self.lora_dropout[name]), remade=remade)
    return (result + scaled(up, low, self.scaling[name])).to(dtype)


def _plain_adapter(layer: Any) -> str | None:
    """The name of the adapter that a layer adds, if that is one alone and peft adds it as
    base(x) + B(A(dropout(x))) * scale; otherwise None.
    """
    if layer.disable_adapters or layer.merged or len(layer.lora_A) != 1:
        return None
    (name,) = layer.lora_A
    is_cast = layer.cast_input_dtype_enabled
    is_ours = isinstance(layer.lora_A[name], Down) and list(layer.active_adapters) == [name]
    return name if is_ours and is_cast else None


def scaled(up: Any, low: Tensor, scale: float) -> Tensor:
    """up(low) * scale, with the bits of peft.

    A power of 2 may be taken into the few numbers of `low` without another rounding, which saves a
    pass over the many of the result, forward and backward. Not in fp16, whose small numbers have
    fewer bits; those of bf16 and fp32 begin at 1e-38. Nor where `up` adds a bias (peft's
    lora_bias), which is scaled, too.
    """
    has_bias = getattr(up, "bias", None) is not None
    if low.dtype == torch.float16 or has_bias or math.frexp(scale)[0] != 0.5:
        return up(low) * scale
    return up(low if scale == 1.0 else low * scale)
