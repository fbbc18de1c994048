"""Masks of transformers on a device: never looked into, and left out where causality hides pads.

Whether a mask hides nothing, and can be left out, is a number of the device: the host would wait
for it in every micro-batch. transformers (5.23, masking_utils) does not look when it is being
traced, and then keeps the mask. Only masks on the CPU are looked into here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils.import_utils import is_tracing

from trainer.models.families import DECODERS

_CPU = torch.device("cpu")


def keep_masks_of_devices() -> None:
    """From here on no mask on a GPU is looked into in this process, nor positions, for rows that
    follow one another: none of ours are packed so.
    """
    setattr(masking_utils, "is_tracing", _is_kept)  # noqa: B010 (no public name there)
    setattr(masking_utils, "find_packed_sequence_indices", _no_packed_rows)  # noqa: B010


def of_right_padded(mask_BT: Tensor, config: Any) -> Tensor | None:
    """What a base gets of the mask of rows padded on the right: nothing on a device, where it reads
    from left to right. No token sees the pads behind it, and attention without a mask is flash's.
    """
    reads_ahead = getattr(config, "use_bidirectional_attention", False)
    is_known = config.model_type in DECODERS and not reads_ahead
    return None if is_known and mask_BT.device != _CPU else mask_BT


def mend_attention(model: nn.Module) -> None:
    """Attention that transformers gets wrong in silence before 5.23, as that version does it.

    In 5.17 torch's kernel leaves out the cap on Gemma 2's scores, and umT5's decoder looks ahead
    wherever rows have no pads and so no mask.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # pyright: ignore
    for module in model.modules():
        if type(module).__name__ == "UMT5LayerSelfAttention":
            attention: Any = module.SelfAttention
            attention.is_causal = attention.is_decoder


def _is_kept(tensor: Any = None) -> bool:
    is_on_device = isinstance(tensor, Tensor) and tensor.device != _CPU
    return is_on_device or is_tracing(tensor)


def _no_packed_rows(position_ids: Tensor) -> Tensor | None:
    return find_packed_sequence_indices(position_ids) if position_ids.device == _CPU else None
