"""How fast a device is: a table, measured by `calibrate-device` or made from a data sheet.

Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.devices import KEPT, Device, data_sheet
from trainer.errors import ConfigError
from trainer.switches import keeps_memory

VERSION = 3  # of the file format

# The share of a data sheet's peak that long series of large operators reach. Estimated from
# published matmul and copy benchmarks; a calibration replaces it.
_REACHED_FLOPS, _REACHED_BYTES, _REACHED_LINK = 0.70, 0.85, 0.75
_FULL_FLOPS = 40e9  # one product of this size fills an H100; at a fiftieth the rate is half
# The host's seconds for one call in torch's eager mode, views included; a GPU works meanwhile.
# Calibrated on the host of an H200 (docs/log.md).
_LAUNCH_S, _PLAIN_LAUNCH_S = 6.6e-6, 8.7e-6
_BETWEEN_BYTES_PER_S = 50e9  # a 400 Gb/s adapter for each GPU, as DGX H100 has
_LATENCY_S, _BETWEEN_LATENCY_S = 20e-6, 40e-6  # of a collective
_HOST_BYTES_PER_S, _DISK_BYTES_PER_S = 25e9, 1e9
_LINKS = ("within", "between", "gathering", "scattering")  # names in Rates
_HOST_UPDATE_S = 4e-10  # DeepSpeedCPUAdam, for one number, on the cores that belong to one GPU


@dataclass(frozen=True)
class Link:
    """A connection between ranks."""

    bytes_per_s: float
    latency_s: float  # what one collective takes besides its bytes


@dataclass(frozen=True)
class Rates:
    """How fast one device is."""

    name: str
    is_measured: bool
    # FLOP/s of matrix products, by dtype: [FLOPs of one product, FLOP/s], smaller ones first
    matmul: dict[str, list[list[float]]]
    # FLOP/s of a fused attention kernel, "forward" and "backward": [FLOPs of one head, FLOP/s]; on
    # a GPU [FLOPs of all heads and rows, FLOP/s]
    attention: dict[str, list[list[float]]]
    # bytes/s that operators which only move memory read and write, by name: [bytes, bytes/s];
    # "": every other operator
    operators: dict[str, list[list[float]]]
    launch_s: float  # the host's time for one call while autograd records a graph
    plain_launch_s: float  # the same without a graph, as in a backward pass
    overlaps_launches: bool  # the host runs ahead of the device: a GPU
    update_s: float  # the optimizer's time for one number
    within: Link
    between: Link
    # all-gathers, counted by the bytes that a rank receives, and reduce-scatters, by the bytes that
    # it sends; None: as fast as `within` or `between`
    gathering: Link | None = None
    scattering: Link | None = None
    host_bytes_per_s: float = _HOST_BYTES_PER_S
    disk_bytes_per_s: float = _DISK_BYTES_PER_S
    host_update_s: float = _HOST_UPDATE_S
    # bytes/s when the result goes to memory that is new to the process; None: as for other memory
    fresh_bytes_per_s: float | None = None
    nbytes: int = 0  # the size of its memory
    machine: dict[str, Any] = field(default_factory=dict[str, Any])  # where it was measured

    def product_s(self, flops: float, *, count: int, dtype: str) -> float:
        """Seconds of `count` equal products at the same time, of `flops` each."""
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
        """The rate for large tensors."""
        return self.operators[""][-1][1]

    @property
    def device(self) -> Device:
        """This device as a memory plan needs it."""
        # a GPU computes while its host launches; a processor is its own host
        is_processor = not self.overlaps_launches
        is_kept = is_processor and keeps_memory(os.environ)
        more = {"is_processor": is_processor}
        return Device(self.name, self.nbytes, 0, kept=KEPT if is_kept else 0.0, **more)


def _on(curve: list[list[float]], size: float) -> float:
    """The rate at a size, interpolated between the measured sizes."""
    place = bisect_left([point[0] for point in curve], size)
    if place == 0:
        return curve[0][1]
    if place == len(curve):
        return curve[-1][1]
    (low, slow), (high, fast) = curve[place - 1], curve[place]
    part = math.log(size / low) / math.log(high / low)
    return slow ** (1 - part) * fast**part


def of_data_sheet(name: str) -> Rates | None:
    """The rates of a GPU that `--device` names; None if we have no data sheet of it."""
    sheet = data_sheet(name)
    if sheet is None:
        return None
    peak = _REACHED_FLOPS * sheet.peak_flops
    full = _FULL_FLOPS * sheet.peak_flops / 989.4e12
    sizes = [full * 4.0**power for power in range(-8, 3)]
    half = [[size, peak * size / (size + full / 50)] for size in sizes]
    single = [[size, rate / 2] for size, rate in half]  # TF32, which runs in fp32 use
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
        update_s=28 / memory,  # AdamW reads 16 bytes and writes 12 for each number
        within=Link(_REACHED_LINK * sheet.link_bytes_per_s, _LATENCY_S),
        between=Link(_REACHED_LINK * _BETWEEN_BYTES_PER_S, _BETWEEN_LATENCY_S),
    )


# Files
# --------------------------------------------------------------------------------------------------


def plain(rates: Rates) -> dict[str, Any]:
    """The rates as a calibration file stores them."""
    return {"version": VERSION, **asdict(rates)}


def read(path: Path) -> Rates:
    """The rates in a calibration file. ConfigError if it is no such file."""
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
