"""Kernels of the library liger-kernel (0.8.5) in stock modules on a GPU: rotations, the products of
gated layers, and the norms that multiply by their weight in fp32. Each is one kernel forward and
one backward where torch has three to eight.

Off unless the environment says LATHE_LIGER=1, and in compiled blocks.
The norms of T5, Llama, Mistral, Qwen and Phi-3 stay torch's, which are one kernel as well
(fused.py), and so does the output layer's loss (docs/gpu.md says why).

What the library overwrites: a rotation its queries and keys, and their gradients; the backward pass
of a product the gate and the other factor, where it leaves their gradients. Nobody else keeps these
for the backward pass, and a second backward pass through a product is an error.
"""

# N tokens, C columns, B batch, T tokens, H heads of queries, G heads of keys, K size of a head

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.models.families import FAMILIES, family_of
from trainer.models.fused import like, stock_of
from trainer.switches import uses_liger

_COMPUTING = ("cuda", "cpu")  # cpu: by Triton's interpreter, in tests
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_COLUMNS = 65_536  # of a row, which is one program (calculate_settings of the library)


def is_used(x: Tensor) -> bool:
    """Whether what is computed of `x` is computed by the library: on a GPU, or on the fake one of
    the memory plan, outside of compiled blocks.
    """
    if torch.compiler.is_compiling() or x.device.type in ("cpu", "meta"):
        return False
    return x.dtype in _TYPES and uses_liger(os.environ)


def put_into(model: Any) -> None:
    """Make the norms and rotations of a model of transformers the library's, wherever is_used().
    Gated layers ask product_of() themselves (lean/gated.py).
    """
    if not uses_liger(os.environ):
        return
    for module in model.modules():
        is_ours = type(module).forward is _norm
        if type(module).__name__ in _OFFSETS and not is_ours:
            module.__class__ = like(type(module), _norm)
    family = family_of(model.config)
    if family.turns_halves:
        code: Any = importlib.import_module(_module_of(model.config))
        stock = code.apply_rotary_pos_emb
        if not hasattr(stock, "stock"):
            code.apply_rotary_pos_emb = _turning(stock, rounds_back=family.rotates_in_fp32)


def _module_of(config: Any) -> str:
    """Where transformers has the code of a config's models."""
    package = type(config).__module__.rpartition(".")[0]
    return f"{package}.modeling_{package.rpartition('.')[2]}"


# Gated layers
# --------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """act(gate) * up, both (..., C), as the library computes it. `act` is rounded before it is
    multiplied, as in torch.
    """

    module: str  # of liger_kernel.ops
    name: str

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """(..., C): act(gate) * up."""
        if gate.device.type not in _COMPUTING:
            return gate * up  # the memory plan's device: as many kernels and bytes
        return self._function("forward")(gate, up)[2]

    def backward(self, gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of gate and up, which they overwrite. `gradient` stays as it is."""
        if gate.device.type not in _COMPUTING:
            return gate.addcmul_(gradient, up), up
        return self._function("backward")(gate, up, gradient.contiguous())

    def _function(self, way: str) -> Any:
        return getattr(_library(self.module), f"{self.name}_{way}")


_SWIGLU, _GEGLU = Product("swiglu", "swiglu"), Product("geglu", "geglu")  # of GELU's tanh form
_PRODUCTS = {"SiLUActivation": _SWIGLU, "NewGELUActivation": _GEGLU, "GELUTanh": _GEGLU}


def product_of(act: nn.Module, gate: Tensor, up: Tensor) -> Product | None:
    """The library's act(gate) * up; None where is_used() says no, for another activation, for
    halves of one tensor (Phi-3), and beyond 65,536 columns.
    """
    if not is_used(gate) or gate.shape[-1] > _MOST_COLUMNS or gate.dtype != up.dtype:
        return None
    is_whole = gate.is_contiguous() and up.is_contiguous()
    return _PRODUCTS.get(type(act).__name__) if is_whole else None


# Rotations
# --------------------------------------------------------------------------------------------------

Rotate = Callable[..., tuple[Tensor, Tensor]]


def _turning(stock: Rotate, *, rounds_back: bool) -> Rotate:
    """apply_rotary_pos_emb of transformers, by the library where is_used().

    rounds_back: the stock one computes in the dtype of cos and rounds to that of the queries
    (OLMo 2); another one gives the wider dtype of the two, which the library does not.
    """

    @functools.wraps(stock)
    def rotate(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        is_same = q.dtype == k.dtype and (rounds_back or cos.dtype == q.dtype)
        if unsqueeze_dim != 1 or not is_used(q) or not is_same or cos.dim() != 3:
            return stock(q, k, cos, sin, unsqueeze_dim)
        turned: Any = _Turned.apply(q, k, cos, sin)
        return turned

    rotate.stock = stock  # pyright: ignore[reportAttributeAccessIssue]
    return rotate


class _Turned(torch.autograd.Function):
    """(B, H, T, K) queries and (B, G, T, K) keys, turned by (B or 1, T, R) cos and sin. The columns
    beyond R stay (Phi-3).
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turn("forward", q, k, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, of_q: Tensor, of_k: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        return *_turn("backward", of_q, of_k, *ctx.saved_tensors), None, None


def _turn(way: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if q.device.type in _COMPUTING:
        turned = getattr(_library("rope"), f"rope_{way}")(q, k, cos, sin)
        return turned[0], turned[1]
    # the memory plan's device: as many bytes as there, and one kernel, counted for q alone
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    return q.mul_(1.0), k


# Norms
# --------------------------------------------------------------------------------------------------

_OFFSETS = {row.upcast_norm: row.norm_offset for row in FAMILIES.values() if row.upcast_norm}


def _norm(self: Any, hidden: Tensor) -> Tensor:
    """(..., D): hidden / its root mean square x (weight + offset), in fp32 and rounded once, as in
    transformers.
    """
    if not is_used(hidden) or hidden.shape[-1] > _MOST_COLUMNS:
        return stock_of(self).forward(self, hidden)
    epsilon = self.eps if hasattr(self, "eps") else self.variance_epsilon
    if hidden.device.type not in _COMPUTING:
        # the memory plan's device (see fused.rms_norm)
        weight = self.weight.to(hidden.dtype)
        return F.layer_norm(hidden, hidden.shape[-1:], weight, None, epsilon)
    kernel = _library("rms_norm").LigerRMSNormFunction
    # "gemma": all in fp32. Not in place: the gradient of the output may be that of a residual, too.
    offset = _OFFSETS[type(self).__name__]
    return kernel.apply(hidden, self.weight, epsilon, offset, "gemma", False)


@functools.cache
def _library(module: str) -> Any:
    """A module of liger_kernel.ops. Its package imports transformers and takes seconds."""
    return importlib.import_module(f"liger_kernel.ops.{module}")
