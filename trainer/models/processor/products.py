"""Products of 16-bit numbers on a processor that has no instructions for them: by way of 32 bits.

Without such instructions (x86 without AVX-512, which is most laptops) torch 2.13 multiplies bf16
and fp16 matrices by loops of its own: on an AMD EPYC with AVX2 at 4 to 11 GFLOP/s in a forward
pass and .3 to 2.4 in its backward pass, where fp32 gives 65 to 90. Here such operands are widened,
multiplied in fp32 and the result is rounded once, which is nearer to the exact product, too.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.switches import uses_cpu_kernels

# The operators that modules, their backward passes, and compiled blocks call on a processor; all
# but baddbmm.out, by which the products of all others are computed here.
NAMES = (
    *("mm", "mm.out", "addmm", "addmm.out", "addmm_"),
    *("bmm", "bmm.out", "baddbmm", "baddbmm_"),
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
# Up to so many rows against a transposed weight torch's own loop is as fast: it reads half as much.
FEW_ROWS = 3
FEW_MULTIPLICATIONS = 2**24  # of fp32: less than a millisecond, for which no thread waits
_libraries: list[torch.library.Library] = []
widened: set[torch.dtype] = set()  # dtypes that this process multiplies by way of 32 bits


def operator(name: str) -> Any:
    """The operator of a name, such as "mm" and "mm.out"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


BY_OPERATOR: dict[Any, str] = {operator(name): name for name in NAMES}


def use(dtype: torch.dtype) -> None:
    """From now on this process multiplies such numbers by way of 32 bits, where the processor has
    no instructions for them. LATHE_CPU_KERNELS=0 leaves it to torch.
    """
    if dtype in lacking() and uses_cpu_kernels(os.environ):
        widened.add(dtype)
        _take_over()


def lacking() -> frozenset[torch.dtype]:
    """The 16-bit dtypes that torch multiplies by its own loops here: all of them where it was built
    without oneDNN, else those that oneDNN finds no instructions for.
    """
    if not torch.backends.mkldnn.is_available():
        return frozenset((torch.bfloat16, torch.float16))
    ops: Any = torch.ops.mkldnn
    has = {
        torch.bfloat16: ops._is_mkldnn_bf16_supported(),
        torch.float16: ops._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, is_there in has.items() if not is_there)


def takes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator of NAMES with these arguments is computed by way of 32 bits."""
    dtype = args[0].dtype
    if dtype not in widened or not uses_cpu_kernels(os.environ):
        return False
    if name.startswith("_"):  # attention: its logarithms of sums have 32 bits
        return True
    left, right = _factors(name, args)
    return is_product(name, args, kwargs) and (
        left.dim() > 2 or len(left) > FEW_ROWS or right.stride(0) != 1
    )


def is_product(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the operands fit each other, and have one dtype; torch refuses others."""
    left, right = _factors(name, args)
    tensors = [value for value in (*args, kwargs.get("out")) if isinstance(value, Tensor)]
    wanted = 3 if "bmm" in name else 2
    return (
        left.dim() == right.dim() == wanted
        and left.shape[-1] == right.shape[-2]
        and left.shape[:-2] == right.shape[:-2]
        and all(one.dtype == left.dtype for one in tensors)
    )


def by_way_of_32_bits(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the operator gives, computed in fp32 and rounded once to the dtype of its arguments."""
    dtype = args[0].dtype
    wide = [_wide(value, dtype) for value in args]
    named = {key: _wide(value, dtype) for key, value in kwargs.items() if key != "out"}
    if name.startswith("_"):
        return tuple(one.to(dtype) for one in operator(name)(*wide, **named))
    return _placed(name, args, kwargs, product(name, wide, named))


def product(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """What the operator gives, in a tensor of its own, without Python's lock while it multiplies:
    other threads write a saved state and tell that this process lives.
    """
    left, right = _factors(name, args)
    is_one = left.dim() == 2
    if is_one:
        left, right = left[None], right[None]
    result = left.new_empty(len(left), left.shape[1], right.shape[2])
    how: dict[str, Any] = {"beta": 0}
    total = result
    if name.startswith(("addmm", "baddbmm")):
        total, how = args[0], {key: kwargs[key] for key in ("beta", "alpha") if key in kwargs}
    torch.baddbmm(total, left, right, out=result, **how)
    return result[0] if is_one else result


def _factors(name: str, args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    left, right = args[1:3] if name.startswith(("addmm", "baddbmm")) else args[:2]
    return left, right


def _placed(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> Tensor:
    """The result where the operator puts it, in the dtype of its arguments."""
    target = kwargs.get("out") if name.endswith(".out") else args[0] if name[-1] == "_" else None
    if target is None:
        return result.to(args[0].dtype)
    if target.shape != result.shape:
        target.resize_(result.shape)
    return target.copy_(result)


def _wide(value: Any, dtype: torch.dtype) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == dtype else value


_of_torch: dict[str, Callable[..., Any]] = {}  # kernels of NAMES, which are replaced


def _take_over() -> None:
    """Register the operators of NAMES for processors, once a process."""
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    keys = torch._C._dispatch_keys(torch.empty(0))
    for name in NAMES:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        _of_torch[name] = functools.partial(kernel.call_boxed, keys)
    with warnings.catch_warnings():  # that a kernel of torch is replaced
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name in NAMES:
            library.impl(name, functools.partial(_operator, name), "CPU", allow_override=True)
    _libraries.append(library)


def _operator(name: str, *args: Any, **kwargs: Any) -> Any:
    if takes(name, args, kwargs):
        return by_way_of_32_bits(name, args, kwargs)
    is_long = not name.startswith("_") and _multiplications(name, args) > FEW_MULTIPLICATIONS
    if is_long and args[0].dtype == torch.float32 and is_product(name, args, kwargs):
        return _placed(name, args, kwargs, product(name, args, kwargs))
    return _of_torch[name](*args, **kwargs)  # it holds Python's lock


def _multiplications(name: str, args: Sequence[Any]) -> int:
    left, right = _factors(name, args)
    return left.numel() * (right.shape[-1] if right.dim() else 0)
