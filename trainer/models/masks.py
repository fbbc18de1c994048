"""Keeps transformers from reading masks on a GPU, and leaves masks out where causality hides pads.

transformers (5.23, masking_utils) leaves a mask out if it hides nothing. To know that, the host
reads a value from the device, and waits for it in every micro-batch. transformers does not read the
mask while it is traced; this module makes it believe so for masks that are not on the CPU.
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
    """Make transformers, in this process, read no mask and no positions on a GPU. It reads
    positions to detect rows packed into one sequence, which we never give it.
    """

    def packed_indices(position_ids: Tensor) -> Tensor | None:
        is_on_cpu = position_ids.device == _CPU
        return find_packed_sequence_indices(position_ids) if is_on_cpu else None

    setattr(masking_utils, "is_tracing", _is_kept)  # noqa: B010 (no public name there)
    setattr(masking_utils, "find_packed_sequence_indices", packed_indices)  # noqa: B010


def of_right_padded(mask_BT: Tensor, config: Any) -> Tensor | None:
    """The mask to give to a base for rows padded on the right; None on a GPU for a base that reads
    from left to right. There no token sees the pads behind it, and attention without a mask runs as
    flash attention.
    """
    reads_ahead = getattr(config, "use_bidirectional_attention", False)
    is_known = config.model_type in DECODERS and not reads_ahead
    return None if is_known and mask_BT.device != _CPU else mask_BT


def mend_attention(model: nn.Module) -> None:
    """Correct attention that transformers before 5.23 computes wrongly without an error.

    In 5.17 torch's kernel ignores the cap on Gemma 2's scores, and umT5's decoder attends to later
    tokens when rows have no pads and therefore no mask.
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
