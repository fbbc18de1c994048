"""Gated feed-forward layers (SwiGLU, GEGLU) that keep only the gate and what it multiplies.

down(act(gate) * up): stock torch keeps act(gate), too, and all steps of an activation that is
written in several; adapters in `down` keep the product. Here both are computed again in the
backward pass, by the code of the model, so that no bit changes; on a GPU with liger-kernel by its
kernels (liger.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.models.families import FAMILIES
from trainer.models.fused import like, stock_of
from trainer.models.lean import liger
from trainer.models.lean.dropout import TorchDraw, rate_of
from trainer.models.lean.remade import Remade, call

Activation = Callable[[Tensor], Tensor]
_NO_DROPOUT = nn.Identity()


def keep_less(model: nn.Module) -> None:
    """Make the gated feed-forward layers of `model` keep less. Compiled ones keep what the compiler
    decides: there the stock code runs.
    """
    for module in model.modules():
        if type(module).__name__ not in CLASSES:
            continue
        for form in _FORMS:
            # an activation with weights (xIELU) has gradients of its own
            is_ours = hasattr(module, form.first) and not [*getattr(module, form.act).parameters()]
            if is_ours and type(module).forward is not form.forward:
                module.__class__ = like(type(module), form.forward)


CLASSES = {row.gated for row in FAMILIES.values() if row.gated}


def _of_two(self: Any, hidden: Tensor) -> Tensor:
    """Llama's: one product gives the gate, and another one what it multiplies."""
    if torch.compiler.is_compiling():
        return stock_of(self).forward(self, hidden)
    gate, up = self.gate_proj(hidden), self.up_proj(hidden)
    dropout = getattr(self, "dropout", _NO_DROPOUT)
    return call(self.down_proj, *_product(gate, up, self.act_fn, dropout))


def _of_one(self: Any, hidden: Tensor) -> Tensor:
    """Phi-3's: one product gives both."""
    if torch.compiler.is_compiling():
        return stock_of(self).forward(self, hidden)
    gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
    return call(self.down_proj, *_product(gate, up, self.activation_fn, _NO_DROPOUT))


def _of_t5(self: Any, hidden: Tensor) -> Tensor:
    """T5 v1.1's, whose last weight may have a dtype of its own."""
    if torch.compiler.is_compiling():
        return stock_of(self).forward(self, hidden)
    gate, up = self.wi_0(hidden), self.wi_1(hidden)
    inner, remade = _product(gate, up, self.act, self.dropout)
    weight = self.wo.weight
    is_plain = isinstance(weight, Tensor) and weight.is_floating_point()
    return call(self.wo, inner.to(weight.dtype) if is_plain else inner, remade)


def _of_modernbert(self: Any, hidden: Tensor) -> Tensor:
    """ModernBERT's: one product gives both, the gate first."""
    if torch.compiler.is_compiling():
        return stock_of(self).forward(self, hidden)
    gate, up = self.Wi(hidden).chunk(2, dim=-1)
    return call(self.Wo, *_product(gate, up, self.act, self.drop))


class _Form(NamedTuple):
    """The layers that hold a module of the name `first`, and their activation as `act`."""

    first: str
    act: str
    forward: Callable[[Any, Tensor], Tensor]


_FORMS = (
    _Form("gate_proj", "act_fn", _of_two),
    _Form("gate_up_proj", "activation_fn", _of_one),
    _Form("wi_0", "act", _of_t5),
    _Form("Wi", "act", _of_modernbert),
)


def _product(
    gate: Tensor, up: Tensor, act: nn.Module, dropout: nn.Module
) -> tuple[Tensor, Remade | None]:
    """dropout(act(gate) * up), and how it is made again in a backward pass."""
    draw = TorchDraw(gate.device, rate_of(dropout))
    # its forward(): hooks, such as ZeRO-3's, would run again in the backward pass
    product = liger.product_of(act, gate, up) or _Spelt(act.forward)
    if not torch.is_grad_enabled():
        return draw.first(product.forward(gate, up)).values, None
    made: Any = _Product.apply(gate, up, product, draw)
    inner, *kept = made

    def remake(gate: Tensor, up: Tensor, *kept: Tensor) -> Tensor:
        return draw.again(product.forward(gate, up), None, *kept).values

    return inner, Remade(remake, (gate, up, *kept))


class _Spelt(NamedTuple):
    """act(gate) * up by the code of the model."""

    act: Activation

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act(gate) * up


class _Product(torch.autograd.Function):
    """(dropout(act(gate) * up), what `draw` keeps)"""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gate: Tensor, up: Tensor, product: _Spelt | liger.Product, draw: TorchDraw
    ) -> tuple[Tensor, ...]:
        values, kept = draw.first(product.forward(gate, up))
        ctx.save_for_backward(gate, up, *kept)
        ctx.mark_non_differentiable(*kept)
        ctx.product, ctx.draw, ctx.is_dropped = product, draw, draw.rate > 0.0
        ctx.is_spent = False
        return values, *kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up, *kept = ctx.saved_tensors
        is_spelt = isinstance(ctx.product, _Spelt)
        leaf = opened = gate  # what the library needs of it: its shape
        if is_spelt:
            with torch.enable_grad():
                leaf = gate.detach().requires_grad_(ctx.needs_input_grad[0])
                opened = ctx.product.act(leaf)
        if ctx.is_dropped:
            gradient = ctx.draw.again(opened.detach(), gradient.clone(), *kept).gradient
        if not is_spelt:
            assert not ctx.is_spent, "gate and up were overwritten by an earlier backward pass"
            ctx.is_spent = True
            return *ctx.product.backward(gradient, gate, up), None, None
        of_gate = of_up = None
        if ctx.needs_input_grad[0]:
            (of_gate,) = torch.autograd.grad(opened, leaf, gradient * up)
        if ctx.needs_input_grad[1]:
            of_up = gradient * opened.detach()
        return of_gate, of_up, None, None
