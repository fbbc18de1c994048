"""Causal self-attention of stock transformers blocks on a stream of real tokens.

The blocks run as they are on one long row; only their attention knows where rows begin. It is a
function registered with transformers, and gets the layout as the blocks' attention mask, which they
hand on untouched (transformers 5.23).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from trainer.models.packed.layout import grids_of
from trainer.models.packed.rectangles import in_rectangles, in_stream

# M tokens of all rows, N rows of a rectangle, L its length, H heads, G key-value heads, C width of
# a head

NAME = "lathe_packed"  # of the function, among those of transformers
REPLACED = (
    None,
    "sdpa",
)  # attention implementations that it stands in for: what a base has unless it says otherwise


@dataclass(frozen=True)
class Rows:
    """Where each token of a stream lies in rectangles of rows of like length."""

    cells_M: Tensor
    shapes: list[tuple[int, int]]  # (N, L) of each rectangle
    # (L, L) of each: the keys within a sliding window; None: those before, all of them
    masks: list[Tensor | None]

    @classmethod
    def of(
        cls, batch: Mapping[str, Tensor], prefix: str = "", *, window: int | None = None
    ) -> Rows:
        """The rectangles of packing.pack.

        window: how many tokens each sees at most, itself among them.
        """
        shapes = [
            (int(grid.shape[0]), int(grid.shape[1])) for grid in grids_of(batch, f"{prefix}grid_")
        ]
        cells_M = batch[f"{prefix}cells"]
        is_cut = [window is not None and length > window for _, length in shapes]
        masks = [
            _window(shape[1], window, cells_M) if cut else None
            for shape, cut in zip(shapes, is_cut, strict=True)
        ]
        return cls(cells_M, shapes, masks)

    @classmethod
    def by_window(
        cls, batch: Mapping[str, Tensor], windows: Iterable[int | None], *, prefix: str = ""
    ) -> dict[int | None, Rows]:
        """The rectangles with the masks of each window that there is."""
        return {window: cls.of(batch, prefix, window=window) for window in set(windows)}


def _window(length: int, window: int | None, like: Tensor) -> Tensor:
    assert window is not None
    places = torch.arange(length, device=like.device)
    distance_LL = places[:, None] - places
    return (distance_LL >= 0) & (distance_LL < window)


@torch.compiler.disable  # see models/fused.py
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Rows,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """(1, H, M, C) queries, (1, G, M, C) keys and values -> (1, M, H, C), each token mixed from
    those before it in its row. Pads of a rectangle are behind every token, so that causality hides
    them.

    softcap: scores are kept within +- this (Gemma 2); no fused kernel of torch does that.
    """
    sizes = [rows * length for rows, length in attention_mask.shapes]
    laid_out = [
        in_rectangles(x[0].transpose(0, 1), attention_mask.cells_M, sizes)
        for x in (query, key, value)
    ]
    mixed: list[Tensor] = []
    for qkv, shape, mask in zip(
        zip(*laid_out, strict=True), attention_mask.shapes, attention_mask.masks, strict=True
    ):
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in qkv)  # (N, H or G, L, C)
        if softcap is not None:
            capped = _capped(q, k, v, mask, softcap=softcap, scaling=scaling, dropout=dropout)
            mixed.append(capped.transpose(1, 2).flatten(0, 1))
            continue
        is_grouped = k.shape[1] != q.shape[1]
        # with a mask, torch 2.13 has no kernel for groups but the unfused one
        if is_grouped and mask is not None:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            is_grouped = False
        how: dict[str, Any] = {"dropout_p": dropout, "scale": scaling, "enable_gqa": is_grouped}
        found = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, **how
        )
        mixed.append(found.transpose(1, 2).flatten(0, 1))
    return in_stream(mixed, attention_mask.cells_M)[None], None


def _capped(
    q_NHLC: Tensor,
    k_NGLC: Tensor,
    v_NGLC: Tensor,
    mask_LL: Tensor | None,
    *,
    softcap: float,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    """(N, H, L, C) mixed values, from scores that are capped before the softmax."""
    group = q_NHLC.shape[1] // k_NGLC.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k_NGLC, v_NGLC))
    scale = q_NHLC.shape[-1] ** -0.5 if scaling is None else scaling
    scores_NHLL = torch.tanh(q_NHLC @ k.transpose(-1, -2) * (scale / softcap)) * softcap
    if mask_LL is None:
        mask_LL = _window(q_NHLC.shape[2], q_NHLC.shape[2], q_NHLC)
    scores_NHLL = scores_NHLL.masked_fill(~mask_LL, torch.finfo(scores_NHLL.dtype).min)
    shares = scores_NHLL.softmax(-1, dtype=torch.float32).to(q_NHLC.dtype)
    return F.dropout(shares, dropout) @ v


AttentionInterface.register(NAME, attention)


@contextmanager
def attending(config: Any, mask: Any) -> Iterator[None]:
    """Inside, the blocks of `config` attend as their mask wants it: on a stream, when it is its
    layout.
    """
    if not isinstance(mask, Rows):
        yield
        return
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
