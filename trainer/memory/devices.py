"""How much memory a device has: by name, by a number with its unit, or as the machine says. Imports
no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.config import nearest
from trainer.errors import ConfigError

GIB = 2**30
# What the driver shows of each card (nvidia-smi's total less what it reserves), in GiB; the names
# on boxes are rounded.
_SHOWN_GIB = {
    "t4": 14.6,
    "v100-16": 15.8,
    "v100-32": 31.7,
    "l4": 22.0,
    "a10": 22.0,
    "a10g": 22.0,
    "rtx3090": 23.6,
    "rtx4090": 23.5,
    "rtx5090": 31.4,
    "a6000": 47.4,
    "l40s": 44.4,
    "a100-40": 39.4,
    "a100-80": 79.1,
    "h100": 79.1,
    "h200": 139.8,
    "b200": 178.4,
}
_UNITS = {"gib": GIB, "gb": 10**9, "mib": 2**20, "mb": 10**6}
_SMALL_CUBLAS = (
    8_519_680  # bytes of cuBLAS's workspace before sm90 (4096 x 2 + 16 x 8 KiB, torch's default)
)
_LARGE_CUBLAS = 32 * 2**20  # from sm90 on
_FROM_SM90 = ("h100", "h200", "b200", "rtx5090")
CONTEXT = int(0.5 * GIB)  # CUDA's own, outside torch's allocator: 0.4 to 0.6 GiB
NCCL = int(0.5 * GIB)  # of a process group: 0.1 to 1 GiB


@dataclass(frozen=True)
class Device:
    """One device of a run."""

    name: str
    nbytes: int
    cublas_nbytes: int = _LARGE_CUBLAS

    def usable(self, world: int) -> int:
        """Bytes that torch's allocator can have: less CUDA's context and, with several ranks,
        NCCL's buffers.
        """
        return self.nbytes - CONTEXT - (NCCL if world > 1 else 0)


def device_of(text: str) -> Device:
    """The device that --device names: a100-80, h200, ..., or a size such as 24GiB. ConfigError for
    anything else.
    """
    name = text.strip().lower()
    if name in _SHOWN_GIB:
        cublas = _LARGE_CUBLAS if name in _FROM_SM90 else _SMALL_CUBLAS
        return Device(name, int(_SHOWN_GIB[name] * GIB), cublas)
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gib|gb|mib|mb)", name)
    if size and float(size[1]) > 0:
        return Device(text, int(float(size[1]) * _UNITS[size[2]]))
    raise ConfigError(
        f"--device {text}: neither a size, such as 24GiB, nor a known name. "
        f"{nearest(name, [*_SHOWN_GIB])}"
    )


def device_here() -> Device | None:
    """The GPU of this process; None on a machine without one. Imports torch."""
    import torch

    from trainer.runtime import distributed

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(distributed.device())
    return Device(
        found.name, found.total_memory, _LARGE_CUBLAS if found.major >= 9 else _SMALL_CUBLAS
    )
