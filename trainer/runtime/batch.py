"""A batch on its way to the device, and what is known of it when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer.runtime import distributed


def to_device(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch on this rank's device; asynchronous from pinned memory."""
    return {
        name: tensor.to(distributed.device(), non_blocking=True) for name, tensor in batch.items()
    }


@contextmanager
def named_when_out_of_memory(batches: Sequence[Mapping[str, Tensor]]) -> Iterator[None]:
    """Inside, an OutOfMemoryError carries the shapes of the largest of `batches`.

    `batch_of` reads them from the error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        largest = max(batches, key=lambda batch: sum(tensor.numel() for tensor in batch.values()))
        vars(error)["batch"] = {name: list(tensor.shape) for name, tensor in largest.items()}
        raise


def batch_of(error: torch.OutOfMemoryError) -> dict[str, list[int]]:
    """The shapes that `named_when_out_of_memory` found; empty when the error arose elsewhere."""
    return vars(error).get("batch", {})
