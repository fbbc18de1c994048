"""Offers: the models that can be tuned (service.py), and the experiment made of a request.

A request names a model and sets five values of its dictionary: the rows, the number of epochs, the
batch, a factor of the learning rate, and the seed. It cannot set any other key, code or path.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from jobs.config import JobConfig
from jobs.serve.rows.kinds import KINDS
from jobs.serve.steps.experiments import Driven, check_driven
from jobs.serve.webhooks.endpoints import Webhook, WebhookList
from trainer import tasks
from trainer.config import userfile
from trainer.config.block import Fraction as Share
from trainer.config.block import Positive, Strict, validate
from trainer.data.formats.held_out import PLACES
from trainer.devices import device_of
from trainer.errors import ConfigError, DataError
from trainer.files.atomic import read_json

Values = dict[str, Any]
Auto = Literal["auto"]
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Method = Literal["supervised", "dpo"]
METHODS: tuple[Method, ...] = ("supervised", "dpo")
MEBIBYTE = 1 << 20
DPO_SLOWER = 10  # than the learning rate of the offer
BETA = 0.1  # of a preference task that names none
TRAIN, VALID = "train.jsonl", "valid.jsonl"  # the files of a job's rows
# Read by its path: other packages may have a module of this name.
BUILT_IN = Path(__file__).resolve().parents[2] / "service.py"


class Offer(Strict):
    """One model that can be tuned."""

    experiment: Values  # its dictionary; rows, steps, batch, learning rate and seed are filled in
    job: Values = Field(default_factory=dict)  # where it runs: a job dictionary, as job_configs.py
    epochs: Positive = 3  # the value of "auto"
    evaluations: Positive = 4  # of a job, each with a checkpoint
    held_out: Share = 0.1  # of the rows, for validation when the request names no validation file
    # score the test split of each job at its end: data.files.test of the experiment, a whole path
    test: bool = False
    max_steps: Positive = 1_000_000
    # what is other when a causal_lm learns from preferences (method dpo): blocks that are laid over
    # its dictionary, such as {"optim": {"lr": 1e-6}, "preference": {"beta": 0.2}}; None: it never
    # does. Without a rate of its own a tenth of the offer's (Tulu 3: 5e-6 and 5e-7).
    dpo: Values | None = Field(default_factory=dict)
    # whether clients of the Tinker SDK may drive runs of it step by step, and how
    driven: bool | Driven = False
    # one device of those it runs on, for the plan before a start: h200, 24GiB, or the file of
    # `lathe calibrate-device`
    device: str | None = None


class ServiceConfig(Strict):
    """All settings of the service. Sizes are in bytes."""

    models: dict[ModelName, Offer]
    organization: ModelName = "lathe"  # part of the names of fine-tuned models
    hosts: list[str] = Field(default_factory=list)  # names in clients' URLs: "gpu.org:443"
    origins: list[str] = Field(default_factory=list)  # of other servers' pages that may call it
    roots: list[str] = Field(default_factory=list)  # folders that dictionaries may name
    max_file: Positive = 512 * MEBIBYTE
    max_body: Positive = 4 * MEBIBYTE  # of a JSON document: 2,048 texts of 2 kB
    max_operation: Positive = 32 * MEBIBYTE  # of the rows of one operation of a driven run
    reserve: Annotated[int, Field(ge=0)] = 1024 * MEBIBYTE  # of the disk, never filled by uploads
    requests_per_minute: Positive = 1200  # of one token, or one address without
    operations_per_minute: Positive = 60_000  # of /api/v1/, of one token or one address without
    operations_at_once: Positive = 128  # of them in progress, of one token
    requests_at_once: Positive = 32  # in progress, of one token, or one address without
    streams_at_once: Positive = 64  # event streams of open pages, of one token
    answers_at_once: Positive = 16  # questions to models in progress, of one token
    all_at_once: Positive = 512  # requests and streams in progress, of everybody
    idle_connections: Positive = 256  # without a request; above that the oldest ones are closed
    head_s: Annotated[float, Field(gt=0)] = 10.0  # within which the head of a request must arrive
    loaded_models: Positive = 2  # at the same time, for answers to people
    sampled_models: Annotated[int, Field(ge=0)] = 1  # beside them, for samples of driven runs
    batch_models: Annotated[int, Field(ge=0)] = 1  # beside them, for batches; 0: no batches
    batch_lines: Positive = 50_000  # requests of a batch
    batch_bytes: Positive = 200 * MEBIBYTE  # of its file
    batches_at_once: Positive = 16  # that have not ended, of one token
    webhooks: WebhookList = Field(default_factory=list[Webhook])  # that are told what ended
    body_s: Annotated[float, Field(gt=0)] = 30.0  # within which a JSON document must arrive
    silence_s: Annotated[float, Field(gt=0)] = (
        30.0  # an upload that sends nothing for so long is aborted
    )


@dataclass(frozen=True)
class TuningRequest:
    """The values that a request sets. None and "auto": the value of the offer."""

    num_rows: int
    kind: str  # of the rows, a key of KINDS (rows/kinds.py)
    seed: int
    label: str
    epochs: int | Auto | None = None
    batch: int | Auto | None = None
    lr_factor: float | Auto | None = None
    beta: float | Auto | None = None  # of a method that learns from preferences


@dataclass(frozen=True)
class FilledOffer:
    """The experiment of a request, and the numbers that were filled in. beta: of preferences."""

    experiment: Values
    epochs: int
    steps: int  # that the epochs are
    batch: int
    lr_factor: float
    beta: float | None = None


def read(file: Path | None) -> ServiceConfig:
    """The checked SERVICE of a Python file (None: service.py). ConfigError names every mistake."""
    path = BUILT_IN if file is None else file
    values = userfile.execute(path, flag="--service_config", defines="SERVICE").get("SERVICE")
    source = f"{file or 'service.py'}: SERVICE"
    if not isinstance(values, dict):
        raise ConfigError(f"{source} is {userfile.kind(values)}. Want a dictionary.")
    config = validate(ServiceConfig, cast("Values", values), source=source)
    mistakes: list[str] = []
    for name, offer in config.models.items():
        try:
            offer = config.models[name] = _with_share(offer)
            _check_test(offer)
            validate(JobConfig, offer.job, source=f"{source}: job of {name!r}")
            if offer.device is not None and not offer.device.endswith(".json"):
                device_of(offer.device)
            for kind in kinds_of(offer):
                _try(offer, kind, source=f"{source}: model {name!r}")
            if offer.driven:
                check_driven(config, name, offer, source=f"{source}: driven of model {name!r}")
            if offer.dpo:  # without a block of its own, a request is told why it is refused
                offer_for(offer, name, "dpo")
        except ConfigError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return config


def _try(offer: Offer, kind: str, *, source: str) -> None:
    """ConfigError where the experiment of a request would not be one."""
    trial = TuningRequest(num_rows=100, kind=kind, seed=0, label="trial")
    tasks.parse(fill(offer, trial).experiment, source=source)


def offer_for(offer: Offer, name: str, method: Method) -> Offer:
    """The offer of a model as a method trains it. ConfigError where it does not take the method."""
    learns = "dpo" if offer.experiment.get("task") == "preference" else "supervised"
    if method == learns:
        return offer
    if method == "supervised":
        raise ConfigError(f"method: {name} learns from preferences alone, want type 'dpo'.")
    if offer.dpo is None or offer.experiment.get("task") != "causal_lm":
        models = "a language model whose offer takes it"
        raise ConfigError(f"method: {name} does not take 'dpo', want {models}, or 'supervised'.")
    preferring = _of_preferences(offer)
    try:
        _try(preferring, "preference", source=f"dpo of model {name!r}")
    except ConfigError as error:
        raise ConfigError(f"method: {name} does not take 'dpo', for {error}") from None
    return preferring


def _of_preferences(offer: Offer) -> Offer:
    """The offer whose experiment is that of task `preference` with the same base and adapters.

    Both answers of a row are in one forward: a micro-batch has half as many rows.
    """
    before, own = offer.experiment, offer.dpo or {}
    values = copy.deepcopy({key: one for key, one in before.items() if key != "task"})
    data: Values = values["data"]
    data = {key: data[key] for key in ("max_tokens", "chat_template") if key in data}
    values |= {"task": "preference", "data": {"source": "chat", **data}}
    values["optim"]["lr"] /= DPO_SLOWER
    if isinstance(values["train"].get("micro_batch"), int):
        values["train"]["micro_batch"] = max(values["train"]["micro_batch"] // 2, 1)
    for key, one in own.items():
        block = values.get(key)
        values[key] = {**cast("Values", block), **one} if isinstance(block, dict) else one
    return offer.model_copy(update={"experiment": values, "test": False})


def _check_test(offer: Offer) -> None:
    """ConfigError where the test split of an offer has no file, for jobs bring none."""
    data: Any = offer.experiment.get("data")
    files: Any = cast("Values", data).get("files") if isinstance(data, dict) else None
    test: Any = cast("Values", files).get("test") if isinstance(files, dict) else None
    if offer.test and not Path(str(test or "")).is_absolute():
        raise ConfigError(
            f"test=True with data.files.test={test!r}: want the whole path of a file of test rows, "
            "for requests bring none. Name one, or leave test out."
        )


def kinds_of(offer: Offer) -> list[str]:
    """The kinds of rows that a model can be tuned on. ConfigError for a task without any."""
    task = offer.experiment.get("task")
    kinds = [name for name, kind in KINDS.items() if task in kind.data]
    if task == "preference":
        loss: Any = offer.experiment.get("preference", {}).get("loss", "dpo")
        if loss != "dpo":
            raise ConfigError(f'preference.loss={loss!r}: want "dpo", for clients name it so.')
    if not kinds:
        tasks_with_rows = sorted({name for kind in KINDS.values() for name in kind.data})
        raise ConfigError(
            f"task {task!r} takes no uploaded rows. Use one of {', '.join(tasks_with_rows)}."
        )
    return kinds


def _with_share(offer: Offer) -> Offer:
    """The offer that holds out what `data.valid_share` of its dictionary says. The key leaves the
    dictionary: the service writes both splits. ConfigError when held_out says something else.
    """
    data = offer.experiment.get("data")
    share: Any = cast("Values", data).get("valid_share") if isinstance(data, dict) else None
    if not share:
        return offer
    if "held_out" in offer.model_fields_set and offer.held_out != share:
        raise ConfigError(
            f"data.valid_share={share} and held_out={offer.held_out}: want one share. Take one out."
        )
    values = copy.deepcopy(offer.experiment)
    del values["data"]["valid_share"]
    return validate(
        Offer,
        {**offer.model_dump(), "experiment": values, "held_out": float(share)},
        source="data.valid_share",
    )


def fill(offer: Offer, request: TuningRequest) -> FilledOffer:
    """The experiment of a request. ConfigError for numbers that do not fit the offer."""
    values = copy.deepcopy(offer.experiment)
    train: Values = dict(values["train"])
    world = world_of(offer)
    epochs = offer.epochs if request.epochs in (None, "auto") else request.epochs
    batch = request.batch
    if batch in (None, "auto"):  # the offer's batch, or a smaller one when there are fewer rows
        limit = min(int(train["global_batch"]), max(request.num_rows, 1))
        batch = max(limit // world, 1) * world
    factor = 1.0 if request.lr_factor in (None, "auto") else request.lr_factor
    if batch % world:
        raise ConfigError(
            f"batch_size={batch}: it runs on {world} devices at once. "
            f"Use a multiple of {world}, such as {math.ceil(batch / world) * world}."
        )
    if batch > max(request.num_rows, world):
        raise ConfigError(
            f"batch_size={batch} is more than the {request.num_rows} rows that are trained on. "
            f"Use at most {max(request.num_rows // world, 1) * world}."
        )
    num_rows = _rows_of_epoch(values, request.num_rows)
    steps = max(1, math.ceil(epochs * num_rows / batch))
    if steps > offer.max_steps:
        raise ConfigError(
            f"{epochs} epochs of {request.num_rows} rows, {batch} at a time, are {steps} steps; "
            f"at most {offer.max_steps} are allowed. Use fewer epochs or a larger batch_size."
        )
    pace = math.ceil(steps / offer.evaluations)
    train.pop("steps", None)  # which follow from the epochs
    has_mix = bool(values["data"].get("mix"))  # of which the epochs are those of the uploaded rows
    train |= {"steps": steps} if has_mix else {"epochs": epochs}
    train |= {"global_batch": batch, "seed": request.seed}
    train |= {"eval_every": pace, "save_every": pace}
    if train.get("micro_batch") != "auto":
        # the largest one, at most the offer's, that divides a device's share of the batch
        rows_of_a_device = batch // world
        sizes = range(min(train["micro_batch"], rows_of_a_device), 0, -1)
        train["micro_batch"] = next(size for size in sizes if rows_of_a_device % size == 0)
    values["train"] = train
    values["optim"] = {**values["optim"], "lr": values["optim"]["lr"] * factor}
    own_files, of_kind = values["data"].get("files"), KINDS[request.kind].data[values["task"]]
    values["data"] = {**values["data"], **of_kind}
    if has_mix:
        values["data"]["files"] = {**(own_files or {}), "valid": VALID}
    elif own_files and "files" in of_kind:  # the file of a test split is the offer's
        values["data"]["files"] = {**own_files, **of_kind["files"]}
    values["label"] = request.label
    beta = _with_beta(values, request.beta) if values["task"] == "preference" else None
    return FilledOffer(values, epochs, steps, batch, factor, beta)


def _with_beta(values: Values, beta: float | Auto | None) -> float:
    """The beta of an experiment, into which that of a request is put."""
    block: Values = {"loss": "dpo", **values.get("preference", {})}
    if beta not in (None, "auto"):
        block["beta"] = beta
    values["preference"] = block
    return float(block.get("beta", BETA))


def _rows_of_epoch(values: Values, num_rows: int) -> Fraction:
    """The rows of a run in which each of the uploaded rows is trained on once: of a mix, the rows
    of other sources as well. ConfigError for a mix that does not say how many.
    """
    mix, mixing = values["data"].get("mix"), values["data"].get("mixing", {})
    if not mix:
        return Fraction(num_rows)
    source: Any = mix.get(TRAIN)
    weight: Any = cast("Values", source).get("weight") if isinstance(source, dict) else source
    if not weight or mixing.get("changes") or mixing.get("ends") == "stop":
        raise ConfigError(
            f"data.mix of an offer: the uploaded rows are its source {TRAIN!r}, with a weight "
            "above 0 from the first step to the last: the epochs of a job are those of its rows. "
            'Give it one, and leave mixing.changes and ends="stop" out.'
        )
    return num_rows / Fraction(str(weight))


def after(offer: Offer, before: Values, run: Path, model: str) -> Offer:
    """The offer whose base is a model that an earlier job trained, by the digest of its weights.

    before: the experiment of that job. run: its folder. model: which of its models, "final" or
    "step-N"; a step that is not exported yet has no digest.
    """
    base: Values = {"experiment": before}
    if model != "final":
        base["model"] = model
    files = (read_json(run / model / "lathe.json") or {}).get("files", {})
    for name in ("adapter_model.safetensors", "model.safetensors"):
        if name in files:
            base["sha256"] = files[name]
            break
    values = {**copy.deepcopy(offer.experiment), "base": base}
    return offer.model_copy(update={"experiment": values})


def held_out_per_mille(offer: Offer, places: Mapping[int, int]) -> int:
    """The share of the rows that is held out when the request names no validation file, as the
    rule of data.valid_share takes it. places: how many rows have each place (RowReport).

    It is the offer's share, or the nearest one that leaves rows on both sides. DataError when there
    is none.
    """
    if len(places) < 2:
        raise DataError(
            "training_file: no row can be held out for validation, because rows that ask the same "
            "stay together. Add rows that ask something else, or name a validation_file."
        )
    return min(max(round(offer.held_out * PLACES), min(places) + 1), max(places))


def world_of(offer: Offer) -> int:
    """The number of devices on which jobs of an offer run."""
    job = JobConfig.model_validate(offer.job)
    return max(job.gpus, 1) * job.nodes
