"""Attention from decoder states to context states: what its layers share, and that of GPTBigCode.

Source of the arithmetic and of the parameter names: XC-Cache (ServiceNow), as published for GPTBigCode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

# B batch, T decoder tokens, L context tokens, D base width, H heads, K head size, W cross width = H * K


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
    rotary: RotaryShape | None = None  # the layer of a base with rotary positions; None: of GPTBigCode


@dataclass(frozen=True)
class RotaryShape:
    """What a layer of a Llama or Mistral base has besides."""

    key_value_heads: int
    theta: float  # base of the rotation frequencies
    has_bias: bool  # of the attention's projections


class Rotation(NamedTuple):
    """How the halves of a head are turned at each position: rotary embeddings."""

    cos_B1TK: Tensor
    sin_B1TK: Tensor


class KeysValues(NamedTuple):
    """Context states as one added layer sees them: projected and split into heads."""

    keys_BHLK: Tensor
    values_BHLK: Tensor


class KeyMask(NamedTuple):
    """Which keys a layer may look at; made by `key_mask`."""

    mask_B11L: Tensor
    has_key_B111: Tensor


def key_mask(kept_BL: Tensor) -> KeyMask:
    """The attention mask of the kept keys. A sample that keeps none attends to all its keys uniformly.

    The published layer gets there by masking every score to one value. In a fused kernel that value swallows the
    normaliser, and its backward is off by a factor of L; so such a sample gets a zero query and no mask instead:
    the same output, the same (zero) gradient into queries and keys, and a right one into values.
    """
    has_key_B1 = kept_BL.any(dim=-1, keepdim=True)
    return KeyMask((kept_BL | ~has_key_B1)[:, None, None, :], has_key_B1[:, :, None, None])


def attended(queries_BHTK: Tensor, keys_values: KeysValues, mask: KeyMask | None, *, dropout: float) -> Tensor:
    """(B, H, T, K) queries -> (B, T, H*K) values, mixed by the softmax over the keys. mask None: all keys."""
    attended_BHTK = F.scaled_dot_product_attention(
        queries_BHTK if mask is None else queries_BHTK * mask.has_key_B111,
        keys_values.keys_BHLK,
        keys_values.values_BHLK,
        attn_mask=None if mask is None else mask.mask_B11L,
        dropout_p=dropout,
    )
    return attended_BHTK.transpose(1, 2).flatten(2)


class CrossAttention(nn.Module):
    """Multi-head attention from decoder states to context states; plain multi-head even on a multi-query base."""

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
        """(B, L, D) context states -> keys and values, (B, H, L, K) each; they carry no position."""
        assert rotation is None, "these keys are not rotated"
        states_BLD = states_BLD.to(self.v_attn.weight.dtype)
        project_keys = self.q_k_attn if self.shared_projections else self.k_attn
        return KeysValues(self._split(project_keys(states_BLD)), self._split(self.v_attn(states_BLD)))

    def forward(
        self, hidden_BTD: Tensor, keys_values: KeysValues, mask: KeyMask | None, rotation: Rotation | None = None
    ) -> Tensor:
        """(B, T, D) normed decoder states -> what the attention adds to them, (B, T, D). mask None: all keys."""
        assert rotation is None, "these queries are not rotated"
        project_queries = self.q_k_attn if self.shared_projections else self.q_attn
        queries_BHTK = self._split(project_queries(hidden_BTD))
        attended_BTW = attended(queries_BHTK, keys_values, mask, dropout=self.dropout if self.training else 0.0)
        return self.resid_dropout(self.c_proj(attended_BTW))

    def _split(self, x_BTW: Tensor) -> Tensor:
        """(B, T, H*K) -> (B, H, T, K)"""
        return x_BTW.unflatten(-1, (self.heads, -1)).transpose(1, 2)
