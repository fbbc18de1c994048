"""The part of a packed batch that one of several ranks reads: a stretch of its stream of tokens.

Everything but attention works on the tokens of one stretch. Attention works on the whole stream
(exchange.py), so it needs to know where all rows begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.models.distillation import TEACHER_FIELDS
from trainer.models.inputs.neftune import NOISE_FIELDS
from trainer.models.losses import IGNORED
from trainer.models.packed.layout import ALIGNED, grids_of

if TYPE_CHECKING:
    from trainer.protocol.abilities import RankPlace
    from trainer.protocol.task import Batch

# M tokens of all rows, P ranks, L tokens of a stretch, N scored tokens of it

_OF_TOKENS = ("tokens", "position", *NOISE_FIELDS)


def stretch_of(batch: Batch, place: RankPlace) -> Batch:
    """What the rank at this place reads of a batch of layout.pack_labelled, perhaps with noise and
    a teacher's values. A row of up to P - 1 more tokens makes the stream one of P x L tokens:

    - tokens, position (L,), and the noise of these tokens.
    - labels (L + 1,): also that of the token behind the stretch, which its last token predicts.
    - scored (N,): the indices of the tokens of the stretch whose next token has a label, and a
      teacher's values of these.
    - starts, cells, grid_0, ...: of the whole stream, with the row that was added.
    - stretches (P + 1,) int32: where the stretch of each rank begins, and where the last one ends.
    - before () int64: the number of tokens before this stretch.
    """
    num_tokens, ranks = len(batch["tokens"]), place.ranks
    length = -(-num_tokens // ranks)
    num_added, start = ranks * length - num_tokens, place.number * length
    scored = batch["scored"]
    is_here = (scored >= start) & (scored < start + length)
    own: Batch = {
        "labels": _part(batch["labels"], start, length + 1, pad=IGNORED),
        "scored": scored[is_here] - start,
        "stretches": torch.arange(0, ranks * length + 1, length, dtype=torch.int32),
        "before": torch.tensor(start),
        **_whole(batch, num_added),
    }
    for name, tensor in batch.items():
        if name in _OF_TOKENS:
            own[name] = _part(tensor, start, length)
        elif name in TEACHER_FIELDS:
            own[name] = tensor[is_here]
        else:
            assert name in own, f"nobody knows which part of {name} belongs to a stretch"
    return own


def _part(values_M: Tensor, start: int, length: int, *, pad: int = 0) -> Tensor:
    """(length,) of the values from `start` on, and pads where there are no more."""
    part = values_M[start : start + length]
    return F.pad(part, (0, length - len(part)), value=pad)


def _whole(batch: Batch, num_added: int) -> Batch:
    """starts, cells and grids of a stream with one more row, of so many tokens."""
    grids = grids_of(batch)
    layout = {"starts": batch["starts"], "cells": batch["cells"]}
    if num_added:
        end, used = batch["starts"][-1:] + num_added, sum(grid.numel() for grid in grids)
        width = -(-num_added // ALIGNED) * ALIGNED
        layout["starts"] = torch.cat([layout["starts"], end])
        layout["cells"] = torch.cat([layout["cells"], torch.arange(used, used + num_added)])
        grids.append(torch.arange(width)[None] < num_added)
    return {**layout, **{f"grid_{number}": grid for number, grid in enumerate(grids)}}
