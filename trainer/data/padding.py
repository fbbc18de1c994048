"""Ragged token ids: as fields of a row that are flat, and as rectangles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def flat(lists: Sequence[Sequence[int]], name: str) -> dict[str, list[int]]:
    """Lists of ids as the two fields that unflat() reads.

    All of them one after the other, and their lengths.
    """
    return {
        name: [token for ids in lists for token in ids],
        f"{name}_lengths": [len(ids) for ids in lists],
    }


def unflat(row: Mapping[str, Any], name: str) -> list[Sequence[int]]:
    """The lists that flat() took."""
    lists, start = [], 0
    for length in row[f"{name}_lengths"]:
        lists.append(row[name][start : start + int(length)])
        start += int(length)
    return lists
