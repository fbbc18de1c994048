"""Rows as a packed batch: one stream of real tokens for the decoder, one for what it reads, and no
pads.

Collation works out everything that depends on lengths; the step asks the device for none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.models.packed.layout import pack, pack_labelled, pack_pairs

if TYPE_CHECKING:
    from trainer.protocol.task import Batch
    from trainer.tasks.cross_attention.encoder_states.reading import StateCache

# M decoder tokens of all rows, K context tokens of all of them, N scored tokens, D width

# What of a packed or padded batch depends on the context
CONTEXT_NAMES = ("context_", "encoder_", "keys_", "queries_")


def decoder_stream(rows: Sequence[Sequence[int]], labels_from: Sequence[int]) -> Batch:
    """layout.pack_labelled of rows whose labels begin at these places."""
    pairs = zip(rows, labels_from, strict=True)
    is_label = [[0] * start + [1] * (len(row) - start) for row, start in pairs]
    return pack_labelled(rows, is_label)


def context_stream(
    contexts: Sequence[Sequence[Sequence[int]]],
    decoder_lengths: Sequence[int],
    *,
    cache: StateCache | None,
) -> Batch:
    """The chunks of each row's context, chunk after chunk, and where attention from its tokens
    finds them.

    encoder_hidden_states (K, D), prepared states; without a cache context_input_ids (K,),
    context_position, context_cells and context_grid_0, ... of the chunks; and what
    layout.pack_pairs gives. Every row has a token.
    """
    chunks = [[chunk for chunk in row if len(chunk)] for row in contexts]
    flat = [chunk for row in chunks for chunk in row]
    pairs = pack_pairs(decoder_lengths, [sum(map(len, row)) for row in chunks])
    if cache is not None:
        return {
            "encoder_hidden_states": torch.cat([cache.states(chunk) for chunk in flat]),
            **pairs,
        }
    packed = pack(flat, bucketed=True)
    del packed["passage"]
    ids = packed.pop("tokens")
    return {
        "context_input_ids": ids,
        **{f"context_{name}": tensor for name, tensor in packed.items()},
        **pairs,
    }


def can_be_streams(rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> bool:
    """Whether every row has a context token in each field. A row without one attends to its pads,
    and a stream has no pads.
    """
    return all(sum(row[f"{field}_lengths"]) for row in rows for field in fields)


def under_context(batch: Mapping[str, Tensor], prefix: str) -> Batch:
    """The same rows of the decoder, reading another context.

    The names of that context's tensors begin with `prefix`.
    """
    decoder = {
        name: x for name, x in batch.items() if not name.startswith((*CONTEXT_NAMES, prefix))
    }
    return decoder | {
        name.removeprefix(prefix): x for name, x in batch.items() if name.startswith(prefix)
    }
