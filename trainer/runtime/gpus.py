"""The GPU of this process: its memory and its peak FLOP/s."""

from __future__ import annotations

from trainer.devices import (
    LARGE_CUBLAS,
    SMALL_CUBLAS,
    Device,
    device_of,
    peak_flops_of,
)


def device_to_plan_for(name: str | None) -> Device | None:
    """The device that a run is planned for: the one of --device, or else the GPU of this process.
    None when there is neither.
    """
    return device_of(name) if name is not None else device_here()


def device_here() -> Device | None:
    """The GPU of this process; None on a machine without one. Imports torch."""
    import torch

    from trainer.runtime import distributed

    if not torch.cuda.is_available():
        return None
    here = torch.cuda.get_device_properties(distributed.device())
    cublas = LARGE_CUBLAS if here.major >= 9 else SMALL_CUBLAS
    return Device(here.name, here.total_memory, cublas)


def peak_flops(name: str | None = None) -> float | None:
    """Dense bf16 FLOP/s of the GPU `name` (default: this rank's); None for a CPU, a MIG slice or an
    unknown GPU. Imports torch when no name is given.
    """
    if name is None:
        device = device_here()
        name = "" if device is None else device.name
    return peak_flops_of(name)
