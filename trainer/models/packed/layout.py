"""Packs rows of tokens of different lengths into one stream without pads, with the indices that
attention in padded rectangles ("grids") needs.

Everything that depends on lengths is computed here, by the thread that collates, so that a step
never waits for a number from the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trainer.data.padding import pad_right
from trainer.models.losses import IGNORED

if TYPE_CHECKING:
    from trainer.protocol.task import Batch

# N rows, M tokens of all of them

# CUDA's attention kernels copy an additive mask unless the length of its rows is a multiple of 8.
ALIGNED = 8
_BUCKET = 32  # rows share a grid if their lengths, divided by this and rounded up, are equal


def pack(rows: Sequence[Sequence[int]], *, bucketed: bool) -> Batch:
    """N rows of token ids, none empty, as tensors:

    - tokens (M,): the ids, row after row.
    - passage (M,): the number of the row that each token belongs to.
    - position (M,): the place of each token in its row.
    - starts (N + 1,) int32: where each row begins in the stream, and where the last one ends.
    - grid_0, grid_1, ... (rows, length) bool: padded rectangles of rows of similar length, True
      where there is a token. Without `bucketed`, one grid holds all rows.
    - cells (M,): the index of each token in the flattened grids, one grid after the other.
    """
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    assert lengths.min() > 0, "an empty row has no states"
    passage, position = _places(lengths)
    grids, first_cell = _grids(
        lengths, -(-lengths // _BUCKET) if bucketed else np.zeros_like(lengths)
    )
    batch = {
        "tokens": np.concatenate([np.asarray(row, dtype=np.int64) for row in rows]),
        "passage": passage,
        "position": position,
        "starts": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        "cells": first_cell[passage] + position,
        **{f"grid_{number}": grid for number, grid in enumerate(grids)},
    }
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def pack_labelled(rows: Sequence[Sequence[int]], is_label: Sequence[Sequence[int]]) -> Batch:
    """As pack, without `passage`, and for a model that predicts the next token:

    - labels (M,): the ids; IGNORED where `is_label` is 0, and at the first token of every row.
    - scored (N,): the indices of the tokens whose next token has a label.
    """
    packed = pack(rows, bucketed=True)
    del packed["passage"]
    flags = np.concatenate([np.asarray(row, dtype=bool) for row in is_label])
    is_ignored = torch.from_numpy(~flags) | (packed["position"] == 0)
    labels = packed["tokens"].masked_fill(is_ignored, IGNORED)
    return {**packed, "labels": labels, "scored": (labels != IGNORED).nonzero()[:, 0] - 1}


def pack_targets(targets: Sequence[Sequence[int]]) -> Batch:
    """The targets of B rows of an encoder-decoder; a target may be empty:

    - labels (B, T): the ids, padded with IGNORED.
    - scored (N,): the indices of the ids in the flattened labels.
    - target_starts (B + 1,) int32: where the target of each row begins in `scored`, and where the
      last one ends.
    """
    ids, mask = pad_right(targets, 0)
    lengths = torch.tensor([0, *map(len, targets)])
    return {
        "labels": ids.masked_fill(mask == 0, IGNORED),
        "scored": mask.flatten().nonzero()[:, 0],
        "target_starts": lengths.cumsum(0).to(torch.int32),
    }


def pack_pairs(query_lengths: Sequence[int], key_lengths: Sequence[int]) -> Batch:
    """The layout of N rows for cross-attention, where the tokens of a row attend to its own keys.

    Every row has at least one key. Grids of queries and keys are paired: queries_grid_<i> and
    keys_grid_<i> hold the same rows.

    - queries_cells (tokens,), queries_grid_0, ...: as pack's, of the tokens.
    - keys_cells (keys,), keys_grid_0, ...: as pack's, of the keys.
    - keys_position (keys,): the place of each key in its row.
    """
    queries = np.asarray(query_lengths, dtype=np.int64)
    keys = np.asarray(key_lengths, dtype=np.int64)
    assert min(queries.min(), keys.min()) > 0, "a row without keys attends to nothing"
    group = _doublings(queries) * 64 + _doublings(keys)
    layout: dict[str, np.ndarray] = {"keys_position": _places(keys)[1]}
    for name, lengths in (("queries", queries), ("keys", keys)):
        row, position = _places(lengths)
        grids, first_cell = _grids(lengths, group)
        layout[f"{name}_cells"] = first_cell[row] + position
        layout |= {f"{name}_grid_{number}": grid for number, grid in enumerate(grids)}
    return {name: torch.from_numpy(values) for name, values in layout.items()}


def grids_of(batch: Mapping[str, Tensor], prefix: str = "grid_") -> list[Tensor]:
    """The grids of a packed batch, in their order."""
    names = sorted(
        (name for name in batch if name.startswith(prefix)),
        key=lambda name: int(name[len(prefix) :]),
    )
    return [batch[name] for name in names]


def _places(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tokens,) the row of every token of a stream, and (tokens,) its place in that row."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(lengths.sum()) - (np.cumsum(lengths) - lengths)[row]


def _doublings(lengths: np.ndarray) -> np.ndarray:
    """(N,) how often _BUCKET must double to be at least as long as the row."""
    return np.ceil(np.log2(np.maximum(lengths, _BUCKET) / _BUCKET)).astype(np.int64)


def _grids(lengths: np.ndarray, group: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """A grid for the rows of each group, the highest group first, and (N,) the index of the first
    cell of every row in the flattened grids.
    """
    first_cell = np.zeros_like(lengths)
    grids: list[np.ndarray] = []
    used = 0
    for number in np.unique(group)[::-1]:
        members = np.flatnonzero(group == number)
        width = int(-(-lengths[members].max() // ALIGNED) * ALIGNED)
        first_cell[members] = used + np.arange(len(members)) * width
        grids.append(np.arange(width) < lengths[members, None])
        used += grids[-1].size
    return grids, first_cell
