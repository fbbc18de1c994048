"""Products of 16-bit numbers on a processor that has no instructions for them: by way of 32 bits.

Without such instructions (x86 without AVX-512, which is most laptops) torch 2.13 multiplies bf16
and fp16 matrices by loops of its own: on an AMD EPYC with AVX2 at 4 to 11 GFLOP/s in a forward
pass and .3 to 2.4 in its backward pass, where fp32 gives 65 to 90. Here such operands are widened,
multiplied in fp32 and the result is rounded once, which is nearer to the exact product, too.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.switches import uses_cpu_kernels

# The operators that modules, their backward passes, and compiled blocks call on a processor.
NAMES = (
    *("mm", "mm.out", "bmm", "bmm.out"),
    *("addmm", "addmm.out", "addmm_", "baddbmm", "baddbmm.out", "baddbmm_"),
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)


def operator(name: str) -> Any:
    """The operator of a name, such as "mm" and "mm.out"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


BY_OPERATOR: dict[Any, str] = {operator(name): name for name in NAMES}
# Up to so many rows against a transposed weight torch's own loop is as fast: it reads half as much.
FEW_ROWS = 3
_libraries: list[torch.library.Library] = []
widened: set[torch.dtype] = set()  # dtypes that this process multiplies by way of 32 bits


def use(dtype: torch.dtype) -> None:
    """From now on this process multiplies such numbers by way of 32 bits, where the processor has
    no instructions for them. LATHE_CPU_KERNELS=0 leaves it to torch.
    """
    if dtype in lacking():
        widened.add(dtype)
        _take_over()


def lacking() -> frozenset[torch.dtype]:
    """The 16-bit dtypes that this processor has no instructions for."""
    ops: Any = torch.ops.mkldnn
    has = {
        torch.bfloat16: ops._is_mkldnn_bf16_supported(),
        torch.float16: ops._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, is_there in has.items() if not is_there)


def takes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator of NAMES with these arguments is computed by way of 32 bits. name: of
    the operator without "aten::" and, where it has no other overload, without ".default".
    """
    dtype = args[0].dtype
    if dtype not in widened or not uses_cpu_kernels(os.environ):
        return False
    if name.startswith("_"):  # attention: its logarithms of sums have 32 bits
        return True
    tensors = [value for value in (*args, kwargs.get("out")) if isinstance(value, Tensor)]
    if any(one.dtype != dtype for one in tensors):
        return False  # torch refuses it
    if name.startswith(("mm", "addmm")):
        left, right = args[:2] if name.startswith("mm") else args[1:3]
        return len(left) > FEW_ROWS or right.stride(0) != 1
    return True


def by_way_of_32_bits(
    call: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What the operator gives, computed in fp32 and rounded once to the dtype of its arguments.

    call: computes an operator of NAMES without an overload, out of its arguments.
    """
    dtype = args[0].dtype
    wide = [_wide(value, dtype) for value in args]
    named = {key: _wide(value, dtype) for key, value in kwargs.items() if key != "out"}
    result = call(*wide, **named)
    if isinstance(result, tuple):  # gradients of queries, keys and values
        return tuple(one.to(dtype) for one in result)
    target = kwargs.get("out") if name.endswith(".out") else args[0] if name[-1] == "_" else None
    if target is None:
        return result.to(dtype)
    if target.shape != result.shape:
        target.resize_(result.shape)
    return target.copy_(result)


def plain(name: str) -> str:
    """The operator that gives the same without a place for its result: "addmm_" is of "addmm"."""
    return name.removesuffix(".out").rstrip("_")


def _wide(value: Any, dtype: torch.dtype) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == dtype else value


def _take_over() -> None:
    """Register the operators of NAMES for processors, once a process."""
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    warnings.filterwarnings("ignore", ".*Overriding a previously registered kernel", UserWarning)
    of_torch = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in NAMES}
    for name, kernel in of_torch.items():
        own = _operator(name, kernel, of_torch[plain(name)])
        library.impl(name, own, "CPU", with_keyset=True, allow_override=True)
    _libraries.append(library)


def _operator(name: str, kernel: Any, kernel_of_plain: Any) -> Callable[..., Any]:
    def own(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not takes(name, args, kwargs):
            return kernel.call_boxed(keys, *args, **kwargs)

        def call(*wide: Any, **named: Any) -> Any:
            return kernel_of_plain.call_boxed(keys, *wide, **named)

        return by_way_of_32_bits(call, name, args, kwargs)

    return own
