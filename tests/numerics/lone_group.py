"""A process group of one rank whose exchanges are over when they return.

gloo's threads let go of a tensor when the machine gets round to running them, which may be after
the next allocation: beside other programs up to six weights more were alive at the peak of an
engine than on a quiet machine. Here the calling thread does everything, so that a peak depends on
the engine alone.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Work
from torch.futures import Future


class Done(Work):
    """An exchange that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(None)
        return future


class LoneGroup(dist.ProcessGroup):
    """Sums over one rank are the tensors themselves, and what is gathered or scattered is
    copied.
    """

    def getBackendName(self) -> str:
        return "lone"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return Done()

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return Done()

    def barrier(self, opts: Any = None) -> Work:
        return Done()

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        for (output,), source in zip(outputs, inputs, strict=True):
            output.copy_(source)
        return Done()

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        output.copy_(source)
        return Done()

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        return self.allgather([[output] for output in outputs], inputs)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Work:
        for output, (source,) in zip(outputs, inputs, strict=True):
            output.copy_(source)
        return Done()

    reduce_scatter_single = all_gather_single
    # The names that torch before 2.13 calls.
    _allgather_base = _reduce_scatter_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced


def join_lone_group() -> None:
    """Leave the process group that there may be, for one of this process alone."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.Backend.register_backend(
        "lone", lambda store, rank, world, timeout: LoneGroup(rank, world), devices=["cpu"]
    )
    dist.init_process_group("lone", store=HashStore(), rank=0, world_size=1)
