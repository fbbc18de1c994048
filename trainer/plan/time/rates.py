"""How fast a device is: a table that was measured (`calibrate-device`), or made from a data sheet.

Imports no torch.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.runtime.gpus import Device, data_sheet

VERSION = 3  # of the file

# What of a data sheet's numbers long series of large operators reach. Judgement, from published
# matmul and copy benchmarks; a calibration replaces it.
_REACHED_FLOPS, _REACHED_BYTES, _REACHED_LINK = 0.70, 0.85, 0.75
_FULL_FLOPS = 40e9  # of one product, from which it fills an H100; half the rate at a fiftieth of it
# The host's seconds for a call in torch's eager mode, views too; a GPU works meanwhile. As the host
# of an H200 was calibrated (docs/log.md).
_LAUNCH_S, _PLAIN_LAUNCH_S = 6.6e-6, 8.7e-6
_BETWEEN_BYTES_PER_S = 50e9  # a 400 Gb/s adapter for each GPU, as DGX H100 has
_LATENCY_S, _BETWEEN_LATENCY_S = 20e-6, 40e-6  # of a collective
_HOST_BYTES_PER_S, _DISK_BYTES_PER_S = 25e9, 1e9
_LINKS = ("within", "between", "gathering", "scattering")  # names in Rates
_HOST_UPDATE_S = 4e-10  # of DeepSpeedCPUAdam for a number, on the cores of one GPU


@dataclass(frozen=True)
class Link:
    """What joins ranks."""

    bytes_per_s: float
    latency_s: float  # of one collective


@dataclass(frozen=True)
class Rates:
    """What one device does in a second."""

    name: str
    is_measured: bool
    # FLOP/s of products by dtype: [FLOPs of one product, FLOP/s], smaller ones first
    matmul: dict[str, list[list[float]]]
    # FLOP/s of a fused attention kernel, "forward" and "backward": [FLOPs of a head, FLOP/s]; on a
    # GPU of all heads and rows
    attention: dict[str, list[list[float]]]
    # bytes/s read and written by operators that only move memory, as of products: [bytes, bytes/s];
    # "": any other
    operators: dict[str, list[list[float]]]
    launch_s: float  # of the host, for a call while a graph is recorded
    plain_launch_s: float  # and while none is, as in a backward pass
    overlaps_launches: bool  # the host runs ahead of the device: a GPU
    update_s: float  # of the optimizer, for one number
    within: Link
    between: Link
    # of all-gathers by the bytes that arrive, of reduce-scatters by those that leave; None: as a
    # ring that reduces
    gathering: Link | None = None
    scattering: Link | None = None
    host_bytes_per_s: float = _HOST_BYTES_PER_S
    disk_bytes_per_s: float = _DISK_BYTES_PER_S
    host_update_s: float = _HOST_UPDATE_S
    # read and written where the result is memory that the process did not have; None: as any other
    fresh_bytes_per_s: float | None = None
    nbytes: int = 0  # of its memory
    machine: dict[str, Any] = field(default_factory=dict[str, Any])  # where it was measured

    def product_s(self, flops: float, *, count: int, dtype: str) -> float:
        """Seconds of `count` equal products of `flops` each, side by side."""
        curve = self.matmul.get(dtype) or self.matmul["float32"]
        return count * flops / _on(curve, flops * (count if self.overlaps_launches else 1))

    def attention_s(self, name: str, flops: float, *, count: int) -> float:
        """Seconds of a fused kernel over `count` heads and rows together."""
        curve = self.attention["backward" if name.endswith("backward") else "forward"]
        return flops / _on(curve, flops / (1 if self.overlaps_launches else count))

    def moving_s(self, name: str, nbytes: int) -> float:
        """Seconds of an operator that reads and writes so many bytes."""
        curve = self.operators.get(name.rstrip("_"), self.operators[""])
        return nbytes / _on(curve, nbytes)

    @property
    def memory_bytes_per_s(self) -> float:
        """Of large tensors."""
        return self.operators[""][-1][1]

    @property
    def device(self) -> Device:
        """The same as a device of a memory plan."""
        return Device(self.name, self.nbytes, 0)


def _on(curve: list[list[float]], size: float) -> float:
    """The rate at a size, between the sizes that were measured."""
    place = bisect_left([point[0] for point in curve], size)
    if place == 0:
        return curve[0][1]
    if place == len(curve):
        return curve[-1][1]
    (low, slow), (high, fast) = curve[place - 1], curve[place]
    part = math.log(size / low) / math.log(high / low)
    return slow ** (1 - part) * fast**part


def of_data_sheet(name: str) -> Rates | None:
    """Of a GPU that `--device` knows by its name; None where there is no data sheet of it."""
    sheet = data_sheet(name)
    if sheet is None:
        return None
    peak = _REACHED_FLOPS * sheet.peak_flops
    full = _FULL_FLOPS * sheet.peak_flops / 989.4e12
    sizes = [full * 4.0**power for power in range(-8, 3)]
    half = [[size, peak * size / (size + full / 50)] for size in sizes]
    single = [[size, rate / 2] for size, rate in half]  # TF32, as runs in fp32 are set to
    memory = _REACHED_BYTES * sheet.bytes_per_s
    return Rates(
        name=name,
        is_measured=False,
        matmul={"bfloat16": half, "float16": half, "float32": single},
        attention={way: [[1.0, 0.5 * sheet.peak_flops]] for way in ("forward", "backward")},
        operators={"": [[1.0, memory]]},
        launch_s=_LAUNCH_S,
        plain_launch_s=_PLAIN_LAUNCH_S,
        overlaps_launches=True,
        update_s=28 / memory,  # AdamW reads 16 bytes of a number and writes 12
        within=Link(_REACHED_LINK * sheet.link_bytes_per_s, _LATENCY_S),
        between=Link(_REACHED_LINK * _BETWEEN_BYTES_PER_S, _BETWEEN_LATENCY_S),
    )


# Files
# --------------------------------------------------------------------------------------------------


def plain(rates: Rates) -> dict[str, Any]:
    """The content of a calibration's file."""
    return {"version": VERSION, **asdict(rates)}


def read(path: Path) -> Rates:
    """The table of a calibration's file; ConfigError for anything else."""
    fix = "Give a file that `python -m trainer calibrate-device --out FILE` wrote."
    try:
        values = json.loads(path.read_text())
        version = values.pop("version")
        if version != VERSION:
            raise ConfigError(
                f"--device {path}: a calibration of version {version}, want {VERSION}. Calibrate "
                "again."
            )
        links = {name: Link(**values[name]) for name in _LINKS if values[name] is not None}
        return Rates(**{**values, **links})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--device {path}: it is no calibration of a device "
            f"({type(error).__name__}: {error}). {fix}"
        ) from None
