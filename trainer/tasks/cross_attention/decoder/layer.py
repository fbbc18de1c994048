"""One added layer: cross-attention to context states, then an MLP, both pre-norm, no gate.

Source of the arithmetic and of the parameter names: XC-Cache (ServiceNow), as published for each
family of bases.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from trainer.models.decoder.rotation import Rotation
from trainer.tasks.cross_attention.decoder.attention import (
    CrossAttention,
    KeysValues,
    LayerShape,
    Seen,
)
from trainer.tasks.cross_attention.decoder.rotary import GatedMLP, RotaryCrossAttention

if TYPE_CHECKING:
    from trainer.tasks.cross_attention.config import Layers

# B batch, T decoder tokens, D base width

logger = logging.getLogger(__name__)

Record = dict[str, Tensor]


class AddedMLP(nn.Module):
    """D -> 4W -> D with the base's activation."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.base_width, shape.inner)
        self.c_proj = nn.Linear(shape.inner, shape.base_width)
        self.act = ACT2FN[shape.activation]
        self.dropout = nn.Dropout(shape.residual_dropout)

    @property
    def output(self) -> nn.Linear:
        """The projection into the residual stream."""
        return self.c_proj

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(hidden_BTD))))


class AddedLayer(nn.Module):
    """Cross-attention and MLP around one residual stream.

    GPTBigCode: 12*D*W + 7*W + 6*D numbers, D*W + W fewer if q, k share. Llama: 16*D*W + 4*D, with
    as many key as query heads and no biases.
    """

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.skip = shape.skip
        self.ln_1 = nn.LayerNorm(shape.base_width, eps=shape.norm_eps)
        self.crossattention = (
            CrossAttention(shape) if shape.rotary is None else RotaryCrossAttention(shape)
        )
        self.ln_2 = nn.LayerNorm(shape.base_width, eps=shape.norm_eps)
        self.mlp = AddedMLP(shape) if shape.rotary is None else GatedMLP(shape)

    def forward(
        self,
        hidden_BTD: Tensor,
        keys_values: KeysValues,
        mask: Seen,
        record: Record | None = None,
        *,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """(B, T, D) residual stream -> (B, T, D). It computes in its own dtype and answers in the
        stream's.

        record: receives `cross_attn_out` (before the residual) and `cross_block_out` (before the
        optional skip). rotation: of the queries, where the base's positions are rotary.
        """
        x_BTD = hidden_BTD.to(self.ln_1.weight.dtype)
        attended_BTD = self.crossattention(self.ln_1(x_BTD), keys_values, mask, rotation)
        middle_BTD = x_BTD + attended_BTD
        out_BTD = middle_BTD + self.mlp(self.ln_2(middle_BTD))
        if record is not None:
            record |= {"cross_attn_out": attended_BTD, "cross_block_out": out_BTD}
        return (x_BTD + out_BTD if self.skip else out_BTD).to(hidden_BTD.dtype)

    def initialise(self, *, std: float, zero_output: bool) -> None:
        """Draw every matrix from a normal of standard deviation `std`, from torch's generator;
        biases 0, norms 1 and 0.

        zero_output: both output projections start at 0, so that the layer passes its input through
        unchanged.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if zero_output:
            nn.init.zeros_(self.crossattention.output.weight)
            nn.init.zeros_(self.mlp.output.weight)


def added_layers(
    layers: Layers, shape: LayerShape, indices: list[int], *, std: float, seed: int
) -> nn.ModuleDict:
    """The layers for the blocks `indices`, by index, with the same weights on every rank.

    std: of the base's own initialisation. With shared weights there is one, under the lowest index.
    """
    if layers.skip and layers.initialisation == "zero":
        logger.warning(
            "layers.skip doubles the residual stream, so zero initialisation does not keep the "
            "base's logits"
        )
    own = indices[:1] if layers.shared_weights else indices
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it is
        torch.manual_seed(seed)
        built = {str(index): AddedLayer(shape) for index in own}
        for layer in built.values():
            layer.initialise(std=std, zero_output=layers.initialisation == "zero")
    return nn.ModuleDict(built)
