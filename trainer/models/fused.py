"""Replaces operators of transformers by fused ones that take less time or memory, and compiles
blocks by torch.compile, once for streams and rows of any length.

Eager mode reads and writes every step of a formula. T5's norm has five such steps and its gated
GELU has eight; counted, they are a quarter of an encoder's time on an H200 (docs/log.md). On the
CPU the modules are unchanged, to the last bit.

In a compiled block every norm, activation, dropout and residual is fused with its neighbours. The
attention of streams is not compiled, for it has kernels of its own, which know where rows begin: a
graph ends before it, and another graph begins behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.families import FAMILIES

_CPU = torch.device("cpu")


def fuse(model: nn.Module) -> None:
    """Make the RMS norms and the tanh form of GELU in `model` one kernel each, except on the CPU.
    The norm rounds once, after the product with its weight, where transformers rounds twice.

    T5's ReLU with its dropout then keeps one tensor for the backward pass instead of three; the
    results have the same bits.
    """
    for module in model.modules():
        forward = _FUSED.get(type(module).__name__)
        if forward is not None and type(module).forward is not forward:
            module.__class__ = like(type(module), forward)


@functools.cache
def like(stock: type[nn.Module], forward: Any) -> type[nn.Module]:
    """A subclass of `stock` with another forward. A forward set on each module instead would make
    torch.compile compile the code around every module anew.
    """
    return type(stock.__name__, (stock,), {"forward": forward})


def _norm(self: Any, hidden: Tensor) -> Tensor:
    if hidden.device == _CPU:
        return stock_of(self).forward(self, hidden)
    return rms_norm(hidden, self.weight, self.variance_epsilon)


def _gelu(self: Any, hidden: Tensor) -> Tensor:
    if hidden.device == _CPU:
        return stock_of(self).forward(self, hidden)
    return F.gelu(hidden, approximate="tanh")


def _dense(self: Any, hidden: Tensor) -> Tensor:
    rate = self.dropout.p if self.training else 0.0
    if not rate or type(self.act) is not nn.ReLU or torch.compiler.is_compiling():
        return stock_of(self).forward(self, hidden)
    inner: Any = _DroppedReLU.apply(self.wi(hidden), rate)
    weight = self.wo.weight  # transformers leaves it in fp32 where the rest is read in fp16
    is_plain = isinstance(weight, Tensor) and weight.is_floating_point()
    return self.wo(inner.to(weight.dtype) if is_plain else inner)


class _DroppedReLU(torch.autograd.Function):
    """dropout(relu(x)). The result is 0 exactly where no gradient flows, so the backward pass needs
    only the result, which the next layer keeps anyway.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rate: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        result = F.dropout(F.relu(hidden), rate)
        ctx.save_for_backward(result)
        ctx.rate = rate
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (result,) = ctx.saved_tensors
        # rounded as torch's dropout rounds it on the CPU
        scale = torch.ones((), dtype=gradient.dtype, device=gradient.device).div_(1 - ctx.rate)
        return (gradient * scale).masked_fill_(result <= 0, 0.0), None


def stock_of(module: nn.Module) -> Any:
    """The class that `like` gave another forward."""
    return type(module).__mro__[1]


_FUSED = {
    **{row.rms_norm: _norm for row in FAMILIES.values() if row.rms_norm},
    **{row.feed_forward: _dense for row in FAMILIES.values() if row.feed_forward},
    "NewGELUActivation": _gelu,
}


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """(..., D): hidden / its root mean square x weight, in fp32 and rounded once."""
    shape, weight = hidden.shape[-1:], weight.to(hidden.dtype)
    if hidden.device.type not in ("cuda", "cpu"):
        # The memory plan's device, where torch 2.13 would spell the norm out. This one allocates as
        # much, and nobody reads what it computes.
        return F.layer_norm(hidden, shape, weight, None, epsilon)
    return F.rms_norm(hidden, shape, weight, epsilon)


# Compiled blocks
# --------------------------------------------------------------------------------------------------

BACKEND: Any = "inductor"
_LISTS = (nn.ModuleList, nn.ModuleDict)


def compile_blocks(model: nn.Module) -> int:
    """Make the blocks of `model` run compiled; returns the number of blocks.

    Blocks of one kind share their compiled code, for they differ only in their weights. The first
    call of a block compiles it; torch.compile's cache on the disk saves most of that time later.
    """
    import torch._dynamo.config
    import torch._inductor.config

    # torch 2.13: else the graph of every caller ends too where attention ends one, and four pieces
    # are made of two
    _set(torch._dynamo.config, "nested_graph_breaks")
    # blocks of several kinds may share a forward (transformers 5.23, modeling_layers.py), and each
    # is compiled with and without a graph, for training and for evaluation
    torch._dynamo.config.recompile_limit = 64
    # no kernel is chosen by how long it took just now: equal runs are to have equal bits
    _set(torch._inductor.config, "deterministic")
    blocks = list(_blocks(model))
    for block in blocks:
        block.__class__ = _compiled_kind(type(block))
    return len(blocks)


@functools.cache
def _compiled_kind(stock: type[nn.Module]) -> type[nn.Module]:
    """The same class, whose blocks run compiled. transformers 5.23 has a class compute its forward
    again in the backward pass: in a graph of both, a piece that ends within would end all of it.
    """
    compiled = _compile(stock.forward)

    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        return compiled(self, *given, **named)

    kind = like(stock, forward)
    kind.is_compiled = True  # pyright: ignore[reportAttributeAccessIssue]
    return kind


def _set(config: Any, name: str) -> None:
    """Switch an option of torch on, if this version of torch has it."""
    if hasattr(config, name):
        setattr(config, name, True)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of a model: a stack's blocks, layers between them."""
    for child in module.children():
        yield from child.children() if isinstance(child, _LISTS) else _blocks(child)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, backend=BACKEND)


@functools.cache
def of_blocks(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of a block and its input, which stands in for the block's forward: compiled where
    the block is.
    """
    compiled = functools.cache(_compile)  # its compiler takes a second to import

    def run(block: nn.Module, *given: Any) -> Any:
        is_compiled = getattr(block, "is_compiled", False)
        return (compiled(function) if is_compiled else function)(block, *given)

    return run


_never_compiled: Any = torch.compiler.disable  # torch 2.13 types it without arguments


@_never_compiled
def apart(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """function(*given, **named), which is never compiled: a compiled graph ends before it."""
    return function(*given, **named)
