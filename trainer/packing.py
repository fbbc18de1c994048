"""Ragged rows of tokens -> one stream of real tokens, and where each lies where attention needs a rectangle.

Everything that depends on lengths is worked out here, by the thread that collates, so that a step never waits for a
number to come back from the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.task import Batch

# N rows, M tokens of all of them

ALIGNED = 8  # CUDA's attention kernels copy an additive mask whose rows are no multiple of 8 long
_BUCKET = 32  # rows whose lengths end in the same 32 share a grid


def pack(rows: Sequence[Sequence[int]], *, bucketed: bool) -> Batch:
    """N rows of token ids, none empty, as tensors:

    tokens (M,) ids, row after row; passage (M,) which row each belongs to; position (M,) its place therein;
    grid_0, grid_1, ... (rows, length) bool: rectangles of rows of like length (one when not `bucketed`), True where
    there is a token; cells (M,) where each token lies in them, laid one after the other.
    """
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    assert lengths.min() > 0, "an empty row has no states"
    starts = np.cumsum(lengths) - lengths
    passage = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(lengths.sum()) - starts[passage]
    grids, cells = _grids(lengths, passage, position, bucketed=bucketed)
    batch = {
        "tokens": np.concatenate([np.asarray(row, dtype=np.int64) for row in rows]),
        "passage": passage,
        "position": position,
        "cells": cells,
        **{f"grid_{number}": grid for number, grid in enumerate(grids)},
    }
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def grids_of(batch: Mapping[str, Tensor]) -> list[Tensor]:
    """The grids of a packed batch, in their order."""
    names = sorted((name for name in batch if name.startswith("grid_")), key=lambda name: int(name[5:]))
    return [batch[name] for name in names]


def _grids(
    lengths: np.ndarray, passage: np.ndarray, position: np.ndarray, *, bucketed: bool
) -> tuple[list[np.ndarray], np.ndarray]:
    """Rectangles that hold the rows, and the cell of every token."""
    bucket = -(-lengths // _BUCKET) if bucketed else np.zeros_like(lengths)
    first_cell = np.zeros_like(lengths)  # of each row
    grids: list[np.ndarray] = []
    used = 0
    for number in np.unique(bucket)[::-1]:  # the longest first
        members = np.flatnonzero(bucket == number)
        width = int(-(-lengths[members].max() // ALIGNED) * ALIGNED)
        first_cell[members] = used + np.arange(len(members)) * width
        grids.append(np.arange(width) < lengths[members, None])
        used += grids[-1].size
    return grids, first_cell[passage] + position
