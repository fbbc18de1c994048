"""What a job would refuse, refused before it is sent: in the words of the training, as far as
nothing of torch is needed to see it. And where the relative paths of a dictionary start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jobs.code.repository import MAX_WEIGHTS, WEIGHTS
from trainer.config.deepspeed_config import offload_device
from trainer.config.flags import ENTITY_ALONE, unknown_tracker
from trainer.config.mistakes import (
    OFFLOAD_OF_NOTHING,
    OPTIMIZER_ON_NVME,
    doubts_of,
    foreign_best,
    late_stop,
    long_warmup,
    no_base,
    takes_nothing_away,
)
from trainer.config.userfile import START_FOLDER, may_be_hub_id
from trainer.devices import count_and_name, device_of
from trainer.errors import ConfigError
from trainer.metrics import own
from trainer.plan.time.rates import read as read_calibration

if TYPE_CHECKING:
    from jobs.config import JobConfig
    from jobs.record.paths import RunFolder
    from trainer.config.schema import Experiment

# Keys whose value may be a path from the folder in which a command is typed. (data.files and the
# like are always below --data_path.)
FOLDERS = ("base", "tokenizer", "init_from", "data.dataset", "data.files", "data.valid_sets")
FILES = ("deepspeed", "data.chat_template")

log = logging.getLogger(__name__)


def of_flags(flags: Mapping[str, str], *, world: int | None, shares_disk: bool) -> Iterator[str]:
    """What is wrong with the flags of a training.

    world: its processes; None where only the node knows. shares_disk: the job's node sees the
    folders of this machine.
    """
    for name, text in flags.items():
        if "\0" in text:
            yield f"--{name}: {text!r} holds a NUL character. Remove it."
    data = Path(flags.get("data_path", ""))
    if shares_disk and not data.exists():
        yield (
            f"--data_path {data}: there is no such folder. Give one that the job's node sees too."
        )
    elif shares_disk and data.is_file():
        yield (
            f"--data_path {data}: it is a file, and its folder is wanted, which holds every split: "
            f"{data.parent}."
        )
    yield from unknown_tracker(flags.get("trackers"))
    if flags.get("wandb_entity_name") and not flags.get("wandb_project_name"):
        yield ENTITY_ALONE
    if "device" in flags:
        yield from _of_device(flags["device"], world=world, shares_disk=shares_disk)


def _of_device(text: str, *, world: int | None, shares_disk: bool) -> Iterator[str]:
    """The problem of a --device that names none, or another number than the job has processes. The
    calibration of another machine is found out there.
    """
    try:
        count, name = count_and_name(text)
        if not name.endswith(".json"):
            device_of(name)
        elif shares_disk:
            read_calibration(Path(name))
    except ConfigError as error:
        yield str(error)
        return
    if None not in (count, world) and count != world:
        yield (
            f"--device {text}: {count} devices, and the job has {world} process(es), one for each. "
            f"Write --device {name}, or change gpus and nodes of the job dictionary."
        )


def of_experiment(
    cfg: Experiment,
    *,
    ds: dict[str, Any] | None,
    job: JobConfig,
    folder: RunFolder,
    flags: Mapping[str, str],
    shares_disk: bool,
) -> list[str]:
    """Why a training would refuse this experiment before its first step.

    ds: its DeepSpeed dictionary; None where only the node knows it. flags: of the training; with
    `steps` a long warm-up is a warning, as it is here. shares_disk: as in `of_flags`.
    """
    problems = [*foreign_best(cfg), *own.problems(cfg.own_metrics, folder.path)]
    if takes_nothing_away(vars(cfg.train)):
        problems.append(OFFLOAD_OF_NOTHING)
    until = int(flags.get("until", "0"))
    if cfg.train.steps and until > cfg.train.steps:
        problems.append(late_stop(until, cfg.train.steps))
    for doubt in doubts_of(cfg):
        if "strict" in flags:
            problems.append(f"--strict: {doubt}")
        else:
            log.warning("%s", doubt)
    has_begun = next(folder.path.glob("checkpoints/*/"), None) is not None
    if not has_begun:  # runs of older versions go on
        long = list(long_warmup(cfg))
        if "steps" in flags:
            for problem in long:
                log.warning("%s", problem)
        else:
            problems += long
    if job.survive and ds is not None and offload_device(ds, "offload_optimizer") == "nvme":
        problems.append(OPTIMIZER_ON_NVME)
    if shares_disk:
        problems += _absent_folders(cfg, flags.get("data_path"))
    return problems


def _absent_folders(cfg: Experiment, data_path: str | None) -> Iterator[str]:
    """The problems of names that are neither folders here nor names on the Hub."""
    if isinstance(cfg.base, str) and not cfg.base.startswith("package:"):
        source = cfg.base.partition("#sha256=")[0]
        if not os.path.isdir(source) and not may_be_hub_id(source):
            yield no_base(source)
    name = cfg.tokenizer
    if isinstance(name, str) and not name.startswith("package:") and not may_be_hub_id(name):
        places = [Path(name), *([Path(data_path, name)] if data_path else [])]
        if not any(os.path.isdir(place) for place in places):
            yield (
                f"tokenizer={name!r}: there is no such folder, neither here nor below --data_path "
                f"({data_path or 'not given'}). Give the folder that holds tokenizer.json, or a "
                "Hub id."
            )
    init_from = getattr(cfg, "init_from", None)
    if init_from and not os.path.isdir(init_from):
        yield (
            f"init_from={init_from!r}: there is no such folder here. Give a folder of "
            "weights, such as a final/ folder."
        )


# Relative paths
# --------------------------------------------------------------------------------------------------


def start_folder(
    experiments: Sequence[Mapping[str, Any]], project: Path, *, shares_disk: bool
) -> dict[str, str]:
    """The variable that tells a training where the relative paths of its dictionary start: in the
    folder in which this command was typed. {} where no dictionary has such a path, or where the
    snapshot of the code has it.

    ConfigError for a folder that the job's node cannot read: one that is not in the snapshot, while
    the node does not share this disk.
    """
    here = Path.cwd()
    is_project = here == project
    keys = FOLDERS if is_project else (*FOLDERS, *FILES)
    places = {name for values in experiments for name in _relative(values, keys)}
    # a folder of the project may hold weights that its snapshot leaves out
    lost = {
        name
        for name in places
        for path in (here / name).glob("*")
        if path.name.lower().endswith(WEIGHTS) and path.stat().st_size > MAX_WEIGHTS
    }
    unreachable = sorted(lost if is_project else places)
    if unreachable and not shares_disk:
        raise ConfigError(
            f"{', '.join(unreachable)}: relative to {here}, which the job's node may not see, and "
            "the code snapshot holds no weights. Give absolute paths, as that node sees them."
        )
    return {START_FOLDER: str(here)} if unreachable else {}


def _relative(values: Mapping[str, Any], keys: Collection[str]) -> Iterator[str]:
    """The relative paths under `keys` that exist from here."""
    for key in keys:
        value: Any = values
        for part in key.split("."):
            value = cast("dict[str, Any]", value).get(part) if isinstance(value, dict) else None
        names = cast("dict[str, Any]", value).values() if isinstance(value, dict) else [value]
        for name in names:
            if not isinstance(name, str) or not name or Path(name).is_absolute():
                continue
            path = name.partition("#sha256=")[0]
            if os.path.exists(path) and (key != "deepspeed" or "/" in path or "." in path):
                yield path
    of_data = [key for key in keys if key.startswith("data.")]
    data = values.get("data")
    mix = cast("dict[str, Any]", data).get("mix") if isinstance(data, dict) else None
    for block in cast("dict[str, Any]", mix).values() if isinstance(mix, dict) else ():
        if isinstance(block, dict):
            yield from _relative({"data": block}, of_data)
