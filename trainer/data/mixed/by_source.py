"""Which source of a mix every label of a batch is of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trainer.protocol.task import Batch

# N labels of a micro-batch, B its rows


def source_of_labels(batch: Batch, source_B: Tensor, units: Tensor) -> Tensor:
    """(N,) int64: the source of each label of a collated batch, in the order of its losses; of a
    batch whose loss is over rows, source_B itself.

    A batch is a stream of tokens, or has rows of labels as wide as the longest; `scored` or
    `scored_flat` says where its labels are. units: what the loss of the batch is divided by, which
    is not the number of its labels where it is over rows (of preferences, each of two answers).
    """
    scored_N = batch.get("scored", batch.get("scored_flat"))
    if scored_N is None or int(units) != len(scored_N):
        return source_B
    labels = batch["labels"]
    if labels.dim() == 2:
        return source_B[scored_N // labels.shape[1]]
    ends_B = batch["starts"][1:].long()
    if "before" in batch:  # of a stream, this rank reads the tokens behind so many
        scored_N = scored_N + batch["before"]
    return source_B[torch.bucketize(scored_N, ends_B, right=True)]
