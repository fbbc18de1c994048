"""One added layer: cross-attention to context states, then an MLP, both pre-norm, no gate and no position information.

Source of the arithmetic and of the parameter names: XC-Cache (ServiceNow), as published for GPTBigCode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

# B batch, T decoder tokens, L context tokens, D base width, H heads, K head size, W cross width = H * K

Record = dict[str, Tensor]


@dataclass(frozen=True)
class LayerShape:
    """What an added layer is built from: sizes of its own, and what it takes over from the base."""

    base_width: int
    width: int
    heads: int
    shared_projections: bool  # query and key use one matrix
    skip: bool  # the output is hidden + layer(hidden)
    activation: str
    norm_eps: float
    attention_dropout: float  # of attention probabilities
    residual_dropout: float  # of what is added to the residual stream


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

    def keys_values(self, states_BLD: Tensor) -> KeysValues:
        """(B, L, D) context states -> keys and values, (B, H, L, K) each; they carry no position."""
        states_BLD = states_BLD.to(self.v_attn.weight.dtype)
        project_keys = self.q_k_attn if self.shared_projections else self.k_attn
        return KeysValues(self._split(project_keys(states_BLD)), self._split(self.v_attn(states_BLD)))

    def forward(self, hidden_BTD: Tensor, keys_values: KeysValues, mask: KeyMask | None) -> Tensor:
        """(B, T, D) normed decoder states -> what the attention adds to them, (B, T, D). mask None: all keys."""
        project_queries = self.q_k_attn if self.shared_projections else self.q_attn
        queries_BHTK = self._split(project_queries(hidden_BTD))
        attended_BHTK = F.scaled_dot_product_attention(
            queries_BHTK if mask is None else queries_BHTK * mask.has_key_B111,
            keys_values.keys_BHLK,
            keys_values.values_BHLK,
            attn_mask=None if mask is None else mask.mask_B11L,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.resid_dropout(self.c_proj(attended_BHTK.transpose(1, 2).flatten(2)))

    def _split(self, x_BTW: Tensor) -> Tensor:
        """(B, T, H*K) -> (B, H, T, K)"""
        return x_BTW.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class AddedMLP(nn.Module):
    """D -> 4W -> D with the base's activation."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.base_width, 4 * shape.width)
        self.c_proj = nn.Linear(4 * shape.width, shape.base_width)
        self.act = ACT2FN[shape.activation]
        self.dropout = nn.Dropout(shape.residual_dropout)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(hidden_BTD))))


class AddedLayer(nn.Module):
    """Cross-attention and MLP around one residual stream: 12*D*W + 7*W + 6*D numbers, D*W + W fewer if q, k share."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.skip = shape.skip
        self.ln_1 = nn.LayerNorm(shape.base_width, eps=shape.norm_eps)
        self.crossattention = CrossAttention(shape)
        self.ln_2 = nn.LayerNorm(shape.base_width, eps=shape.norm_eps)
        self.mlp = AddedMLP(shape)

    def forward(
        self,
        hidden_BTD: Tensor,
        keys_values: KeysValues,
        mask: KeyMask | None,
        record: Record | None = None,
    ) -> Tensor:
        """(B, T, D) residual stream -> (B, T, D). It computes in its own dtype and answers in the stream's.

        record: receives `cross_attn_out` (before the residual) and `cross_block_out` (before the optional skip).
        """
        x_BTD = hidden_BTD.to(self.ln_1.weight.dtype)
        attended_BTD = self.crossattention(self.ln_1(x_BTD), keys_values, mask)
        middle_BTD = x_BTD + attended_BTD
        out_BTD = middle_BTD + self.mlp(self.ln_2(middle_BTD))
        if record is not None:
            record |= {"cross_attn_out": attended_BTD, "cross_block_out": out_BTD}
        return (x_BTD + out_BTD if self.skip else out_BTD).to(hidden_BTD.dtype)

    def initialise(self, *, std: float, zero_output: bool) -> None:
        """Draw every matrix from a normal of standard deviation `std`, from torch's generator; biases 0, norms 1 and 0.

        zero_output: both output projections start at 0, so that the layer passes its input through unchanged.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)
        if zero_output:
            nn.init.zeros_(self.crossattention.c_proj.weight)
            nn.init.zeros_(self.mlp.c_proj.weight)
