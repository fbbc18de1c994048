"""Attention of streams (stream_attention.py) on a GPU: allocates the outputs and launches the
kernels. Any other device is the fake one of the memory plan: nothing is computed there, only bytes
are counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trainer.models.packed.dropped import Dropout
    from trainer.models.packed.stream_attention import Biases, RowStarts, Saved

# M query tokens, S key tokens, H heads, C width of one, K buckets of distances, X distances up to
# the largest that has a bucket of its own, G programs of a launch for each head

_BLOCK = 64  # queries, and keys, of one program
_COMPUTING = ("cuda", "cpu")  # cpu: by Triton's interpreter, in tests


def forward(
    q: Tensor, k: Tensor, v: Tensor, rows: RowStarts, biases: Biases | None, drop: Dropout | None
) -> tuple[Tensor, Tensor]:
    """(M, H, C) mixed values, and (M, H) fp32 logarithms of the sums of exponentials."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    mixed_MHC = torch.empty_like(q)
    log_sums_MH = q.new_empty(q.shape[:2], dtype=torch.float32)
    launch = _Launch(q, rows, biases, drop)
    if q.device.type in _COMPUTING:
        from trainer.models.packed import triton_attention

        kernel: Any = triton_attention.forward
        kernel[launch.grid](q, k, v, mixed_MHC, log_sums_MH, *launch.tensors, **launch.numbers)
    return mixed_MHC, log_sums_MH


def backward(
    saved: Saved, gradient: Tensor, rows: RowStarts, biases: Biases | None, drop: Dropout | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of queries, keys, values and the table. Every sum has one order."""
    q, k, v = (x.contiguous() for x in (saved.q_MHC, saved.k_SHC, saved.v_SHC))
    gradient = gradient.contiguous()
    of_q, of_k, of_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    means_MH = (gradient.float() * saved.mixed_MHC.float()).sum(-1)
    launch = _Launch(q, rows, biases, drop)
    buckets = 1 if biases is None else len(biases.table_KH)
    of_table_GHK = q.new_zeros(launch.programs, q.shape[1], buckets, dtype=torch.float32)
    if q.device.type in _COMPUTING:
        from trainer.models.packed import triton_attention

        inputs = (q, k, v, gradient, saved.log_sums_MH, means_MH)
        kernel: Any = triton_attention.of_queries
        kernel[launch.grid](*inputs, of_q, of_table_GHK, *launch.tensors, **launch.numbers)
        kernel = triton_attention.of_keys
        kernel[launch.grid](*inputs, of_k, of_v, *launch.tensors, **launch.numbers)
    if biases is None:
        return of_q, of_k, of_v, None
    return of_q, of_k, of_v, of_table_GHK.sum(0).t().to(biases.table_KH.dtype)


class _Launch:
    """The arguments of every kernel."""

    def __init__(
        self, q: Tensor, rows: RowStarts, biases: Biases | None, drop: Dropout | None
    ) -> None:
        num_heads, width = q.shape[1:]
        num_rows = len(rows.queries) - 1
        blocks = -(-rows.longest // _BLOCK)
        self.programs = blocks * num_rows
        self.grid = (blocks, num_rows, num_heads)
        biases_HX = bucket_of = rows.queries  # not read
        if biases is not None:
            bucket_of = biases.bucket_of
            biases_HX = biases.table_KH.float()[bucket_of.long()].t().contiguous()
        first_MH = second_MH = rows.queries  # not read
        if drop is not None:
            first_MH, second_MH = drop.keys(torch.arange(len(q), device=q.device), num_heads)
        tensors = (rows.queries, rows.keys, biases_HX, bucket_of, first_MH, second_MH)
        self.tensors = tuple(x.contiguous() for x in tensors)
        self.numbers: dict[str, Any] = {
            "num_heads": num_heads,
            "width": width,
            "threshold": 0 if drop is None else drop.threshold,
            "rescaled": 1.0 if drop is None else 1 / (1 - drop.rate),
            "LARGEST": 0 if biases is None else biases.largest,
            "BUCKETS": 1 if biases is None else len(biases.table_KH),
            "HAS_BIASES": biases is not None,
            "DROPS": drop is not None,
            "IS_CAUSAL": rows.is_causal,
            "BLOCK": _BLOCK,
            "BLOCK_BUCKETS": _power_of_2(1 if biases is None else len(biases.table_KH)),
            "BLOCK_C": max(16, _power_of_2(width)),
        }


def _power_of_2(number: int) -> int:
    """The least one that is not smaller."""
    return 1 << (number - 1).bit_length()
