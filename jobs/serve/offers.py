"""The models that are offered, and how a request becomes an experiment: the service's own file.

A request names a model and fills four places of its dictionary: the rows, how long (epochs), the
batch and the learning rate (a factor), besides the seed. It can state nothing else: no key, no
code, no path.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from jobs.config import JobConfig
from jobs.serve.rows import KINDS
from trainer import tasks
from trainer.config import userfile
from trainer.config.schema import Fraction, Positive, Strict, validate
from trainer.errors import ConfigError

Values = dict[str, Any]
Auto = Literal["auto"]
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
MEBIBYTE = 1 << 20
# Read by its path: other packages may have a module of this name.
BUILT_IN = Path(__file__).resolve().parents[2] / "service.py"


class Offer(Strict):
    """One model that can be tuned."""

    experiment: Values  # its dictionary; rows, steps, batch, learning rate and seed are filled in
    job: Values = Field(default_factory=dict)  # where it runs: a job dictionary, as job_configs.py
    epochs: Positive = 3  # what "auto" means
    evaluations: Positive = 4  # of a job, each with a checkpoint
    held_out: Fraction = 0.1  # of the rows, for validation, where no file is given for it
    max_steps: Positive = 1_000_000


class ServiceConfig(Strict):
    """The whole file. Bytes, unless a name says otherwise."""

    models: dict[ModelName, Offer]
    organization: ModelName = "lathe"  # stands in the names of fine-tuned models
    hosts: list[str] = Field(default_factory=list)  # names under which it is reached: "gpu.org:443"
    origins: list[str] = Field(default_factory=list)  # of pages elsewhere that may call it
    roots: list[str] = Field(default_factory=list)  # folders that dictionaries may name
    max_file: Positive = 512 * MEBIBYTE
    max_body: Positive = MEBIBYTE  # of a JSON document
    reserve: Annotated[int, Field(ge=0)] = 1024 * MEBIBYTE  # of the disk, never filled by uploads
    requests_per_minute: Positive = 1200  # of one token, or one address without
    loaded_models: Positive = 2  # at once, of those that answer
    body_s: Annotated[float, Field(gt=0)] = 30.0  # a JSON document must be here by then
    silence_s: Annotated[float, Field(gt=0)] = 30.0  # an upload that sends nothing for so long ends


@dataclass(frozen=True)
class Asked:
    """What a request fills in. None and "auto": as the offer says."""

    num_rows: int
    kind: str  # of the rows, a key of rows.KINDS
    seed: int
    label: str
    epochs: int | Auto | None = None
    batch: int | Auto | None = None
    lr_factor: float | Auto | None = None


@dataclass(frozen=True)
class Filled:
    """The experiment of a request, and the numbers that stand in it."""

    experiment: Values
    epochs: int
    batch: int
    lr_factor: float


def read(file: Path | None) -> ServiceConfig:
    """The checked SERVICE of a Python file, or of service.py. ConfigError names every mistake."""
    chosen = BUILT_IN if file is None else file
    values = userfile.execute(chosen, flag="--service_config", defines="SERVICE").get("SERVICE")
    source = f"{file or 'service.py'}: SERVICE"
    if not isinstance(values, dict):
        raise ConfigError(f"{source} is {userfile.kind(values)}. Want a dictionary.")
    config = validate(ServiceConfig, cast("Values", values), source=source)
    mistakes: list[str] = []
    for name, offer in config.models.items():
        try:
            validate(JobConfig, offer.job, source=f"{source}: job of {name!r}")
            for kind in kinds_of(offer):
                trial = Asked(num_rows=100, kind=kind, seed=0, label="trial")
                tasks.parse(fill(offer, trial).experiment, source=f"{source}: model {name!r}")
        except ConfigError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return config


def kinds_of(offer: Offer) -> list[str]:
    """The kinds of rows that a model learns from. ConfigError for a task that has none."""
    task = offer.experiment.get("task")
    kinds = [name for name, kind in KINDS.items() if task in kind.data]
    if not kinds:
        known = sorted({name for kind in KINDS.values() for name in kind.data})
        raise ConfigError(f"task {task!r} takes no uploaded rows. Use one of {', '.join(known)}.")
    return kinds


def fill(offer: Offer, asked: Asked) -> Filled:
    """The experiment that a request asks for. ConfigError for numbers that cannot be met."""
    values = copy.deepcopy(offer.experiment)
    train: Values = dict(values["train"])
    world = _world(offer)
    epochs = offer.epochs if asked.epochs in (None, "auto") else asked.epochs
    batch = _auto_batch(train, asked, world) if asked.batch in (None, "auto") else asked.batch
    factor = 1.0 if asked.lr_factor in (None, "auto") else asked.lr_factor
    if batch % world:
        raise ConfigError(
            f"batch_size={batch}: it runs on {world} devices at once. "
            f"Use a multiple of {world}, such as {math.ceil(batch / world) * world}."
        )
    steps = max(1, math.ceil(epochs * asked.num_rows / batch))
    if steps > offer.max_steps:
        raise ConfigError(
            f"{epochs} epochs of {asked.num_rows} rows, {batch} at a time, are {steps} steps; "
            f"at most {offer.max_steps} are allowed. Use fewer epochs or a larger batch_size."
        )
    pace = math.ceil(steps / offer.evaluations)
    train |= {"steps": steps, "global_batch": batch, "seed": asked.seed}
    train |= {"eval_every": pace, "save_every": pace}
    if train.get("micro_batch") != "auto":
        train["micro_batch"] = _micro_batch(batch // world, train["micro_batch"])
    values["train"] = train
    values["optim"] = {**values["optim"], "lr": values["optim"]["lr"] * factor}
    values["data"] = {**values["data"], **KINDS[asked.kind].data[values["task"]]}
    values["label"] = asked.label
    return Filled(values, epochs, batch, factor)


def num_held_out(offer: Offer, num_rows: int) -> int:
    """How many rows of a file are kept for validation where no file is given for it: at least one.
    The only row of a file is both trained on and validated with.
    """
    return min(max(round(num_rows * offer.held_out), 1), max(num_rows - 1, 0))


def _auto_batch(train: Mapping[str, Any], asked: Asked, world: int) -> int:
    """The offer's batch, or less where there are fewer rows."""
    most = min(int(train["global_batch"]), max(asked.num_rows, 1))
    return max(most // world, 1) * world


def _micro_batch(rows_of_a_device: int, most: int) -> int:
    """The largest micro-batch, at most the offer's, that divides what a device gets of a batch."""
    return next(
        size for size in range(min(most, rows_of_a_device), 0, -1) if rows_of_a_device % size == 0
    )


def _world(offer: Offer) -> int:
    job = JobConfig.model_validate(offer.job)
    return max(job.gpus, 1) * job.nodes
