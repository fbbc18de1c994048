"""Products of FP8 numbers, with fp32 sums: torch's scaled_mm.

A number of e4m3 has 4 bits of exponent and 3 of mantissa. Each row has a scale of its own: of the
input the numbers of a token, of the weight those of an output. A scale is a power of 2, so that
scaling rounds nothing, and the weight is unpacked to bf16 with all bits that it has.

The bound of a product. The largest number of a scaled row lies in [128, 256). e4m3 rounds a number
from 2^-6 on by at most 2^-4 of it, and a smaller one by at most 2^-10, which is 2^-17 of the row's
largest or less. So with e(x) = |x| / 16 + max|row of x| / 2^17

    |product - exact| <= sum over k of |x| e(w) + e(x) |w| + e(x) e(w)

besides the rounding of the sums (fp32) and of the result (bf16). Errors of random signs cancel: of
normal numbers the root mean square error is 3.8% of the result's (tests/numerics/test_fp8.py).
"""

# M rows of the input, K inputs and N outputs of a layer

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MULTIPLE = 16  # of K and of N, which CUDA's kernels want (torch 2.13, ScaledBlas.cpp)
_LEAST = 2.0**-100  # the largest number of a row counts as at least so much: 0 has no scale
_EXPONENT = 0x7F800000  # the bits of an fp32 number that hold its exponent
_LARGEST = 2.0**-7  # times the power of 2 below a row's largest number: its scale


def scales_of(rows_MK: Tensor) -> Tensor:
    """(M, 1) fp32: a power of 2 for each row. Of a row with inf or NaN it is inf."""
    largest_M1 = torch.linalg.vector_norm(rows_MK, torch.inf, 1, keepdim=True)
    bits_M1 = largest_M1.float().clamp(min=_LEAST).view(torch.int32) & _EXPONENT
    return bits_M1.view(torch.float32) * _LARGEST


def pack(rows_MK: Tensor, scales_M1: Tensor) -> Tensor:
    """(M, K) e4m3: the rows over their scales."""
    if rows_MK.dtype == torch.float16:  # the inverse of a scale may be too large for it
        rows_MK = rows_MK.float()
    return (rows_MK * scales_M1.reciprocal().to(rows_MK.dtype)).to(torch.float8_e4m3fn)


def product(input: Tensor, packed_NK: Tensor, scales_N: Tensor, bias_N: Tensor | None) -> Tensor:
    """(..., K) -> (..., N) in the input's dtype: input @ weight.T + bias, rounded to bf16, the one
    result that every kernel for rows with scales has had.

    packed_NK, scales_N: pack(weight) and its scales. torch's slower sums are taken, whose error
    does not grow with K on a Hopper (use_fast_accum=False).
    """
    rows_MK = input.reshape(-1, input.shape[-1])
    scales_M1 = scales_of(rows_MK)
    by_row = F.ScalingType.RowWise
    result_MN = F.scaled_mm(
        pack(rows_MK, scales_M1),
        packed_NK.t(),
        scales_M1,
        by_row,
        scales_N[None, :],
        by_row,
        bias=None if bias_N is None else bias_N.to(torch.bfloat16),
        output_dtype=torch.bfloat16,
    )
    return result_MN.to(input.dtype).view(*input.shape[:-1], len(packed_NK))


def problem_of(device: torch.device) -> str | None:
    """Why a device cannot multiply FP8, as text; None if it can. It multiplies two matrices."""
    rows = torch.ones(MULTIPLE, MULTIPLE, dtype=torch.bfloat16, device=device)
    scales = scales_of(rows)
    try:
        product(rows, pack(rows, scales), scales[:, 0], None)
    except (AttributeError, RuntimeError, NotImplementedError, ValueError) as error:
        name = "the processor" if device.type == "cpu" else torch.cuda.get_device_name(device)
        reason = str(error).strip().splitlines()[0]
        return (
            f"train.base_bits='fp8': {name} does not multiply FP8 with torch {torch.__version__} "
            f"({reason}). Use a GPU of sm89 or later (L4, L40S, H100, ...), or 8 or 4, which need "
            "no such products."
        )
    return None
