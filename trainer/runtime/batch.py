"""Copies batches to the device, and names the shapes of a batch when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor

from trainer.runtime import distributed


def to_device(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch on this rank's device; asynchronous from pinned memory."""
    return {
        name: tensor.to(distributed.device(), non_blocking=True) for name, tensor in batch.items()
    }


def numbers_on_device(numbers: Sequence[int]) -> Tensor:
    """(N,) int64 on this rank's device, copied asynchronously."""
    return to_device(distributed.pin_batch({"numbers": torch.tensor(numbers)}))["numbers"]


class OnDevice(Sequence[dict[str, Tensor]]):
    """The micro-batches of a step on the device, at most two at a time: while one is used, a CUDA
    stream of its own copies the next one.

    So a step needs the memory of two micro-batches, however many it has. GradCache reads them
    twice; they are then copied twice.
    """

    def __init__(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """batches: on the host, in pinned memory."""
        self._host = batches
        self._copies: dict[int, _Copy] = {}

    def __len__(self) -> int:
        return len(self._host)

    @overload
    def __getitem__(self, index: int) -> dict[str, Tensor]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Tensor]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return OnDevice(self._host[index])
        index = range(len(self))[index]
        if not distributed.is_gpu():
            return to_device(self._host[index])
        self._copies = {
            place: self._copies.get(place) or _Copy(self._host[place])
            for place in (index, index + 1)
            if place < len(self)
        }
        return self._copies[index].on_current_stream()


class _Copy:
    """A micro-batch that is copied by a CUDA stream of its own."""

    _stream: Any = None  # one for the process, made with the first copy

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        if _Copy._stream is None:
            _Copy._stream = torch.cuda.Stream(distributed.device())
        with torch.cuda.stream(_Copy._stream):
            self._batch = to_device(batch)
            self._event = torch.cuda.Event()
            self._event.record()

    def on_current_stream(self) -> dict[str, Tensor]:
        """The batch, for use in the current stream. That stream waits for the copy; the host does
        not wait.
        """
        here = torch.cuda.current_stream()
        here.wait_event(self._event)
        for tensor in self._batch.values():
            # the allocator must not reuse this memory before the current stream is done with it
            tensor.record_stream(here)
        return self._batch


class HostCopy:
    """Copies small numbers to the host while the device works.

    Reading them waits for the copy only.
    """

    def __init__(self, counts: Tensor) -> None:
        self._event = None
        if not distributed.is_gpu():
            self._host = counts
            return
        self._host = torch.empty(counts.shape, dtype=counts.dtype).pin_memory()
        self._host.copy_(counts, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def read(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


@contextmanager
def name_batch_when_out_of_memory(batches: Sequence[Mapping[str, Tensor]]) -> Iterator[None]:
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
    """The shapes that `name_batch_when_out_of_memory` put into an error; {} for another error."""
    return vars(error).get("batch", {})
