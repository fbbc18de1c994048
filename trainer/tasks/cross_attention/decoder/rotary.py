"""The added layer of a base with rotary positions (all but GPTBigCode): rotated queries and keys,
key-value heads, a gated MLP.

Source of the arithmetic and of the parameter names: XC-Cache (ServiceNow), as published for Llama
and Mistral; Su et al. 2021 for the rotation, in the layout of transformers (a head's first half
with its second).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from trainer.models.decoder.rotation import Rotation
from trainer.tasks.cross_attention.decoder.attention import (
    KeysValues,
    LayerShape,
    Seen,
    attend,
)

# B batch, T tokens, L context tokens, D base width, H heads, G key-value heads, K head size, F
# frequencies = K / 2


def frequencies(head_size: int, theta: float) -> Tensor:
    """(F,) fp32: the angle by which each pair of a head turns from one position to the next."""
    return theta ** -(torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)


def rotate(x_BHTK: Tensor, by: Rotation) -> Tensor:
    """(B, H, T, K) heads -> the same, turned by their positions."""
    first, second = x_BHTK.chunk(2, dim=-1)
    turned_BHTK = torch.cat((-second, first), dim=-1)
    return x_BHTK * by.cos_B1TK.to(x_BHTK.dtype) + turned_BHTK * by.sin_B1TK.to(x_BHTK.dtype)


class RotaryCrossAttention(nn.Module):
    """Grouped-query attention from decoder states to context states, both rotated by position."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        assert shape.rotary is not None, "a shape of a base with rotary positions"
        self.heads, self.key_value_heads = shape.heads, shape.rotary.key_value_heads
        self.dropout = shape.attention_dropout
        head_size, has_bias = shape.width // shape.heads, shape.rotary.has_bias
        key_value_width = self.key_value_heads * head_size
        self.q_proj = nn.Linear(shape.base_width, shape.width, bias=has_bias)
        self.k_proj = nn.Linear(shape.base_width, key_value_width, bias=has_bias)
        self.v_proj = nn.Linear(shape.base_width, key_value_width, bias=has_bias)
        self.o_proj = nn.Linear(shape.width, shape.base_width, bias=has_bias)

    @property
    def output(self) -> nn.Linear:
        """The projection into the residual stream."""
        return self.o_proj

    def keys_values(self, states_BLD: Tensor, rotation: Rotation | None = None) -> KeysValues:
        """(B, L, D) context states -> rotated keys, and values, (B, G, L, K) each."""
        assert rotation is not None, "keys have positions"
        states_BLD = states_BLD.to(self.v_proj.weight.dtype)
        keys_BGLK = _split(self.k_proj(states_BLD), self.key_value_heads)
        return KeysValues(
            rotate(keys_BGLK, rotation), _split(self.v_proj(states_BLD), self.key_value_heads)
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
        assert rotation is not None, "queries have positions"
        queries_BHTK = rotate(_split(self.q_proj(hidden_BTD), self.heads), rotation)
        # not enable_gqa: with a mask, torch 2.13 then has no kernel but the unfused one
        group = self.heads // self.key_value_heads
        each = KeysValues(*(x_BGLK.repeat_interleave(group, dim=1) for x_BGLK in keys_values))
        return self.o_proj(
            attend(queries_BHTK, each, mask, dropout=self.dropout if self.training else 0.0)
        )


class GatedMLP(nn.Module):
    """D -> 4W, gated by the base's activation of another 4W, -> D."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.base_width, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.base_width, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.base_width, bias=False)
        self.act = ACT2FN[shape.activation]

    @property
    def output(self) -> nn.Linear:
        """The projection into the residual stream."""
        return self.down_proj

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD))


def _split(x_BTW: Tensor, heads: int) -> Tensor:
    """(B, T, H*K) -> (B, H, T, K)"""
    return x_BTW.unflatten(-1, (heads, -1)).transpose(1, 2)
