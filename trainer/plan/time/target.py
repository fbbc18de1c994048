"""The devices that a run is planned for (`--device`): which, how many, and how fast."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trainer.devices import Device, count_and_name
from trainer.errors import ConfigError
from trainer.plan.time.rates import Rates, of_data_sheet, read
from trainer.plan.time.step_time import Cluster
from trainer.runtime.gpus import device_to_plan_for


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
    count, name = (None, None) if text is None else count_and_name(text)
    if count is not None:
        if world is not None and world != count * nodes:
            raise ConfigError(
                f"--device {text} with --nodes {nodes} are {count * nodes} devices, and --world is "
                f"{world}. Leave one of them out."
            )
        world = count * nodes
    world = world or int(os.environ.get("WORLD_SIZE", "1"))
    if world < 1 or world % nodes:
        raise ConfigError(
            f"--nodes {nodes}: {world} device(s) cannot be spread evenly over so many machines. "
            "Give --device 8xNAME, or a --world that is a multiple of --nodes."
        )
    cluster = Cluster(world, nodes)
    if name is not None and name.endswith(".json"):
        rates = read(Path(name))
        return Target(rates.device, rates, cluster)
    device = device_to_plan_for(name)
    return Target(device, None if device is None else of_data_sheet(device.name), cluster)
