"""Ragged rows of tokens -> one stream of real tokens, and where each lies where attention needs a
rectangle.

Everything that depends on lengths is worked out here, by the thread that collates, so that a step
never waits for a number to come back from the device.
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

ALIGNED = 8  # CUDA's attention kernels copy an additive mask whose rows are no multiple of 8 long
_BUCKET = 32  # rows whose lengths end in the same 32 share a grid


def pack(rows: Sequence[Sequence[int]], *, bucketed: bool) -> Batch:
    """N rows of token ids, none empty, as tensors:

    tokens (M,) ids, row after row; passage (M,) which row each belongs to; position (M,) its place
    therein; starts (N + 1,) int32, where each row begins, and where the last one ends; grid_0,
    grid_1, ... (rows, length) bool: rectangles of rows of like length (one when not `bucketed`),
    True where there is a token; cells (M,) where each token lies in them, laid one after the other.
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
    """pack's of N rows without `passage`, and for a model that predicts the next token:

    labels (M,): the ids, IGNORED where `is_label` is 0 and at every row's first; scored (N,): the
    places whose next token has a label.
    """
    packed = pack(rows, bucketed=True)
    del packed["passage"]
    flags = np.concatenate([np.asarray(row, dtype=bool) for row in is_label])
    is_ignored = torch.from_numpy(~flags) | (packed["position"] == 0)
    labels = packed["tokens"].masked_fill(is_ignored, IGNORED)
    return {**packed, "labels": labels, "scored": (labels != IGNORED).nonzero()[:, 0] - 1}


def pack_targets(targets: Sequence[Sequence[int]]) -> Batch:
    """What B decoders write, some of it perhaps empty: labels (B, T), IGNORED where there is none;
    scored (N,), where labels are among all B * T; target_starts (B + 1,) int32, where those of each
    row begin among the scored.
    """
    ids, mask = pad_right(targets, 0)
    lengths = torch.tensor([0, *map(len, targets)])
    return {
        "labels": ids.masked_fill(mask == 0, IGNORED),
        "scored": mask.flatten().nonzero()[:, 0],
        "target_starts": lengths.cumsum(0).to(torch.int32),
    }


def pack_pairs(query_lengths: Sequence[int], key_lengths: Sequence[int]) -> Batch:
    """Where the tokens of N rows lie when each attends to M keys of its own (none has none), for
    cross-attention:

    queries_cells (tokens,), queries_grid_0, ... and keys_cells (keys,), keys_grid_0, ...: as
    pack's, with the same rows in grids of one number; keys_position (keys,): the place of each
    among its row's.
    """
    queries, keys = (
        np.asarray(lengths, dtype=np.int64) for lengths in (query_lengths, key_lengths)
    )
    assert min(queries.min(), keys.min()) > 0, "a row without keys attends to nothing"
    group = _doublings(queries) * 64 + _doublings(keys)
    found: dict[str, np.ndarray] = {"keys_position": _places(keys)[1]}
    for name, lengths in (("queries", queries), ("keys", keys)):
        row, position = _places(lengths)
        grids, first_cell = _grids(lengths, group)
        found[f"{name}_cells"] = first_cell[row] + position
        found |= {f"{name}_grid_{number}": grid for number, grid in enumerate(grids)}
    return {name: torch.from_numpy(values) for name, values in found.items()}


def grids_of(batch: Mapping[str, Tensor], prefix: str = "grid_") -> list[Tensor]:
    """The grids of a packed batch, in their order."""
    names = sorted(
        (name for name in batch if name.startswith(prefix)),
        key=lambda name: int(name[len(prefix) :]),
    )
    return [batch[name] for name in names]


def _places(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tokens,) the row of every token of rows that follow one another, and its place therein."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(lengths.sum()) - (np.cumsum(lengths) - lengths)[row]


def _doublings(lengths: np.ndarray) -> np.ndarray:
    """(N,) how often _BUCKET doubles before it holds the row."""
    return np.ceil(np.log2(np.maximum(lengths, _BUCKET) / _BUCKET)).astype(np.int64)


def _grids(lengths: np.ndarray, group: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """A rectangle for the rows of each group, the highest group first, and the first cell of every
    row.
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
