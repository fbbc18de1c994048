"""Ragged passages -> one stream of real tokens, and where each token lies where a rectangle is needed.

Everything that depends on lengths is worked out here, by the thread that collates, so that a step never waits for a
number to come back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.task import Batch

# B questions, P passages of all of them, M tokens of all of those, S tokens of the question that has most

_ALIGNED = 8  # CUDA's attention kernels copy an additive mask whose rows are no multiple of 8 long
_BUCKET = 32  # passages whose lengths end in the same 32 share a grid


def pack(questions: Sequence[Sequence[Sequence[int]]], *, bucketed: bool, cross_width: int | None = None) -> Batch:
    """The passages of B questions, each a list of token ids, as tensors:

    tokens (M,) ids, passage after passage; passage (M,) which passage each belongs to; position (M,) its place therein;
    question (P,) the question of each passage;
    grid_0, grid_1, ... (passages, length) bool: rectangles of passages of like length (one when not `bucketed`), True
    where there is a token; cells (M,) where each token lies in them, laid one after the other;
    fused_mask (B, S) bool and fused (M,): where each token lies among all those of its question.

    cross_width: None puts the tokens of a question close together; a number leaves every passage that much room, which
    is the references' layout. A question needs at least one passage, and a passage at least one token.
    """
    passages = [passage for question in questions for passage in question]
    lengths = np.array([len(passage) for passage in passages], dtype=np.int64)
    assert all(questions), "a question without passages is encoded as one passage"
    assert lengths.min() > 0, "a passage begins with its question"
    starts = np.cumsum(lengths) - lengths
    passage = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(lengths.sum()) - starts[passage]
    question = np.repeat(np.arange(len(questions)), [len(question) for question in questions])
    grids, cells = _grids(lengths, passage, position, bucketed=bucketed)
    fused_mask, fused = _fused(lengths, question, passage, position, cross_width)
    batch = {
        "tokens": np.concatenate([np.asarray(passage, dtype=np.int64) for passage in passages]),
        "passage": passage,
        "position": position,
        "question": question,
        "cells": cells,
        "fused": fused,
        "fused_mask": fused_mask,
        **{f"grid_{number}": grid for number, grid in enumerate(grids)},
    }
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def grids_of(batch: Batch) -> list[Tensor]:
    """The grids of a packed batch, in their order."""
    names = sorted((name for name in batch if name.startswith("grid_")), key=lambda name: int(name[5:]))
    return [batch[name] for name in names]


def _grids(
    lengths: np.ndarray, passage: np.ndarray, position: np.ndarray, *, bucketed: bool
) -> tuple[list[np.ndarray], np.ndarray]:
    """Rectangles that hold the passages, and the cell of every token."""
    bucket = -(-lengths // _BUCKET) if bucketed else np.zeros_like(lengths)
    first_cell = np.zeros_like(lengths)  # of each passage
    grids: list[np.ndarray] = []
    used = 0
    for number in np.unique(bucket)[::-1]:  # the longest first
        members = np.flatnonzero(bucket == number)
        width = int(-(-lengths[members].max() // _ALIGNED) * _ALIGNED)
        first_cell[members] = used + np.arange(len(members)) * width
        grids.append(np.arange(width) < lengths[members, None])
        used += grids[-1].size
    return grids, first_cell[passage] + position


def _fused(
    lengths: np.ndarray, question: np.ndarray, passage: np.ndarray, position: np.ndarray, cross_width: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """(B, S) mask, and the place of every token in the flat (B * S,) of it."""
    rooms = lengths if cross_width is None else np.full_like(lengths, cross_width)
    per_question = np.bincount(question, weights=rooms).astype(np.int64)
    width = int(-(-per_question.max() // _ALIGNED) * _ALIGNED) if cross_width is None else int(per_question.max())
    before = np.cumsum(rooms) - rooms  # room taken by earlier passages of all questions
    before_question = np.cumsum(per_question) - per_question
    fused = question[passage] * width + (before - before_question[question])[passage] + position
    mask = np.zeros(len(per_question) * width, dtype=bool)
    mask[fused] = True
    return mask.reshape(len(per_question), width), fused
