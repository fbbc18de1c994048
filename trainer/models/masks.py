"""Masks of transformers on a device: never looked into.

Whether a mask hides nothing, and can be left out, is a number of the device: the host would wait
for it in every micro-batch. transformers (5.23, masking_utils) does not look when it is being
traced, and then keeps the mask. Only masks on the CPU are looked into here.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

_CPU = torch.device("cpu")


def keep_masks_of_devices() -> None:
    """From here on no mask on a GPU is looked into in this process."""
    setattr(masking_utils, "is_tracing", _is_kept)  # noqa: B010 (no public name there)


def _is_kept(tensor: Any = None) -> bool:
    is_on_device = isinstance(tensor, torch.Tensor) and tensor.device != _CPU
    return is_on_device or is_tracing(tensor)
