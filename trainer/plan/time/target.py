"""The devices that a run is planned for (`--device`): which, how many, and how fast."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigError
from trainer.plan.time.rates import Rates, of_data_sheet, read
from trainer.plan.time.step_time import Cluster
from trainer.runtime.gpus import Device, device_to_plan_for


@dataclass(frozen=True)
class Target:
    """Devices that train together."""

    device: Device | None
    rates: Rates | None  # None: not known
    cluster: Cluster

    @property
    def no_time(self) -> str:
        """The reason why time cannot be predicted, as a sentence."""
        name = "no device is known" if self.device is None else self.device.name
        return (
            f"time is not planned: how fast the device is ({name}) is not known. Give --device "
            "h100, h200, a100-80, ..., or the file of `python -m trainer calibrate-device`."
        )


def target_of(text: str | None, *, world: int | None, nodes: int = 1) -> Target:
    """The devices that `text` names: h200, 8xh100-80, 24GiB, or a calibration file. None names the
    GPU of this process. ConfigError for anything else.

    world: the number of devices if `text` does not say it; None: as many as the launcher started,
    or one.
    """
    if re.search(r"[,+&]", Path(text or "").name):
        raise ConfigError(
            f"--device {text}: devices of several kinds. A step waits for the slowest: plan for "
            "that one, such as 8xa100-80."
        )
    several = re.fullmatch(r"(\d+)x(.+)", text or "")
    if several:
        count = int(several[1]) * nodes
        if count < 1:
            raise ConfigError(
                f"--device {text}: no device at all. Want one or more: 1x{several[2]}."
            )
        if world is not None and world != count:
            raise ConfigError(
                f"--device {text} with --nodes {nodes} are {count} devices, and --world is "
                f"{world}. Leave one of them out."
            )
        world, text = count, several[2]
    world = world or int(os.environ.get("WORLD_SIZE", "1"))
    if world < 1 or world % nodes:
        raise ConfigError(
            f"--nodes {nodes}: {world} device(s) cannot be spread evenly over so many machines. "
            "Give --device 8xNAME, or a --world that is a multiple of --nodes."
        )
    cluster = Cluster(world, nodes)
    if text is not None and text.endswith(".json"):
        rates = read(Path(text))
        return Target(rates.device, rates, cluster)
    device = device_to_plan_for(text)
    return Target(device, None if device is None else of_data_sheet(device.name), cluster)
