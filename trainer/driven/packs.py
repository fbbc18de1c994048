"""Which rank computes which rows of an operation in which micro-batch, and their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.padding import pad_right
from trainer.models.packed.layout import pack
from trainer.operations.rows import DrivenRow
from trainer.protocol.task import Batch

TARGETS = "target_tokens"


def deal(lengths: Sequence[int], *, world: int, most_tokens: int) -> list[list[list[int]]]:
    """The numbers of the rows by rank and micro-batch: a function of the lengths alone. Every rank
    has equally many micro-batches, of which the last ones may be empty.

    most_tokens: of a micro-batch; a longer row goes alone.
    """
    shares: list[list[int]] = [[] for _ in range(world)]
    sums = [0] * world
    for number in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        rank = sums.index(min(sums))
        shares[rank].append(number)
        sums[rank] += lengths[number]
    dealt = [_cut(sorted(share), lengths, most_tokens) for share in shares]
    most = max(map(len, dealt))
    return [packs + [[]] * (most - len(packs)) for packs in dealt]


def _cut(numbers: Sequence[int], lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    packs: list[list[int]] = []
    tokens = 0
    for number in numbers:
        tokens += lengths[number]
        if not packs or tokens > most_tokens:
            packs.append([])
            tokens = lengths[number]
        packs[-1].append(number)
    return packs


def batch_of(rows: Sequence[DrivenRow], *, is_packed: bool, pad: int) -> Batch:
    """The tensors of a micro-batch for CausalLM.forward: the tokens, `scored` (N,), the position of
    every target, and `targets` (N,), row after row. A position may have several targets.
    """
    ids: list[Any] = [row.tokens for row in rows]
    if is_packed:
        batch = pack(ids, bucketed=True)
        del batch["passage"]
        starts = batch["starts"][:-1].tolist()
    else:
        padded, mask = pad_right(ids, pad)
        batch = {"input_ids": padded, "attention_mask": mask}
        starts = [padded.shape[1] * number for number in range(len(rows))]
    scored = [
        np.repeat(start + np.arange(len(row.tokens)), width_of(row))
        for start, row in zip(starts, rows, strict=True)
    ]
    targets = np.concatenate([row.inputs[TARGETS].reshape(-1) for row in rows])
    return {
        **batch,
        "scored": torch.from_numpy(np.concatenate(scored)),
        "targets": torch.from_numpy(targets.astype(np.int64)),
    }


def inputs_of(rows: Sequence[DrivenRow]) -> dict[str, Tensor]:
    """(N,) fp32 each: the other inputs of the loss of these rows, in the order of their targets.
    An input with one number a token counts for each of its targets.
    """
    tensors: dict[str, Tensor] = {}
    for name in rows[0].inputs.keys() - {TARGETS}:
        parts = [_by_target(row, row.inputs[name]) for row in rows]
        tensors[name] = torch.from_numpy(np.concatenate(parts).astype(np.float32))
    return tensors


def width_of(row: DrivenRow) -> int:
    """The targets of a position."""
    targets = row.inputs[TARGETS]
    return int(targets.shape[1]) if targets.ndim > 1 else 1


def _by_target(row: DrivenRow, values: Any) -> Any:
    if values.ndim == 1 and width_of(row) > 1:
        return np.repeat(values, width_of(row))
    return values.reshape(-1)


def split_outputs(
    of_ranks: Sequence[Tensor], dealt: Sequence[Sequence[Sequence[int]]], counts: Mapping[int, int]
) -> list[Tensor]:
    """The outputs of each row, in the order of the rows: of_ranks are those of each rank, one row
    after another as they were dealt. counts: the targets of each row.
    """
    parts: dict[int, Tensor] = {}
    for outputs, packs in zip(of_ranks, dealt, strict=True):
        numbers = [number for pack_numbers in packs for number in pack_numbers]
        sizes = [counts[number] for number in numbers]
        parts.update(zip(numbers, outputs.split(sizes), strict=True) if numbers else ())
    return [parts[number] for number in range(len(counts))]
