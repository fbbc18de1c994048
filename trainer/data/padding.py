"""Ragged token ids -> rectangles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def pad_right(sequences: Sequence[Any], pad: int) -> tuple[Tensor, Tensor]:
    """N sequences of ids -> (N, longest) int64 ids and mask. The mask comes from lengths alone."""
    width = max(1, *(len(sequence) for sequence in sequences)) if sequences else 1
    ids = torch.full((len(sequences), width), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, sequence in enumerate(sequences):
        ids[index, : len(sequence)] = torch.as_tensor(sequence, dtype=torch.int64)
        mask[index, : len(sequence)] = 1
    return ids, mask
