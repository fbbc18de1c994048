"""Attention from decoder states to context states: what its layers share, and that of GPTBigCode.

Source of the arithmetic and of the parameter names: XC-Cache (ServiceNow), as published for
GPTBigCode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.decoder.rotation import Rotation
from trainer.models.fused import apart
from trainer.models.packed.layout import grids_of
from trainer.models.packed.rectangles import in_rectangles, in_stream
from trainer.models.processor import row_attention
from trainer.models.processor.row_attention import Piece, pieces_of

# B batch, T decoder tokens, L context tokens, D base width, H heads, K head size, W cross width = H
# * K


@dataclass(frozen=True)
class LayerShape:
    """What an added layer is built from: sizes of its own, and what it takes over from the base."""

    base_width: int
    width: int  # of the attention, all heads together
    heads: int
    inner: int  # of the MLP
    shared_projections: bool  # query and key use one matrix
    skip: bool  # the output is hidden + layer(hidden)
    activation: str
    norm_eps: float
    attention_dropout: float  # of attention probabilities
    residual_dropout: float  # of what is added to the residual stream
    # the layer of a base with rotary positions; None: of GPTBigCode
    rotary: RotaryShape | None = None


@dataclass(frozen=True)
class RotaryShape:
    """What a layer of a base with rotary positions has besides."""

    key_value_heads: int
    theta: float  # base of the rotation frequencies
    has_bias: bool  # of the attention's projections


class KeysValues(NamedTuple):
    """Context states as one added layer sees them: projected and split into heads."""

    keys_BHLK: Tensor
    values_BHLK: Tensor


class KeyMask(NamedTuple):
    """Which keys a layer may look at; made by `key_mask`."""

    mask_B11L: Tensor
    has_key_B111: Tensor


def key_mask(kept_BL: Tensor, real_BL: Tensor | None = None) -> KeyMask:
    """The attention mask of the kept keys. A sample that keeps none attends to all its keys
    uniformly.

    real_BL: False for padding, which even such a sample does not see; None: no padding.

    The published layer sets every score of such a sample to one value. In a fused kernel that value
    swallows the normaliser, and the gradient is off by a factor of L. Here such a sample gets a
    zero query and no mask instead: the output and the (zero) gradients of queries and keys are the
    same, and the gradient of the values is right.
    """
    has_key_B1 = kept_BL.any(dim=-1, keepdim=True)
    shown_BL = ~has_key_B1 if real_BL is None else ~has_key_B1 & real_BL
    return KeyMask((kept_BL | shown_BL)[:, None, None, :], has_key_B1[:, :, None, None])


@dataclass(eq=False)
class Pairs:
    """Streams of queries and keys, in rectangles where each row's queries meet its keys.

    See layout.pack_pairs. Never changed; not frozen for the reason of packed.stock.Rows.
    """

    query_cells_T: Tensor
    key_cells_L: Tensor
    query_shapes: list[tuple[int, int]]  # (rows, queries) of each rectangle
    key_grids: list[Tensor]  # (rows, keys) bool, True where there is a key
    masks: list[KeyMask]
    pieces: list[Piece] | None = None  # on a processor, if every key is seen

    @classmethod
    def of(cls, batch: Mapping[str, Tensor]) -> Pairs:
        """Those of a packed batch; every key is seen."""
        grids = grids_of(batch, "keys_grid_")
        shapes = [
            (int(grid.shape[0]), int(grid.shape[1])) for grid in grids_of(batch, "queries_grid_")
        ]
        masks = [key_mask(grid, grid) for grid in grids]
        pieces = None
        if row_attention.is_here(grids[0]):
            first_M = (batch["keys_position"] == 0).nonzero()[:, 0]
            key_starts = F.pad(first_M, (0, 1), value=len(batch["keys_position"]))
            pieces = pieces_of(batch["starts"], key_starts)
        return cls(batch["queries_cells"], batch["keys_cells"], shapes, grids, masks, pieces)

    def showing(self, kept_L: Tensor) -> Pairs:
        """The same with only the kept keys of the stream, (L,) bool."""
        sizes = [grid.numel() for grid in self.key_grids]
        is_visible = in_rectangles(kept_L[:, None], self.key_cells_L, sizes)
        laid_out = zip(is_visible, self.key_grids, strict=True)
        masks = [key_mask(cells.view_as(grid), grid) for cells, grid in laid_out]
        return replace(self, masks=masks, pieces=None)

    def attend(self, queries_1HTK: Tensor, keys_values: KeysValues, *, dropout: float) -> Tensor:
        """(1, H, T, K) queries of the stream -> (1, T, H*K)."""
        if self.pieces is not None and not dropout:
            queries, keys, values = (
                x.squeeze(0).transpose(0, 1) for x in (queries_1HTK, *keys_values)
            )
            return row_attention.attend(queries, keys, values, self.pieces).flatten(1)[None]
        queries = self._laid_out(queries_1HTK, self.query_cells_T, self.query_shapes)
        key_shapes = [(int(grid.shape[0]), int(grid.shape[1])) for grid in self.key_grids]
        keys, values = (self._laid_out(x, self.key_cells_L, key_shapes) for x in keys_values)
        mixed = [
            attend(q, KeysValues(k, v), mask, dropout=dropout).flatten(0, 1)
            for q, k, v, mask in zip(queries, keys, values, self.masks, strict=True)
        ]
        return in_stream(mixed, self.query_cells_T)[None]

    def _laid_out(
        self, x_1HMK: Tensor, cells_M: Tensor, shapes: Sequence[tuple[int, int]]
    ) -> list[Tensor]:
        """(1, H, M, K) of a stream -> (rows, H, length, K) of each rectangle."""
        parts = in_rectangles(
            x_1HMK[0].transpose(0, 1), cells_M, [rows * length for rows, length in shapes]
        )
        return [
            part.unflatten(0, shape).transpose(1, 2)
            for part, shape in zip(parts, shapes, strict=True)
        ]


Seen = KeyMask | Pairs | None  # which keys a query sees; None: all of its sample


def attend(queries_BHTK: Tensor, keys_values: KeysValues, mask: Seen, *, dropout: float) -> Tensor:
    """(B, H, T, K) queries -> (B, T, H*K) values, mixed by the softmax over the keys.

    mask None: all keys.
    """
    if isinstance(mask, Pairs):
        return apart(mask.attend, queries_BHTK, keys_values, dropout=dropout)
    attended_BHTK = F.scaled_dot_product_attention(
        queries_BHTK if mask is None else queries_BHTK * mask.has_key_B111,
        keys_values.keys_BHLK,
        keys_values.values_BHLK,
        attn_mask=None if mask is None else mask.mask_B11L,
        dropout_p=dropout,
    )
    return attended_BHTK.transpose(1, 2).flatten(2)


class CrossAttention(nn.Module):
    """Multi-head attention from decoder states to context states.

    Plain multi-head even on a multi-query base.
    """

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.attention_dropout
        self.shared_projections = shape.shared_projections
        if shape.shared_projections:
            self.q_k_attn = nn.Linear(shape.base_width, shape.width)
        else:
            self.q_attn = nn.Linear(shape.base_width, shape.width)
            self.k_attn = nn.Linear(shape.base_width, shape.width)
        self.v_attn = nn.Linear(shape.base_width, shape.width)
        self.c_proj = nn.Linear(shape.width, shape.base_width)
        self.resid_dropout = nn.Dropout(shape.residual_dropout)

    @property
    def output(self) -> nn.Linear:
        """The projection into the residual stream."""
        return self.c_proj

    def keys_values(self, states_BLD: Tensor, rotation: Rotation | None = None) -> KeysValues:
        """(B, L, D) context states -> keys and values, (B, H, L, K) each, without positions."""
        assert rotation is None, "these keys are not rotated"
        states_BLD = states_BLD.to(self.v_attn.weight.dtype)
        project_keys = self.q_k_attn if self.shared_projections else self.k_attn
        return KeysValues(
            self._split(project_keys(states_BLD)), self._split(self.v_attn(states_BLD))
        )

    def forward(
        self,
        hidden_BTD: Tensor,
        keys_values: KeysValues,
        mask: Seen,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """(B, T, D) normed decoder states -> what the attention adds to them, (B, T, D). mask None:
        all keys.
        """
        assert rotation is None, "these queries are not rotated"
        project_queries = self.q_k_attn if self.shared_projections else self.q_attn
        queries_BHTK = self._split(project_queries(hidden_BTD))
        attended_BTW = attend(
            queries_BHTK, keys_values, mask, dropout=self.dropout if self.training else 0.0
        )
        return self.resid_dropout(self.c_proj(attended_BTW))

    def _split(self, x_BTW: Tensor) -> Tensor:
        """(B, T, H*K) -> (B, H, T, K)"""
        return x_BTW.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def positions(attention_mask_BS: Tensor) -> Tensor:
    """(B, S) mask -> (B, S) positions, which count tokens from 0 wherever the pads are.

    A pad stands at 1, as published.
    """
    return (attention_mask_BS.long().cumsum(-1) - 1).masked_fill(attention_mask_BS == 0, 1)


def context_positions(states_BLD: Tensor, kept_BL: Tensor | None) -> Tensor:
    """(B, L) positions of context states."""
    if kept_BL is not None:
        return positions(kept_BL)
    return torch.arange(states_BLD.shape[1], device=states_BLD.device).expand(states_BLD.shape[:2])
