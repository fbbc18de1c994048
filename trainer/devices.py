"""The GPUs that we know, and what `--device` names: one of them, or a size of memory; and what the
system tells of its processor.

Standard library only, for whoever submits a job.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigError, nearest

GIB = 2**30
_UNITS = {"gib": GIB, "gb": 10**9, "mib": 2**20, "mb": 10**6}
# Bytes of cuBLAS's workspaces, torch's default: 4096 x 2 + 16 x 8 KiB before sm90, then 32 MiB.
# There are two: forward and backward run in two threads, each of which has a handle of its own.
SMALL_CUBLAS, LARGE_CUBLAS = 2 * 8_519_680, 2 * 32 * 2**20
# What lies outside torch's allocator: CUDA's context, code of kernels, NCCL's group of one rank.
# An H100 told 1.27 GiB when a run of an 8B base with LoRA had no memory left (torch 2.11, CUDA 13).
CONTEXT = int(1.3 * GIB)
NCCL = int(0.5 * GIB)  # NCCL's buffers for a group of several ranks: 0.1 to 1 GiB
# share of what is alive that a processor's run holds besides, because malloc keeps freed memory for
# the next step (runtime/host_memory.py); measured (docs/gpu.md)
KEPT = 0.14
FILLED = 0.95  # share that a run fills if it chooses for itself: fragments are not planned


@dataclass(frozen=True)
class _Card:
    name: str  # a part of torch's name of the device; the first card that matches counts
    options: dict[str, float]  # names for --device: the GiB that the driver shows
    peak_flops: float | None = None  # dense bf16, without sparsity, from NVIDIA's data sheets
    is_sm90: bool = False  # or later
    is_sm89: bool = False
    bytes_per_s: float | None = None  # its memory's, from NVIDIA's data sheets
    link_bytes_per_s: float = 32e9  # to a GPU of the same node, one way: NVLink, or else PCIe 4


# GiB are nvidia-smi's total less what the driver reserves; the names on boxes are rounded.
_CARDS = (
    _Card("GB200", {}, 2.5e15, is_sm90=True, bytes_per_s=8e12, link_bytes_per_s=9e11),
    _Card("B200", {"b200": 178.4}, 2.25e15, is_sm90=True, bytes_per_s=8e12, link_bytes_per_s=9e11),
    _Card("GH200", {}, 989.4e12, is_sm90=True, bytes_per_s=4e12, link_bytes_per_s=4.5e11),
    _Card("H200 NVL", {}, 835.5e12, is_sm90=True, bytes_per_s=4.8e12, link_bytes_per_s=4.5e11),
    _Card(
        "H200", {"h200": 139.8}, 989.4e12, is_sm90=True, bytes_per_s=4.8e12, link_bytes_per_s=4.5e11
    ),
    _Card("H100 NVL", {}, 835.5e12, is_sm90=True, bytes_per_s=3.9e12, link_bytes_per_s=3e11),
    _Card("H100 PCIe", {}, 756.5e12, is_sm90=True, bytes_per_s=2e12, link_bytes_per_s=6.4e10),
    _Card(
        "H100",
        {"h100": 79.1, "h100-80": 79.1},
        989.4e12,
        is_sm90=True,
        bytes_per_s=3.35e12,
        link_bytes_per_s=4.5e11,
    ),
    _Card(
        "A100", {"a100-40": 39.4, "a100-80": 79.1}, 312e12, bytes_per_s=2e12, link_bytes_per_s=3e11
    ),
    _Card("L40S", {"l40s": 44.4}, 362e12, is_sm89=True, bytes_per_s=8.64e11),
    _Card("A10G", {"a10g": 22.0}, 70e12, bytes_per_s=6e11),
    _Card("A10", {"a10": 22.0}, 125e12, bytes_per_s=6e11),
    _Card("L4", {"l4": 22.0}, 121e12, is_sm89=True, bytes_per_s=3e11),
    _Card("RTX 5090", {"rtx5090": 31.4}, is_sm90=True),
    _Card("RTX 4090", {"rtx4090": 23.5}, is_sm89=True),
    _Card("RTX 3090", {"rtx3090": 23.6}),
    _Card("A6000", {"a6000": 47.4}),
    _Card("V100", {"v100-16": 15.8, "v100-32": 31.7}),
    _Card("T4", {"t4": 14.6}),
)


@dataclass(frozen=True)
class Device:
    """A device that a run uses."""

    name: str
    nbytes: int
    cublas_nbytes: int = LARGE_CUBLAS
    kept: float = 0.0  # KEPT of a processor
    is_processor: bool = False

    def usable(self, world: int) -> int:
        """Bytes that torch's allocator can use: the memory without CUDA's context and, with several
        ranks, without NCCL's buffers; of a processor's, what is alive when the kept memory fits,
        too.
        """
        return int((self.nbytes - CONTEXT - (NCCL if world > 1 else 0)) / (1 + self.kept))

    def bytes_to_fill(self, world: int) -> int:
        """How many of the usable bytes a run fills if it chooses for itself."""
        return int(FILLED * self.usable(world))


def count_and_name(text: str) -> tuple[int | None, str]:
    """("8xh200") -> (8, "h200"), ("h200") -> (None, "h200"): how many devices --device names, and
    which, or the path of a calibration. ConfigError for several kinds, and for none.
    """
    if re.search(r"[,+&]", Path(text).name):
        raise ConfigError(
            f"--device {text}: devices of several kinds. A step waits for the slowest: plan for "
            "that one, such as 8xa100-80."
        )
    several = re.fullmatch(r"(\d+)x(.+)", text)
    if several is None:
        return None, text
    if int(several[1]) < 1:
        raise ConfigError(f"--device {text}: no device at all. Want one or more: 1x{several[2]}.")
    return int(several[1]), several[2]


def device_of(text: str) -> Device:
    """The device that --device names: a100-80, h200, ..., or a size such as 24GiB.

    ConfigError for anything else.
    """
    name = text.strip().lower()
    for card in _CARDS:
        if name in card.options:
            cublas = LARGE_CUBLAS if card.is_sm90 else SMALL_CUBLAS
            return Device(name, int(card.options[name] * GIB), cublas)
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gib|gb|mib|mb)", name)
    if size and float(size[1]) > 0:
        return Device(text, int(float(size[1]) * _UNITS[size[2]]))
    names = [option for card in _CARDS for option in card.options]
    raise ConfigError(
        f"--device {text}: neither a size, such as 24GiB, nor a known name. {nearest(name, names)}"
    )


@dataclass(frozen=True)
class DataSheet:
    """NVIDIA's figures for a GPU: dense bf16 FLOP/s, bytes/s of its memory and of its links."""

    peak_flops: float
    bytes_per_s: float
    link_bytes_per_s: float


def data_sheet(name: str) -> DataSheet | None:
    """The figures of a GPU, by its name for --device or for torch. None if we do not know all of
    them, and for a MIG slice, which is only a part of a GPU.
    """
    card = _named(name)
    if card is None or card.peak_flops is None or card.bytes_per_s is None:
        return None
    return DataSheet(card.peak_flops, card.bytes_per_s, card.link_bytes_per_s)


def refuse_without_fp8(name: str) -> None:
    """ConfigError for a GPU that we know, by its name for --device or for torch, if it multiplies
    no FP8.
    """
    card = _named(name)
    if card is not None and not (card.is_sm89 or card.is_sm90):
        raise ConfigError(
            f"train.base_bits='fp8' on {name}: it multiplies no FP8, want a GPU of sm89 or later "
            "(L4, L40S, H100, H200, ...). Use base_bits 8 or 4 there."
        )


def peak_flops_of(name: str) -> float | None:
    """Dense bf16 FLOP/s of the GPU that torch calls so; None for a MIG slice or an unknown GPU."""
    card = _card(name)
    return None if card is None else card.peak_flops


def _named(name: str) -> _Card | None:
    """The card that a name for --device or torch's name means."""
    return next((card for card in _CARDS if name.lower() in card.options), None) or _card(name)


def _card(name: str) -> _Card | None:
    """The card that torch's name of a device means: "NVIDIA L40" is no L4. None for a MIG slice."""
    if "MIG" in name:
        return None
    return next((card for card in _CARDS if re.search(rf"\b{card.name}\b", name)), None)


@functools.cache
def of_processor(field: str) -> str | None:
    """What Linux tells of the first core, such as its "vendor_id" or "model name"; None where it
    tells nothing: on other processors than x86, and other systems.
    """
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    pairs = (line.partition(":") for line in lines)
    return next((text.strip() for name, _, text in pairs if name.strip() == field), None)
