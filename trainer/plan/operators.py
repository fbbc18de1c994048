"""The cost of one operator of a step: FLOPs, bytes that it moves, and the sides of a product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

# Operators that only make a view, or allocate memory without writing to it.
_FREE = frozenset(
    ("detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view")
)
# A row of a table is read for each index, not the whole table.
_LOOKING_UP = frozenset(("embedding", "index_select", "gather", "index"))
# (matrices that are multiplied, in the order of the arguments)
_PRODUCTS = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    "_scaled_mm_v2": (0, 1),  # of FP8, whose result is bf16: it is planned at the speed of bf16
}
_ATTENTION = "scaled_dot_product"
_OF_ATTENTION = ("bmm", "baddbmm", "_softmax", "_softmax_backward_data")


class Operator(NamedTuple):
    """One run of an operator. Runs of equal cost are equal."""

    name: str
    flops: float
    nbytes: int  # read and written, each once
    # (batch, rows, columns, depth) of a product; of fused attention (rows x heads,)
    sides: tuple[int, ...] = ()
    dtype: str = ""

    @property
    def is_fused(self) -> bool:
        """Whether it is a fused attention kernel."""
        return _ATTENTION in self.name or "varlen" in self.name

    @property
    def kind(self) -> str:
        """The part of a step's time that it counts to: attention, matmul or memory."""
        is_layer = self.name == "baddbmm" and self.sides[0] == 1  # models/processor/products.py
        if self.is_fused or (self.name in _OF_ATTENTION and not is_layer):
            return "attention"
        return "matmul" if self.flops else "memory"


def operator_of(
    func: Any,
    args: Any,
    kwargs: Any,
    out: Any,
    *,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> Operator | None:
    """The cost of one call of `func`; None for a view, an allocation, and a call without tensors.

    inputs, outputs: the tensors on the device among its arguments and results.
    """
    space, _, name = func._schema.name.partition("::")
    if space not in ("aten", "torch_attn") or func.is_view or name in _FREE:
        return None
    if not inputs and not outputs:  # of dtypes, say
        return None
    if name in _LOOKING_UP:
        nbytes = 2 * sum(map(_nbytes, outputs))
    else:
        nbytes = sum(map(_nbytes, inputs)) + sum(map(_nbytes, outputs))
    dtype = str((outputs or inputs)[0].dtype)[6:]
    if name in _PRODUCTS:
        first, second = (args[place].shape for place in _PRODUCTS[name])
        sides = (first[0] if len(first) == 3 else 1, first[-2], second[-1], first[-1])
        return Operator(name, 2.0 * math.prod(sides), nbytes, sides, dtype)
    if _ATTENTION in name:
        is_backward = name.endswith("backward")
        query, key = args[1 if is_backward else 0], args[2 if is_backward else 1]
        products = 5 if is_backward else 2  # backward computes the scores again
        flops = products * (2.0 * query.numel() * key.shape[-2])
        return Operator(name, flops, nbytes, (math.prod(outputs[0].shape[:2]),), dtype)
    count = flop_registry.get(func._overloadpacket)
    flops = 0.0 if count is None else float(count(*args, **kwargs, out_val=out))
    return Operator(name, flops, nbytes, (), dtype)


def _nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor in memory, where an expanded axis is stored once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
