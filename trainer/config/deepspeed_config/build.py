"""Experiment + preset -> the complete, checked DeepSpeed dictionary."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

from trainer.config.deepspeed_config.check import (
    AUTO,
    BATCH_KEYS,
    FROM_HIDDEN_SIZE,
    OPTIM_KEYS,
    SEQUENCE_KEY,
    Config,
    mistakes,
    sequence_ranks,
)
from trainer.config.deepspeed_config.stages import refusals
from trainer.config.schema import Optim, Train
from trainer.errors import ConfigError

logger = logging.getLogger(__name__)


def build(
    preset: Config,
    *,
    train: Train,
    optim: Optim,
    world: int,
    source: str,
    hidden_size: int | None = None,
) -> Config:
    """The complete DeepSpeed dictionary: no "auto" left; batches, clipping, precision and stage
    always stated.

    world: all devices, those that share rows, too. source: the file that `preset` came from, for
    the messages. hidden_size: of the base, needed only when a bucket size is "auto". A scheduler
    block whose parameters are all "auto" is dropped, for the loop owns the schedule; any other is
    refused. Raises ConfigError with every mistake at once.
    """
    _refuse(source, mistakes(preset))
    config = copy.deepcopy(preset)
    config.setdefault("zero_optimization", {"stage": 0})
    problems = [
        *_batches(config, train, world),
        *_settle(config, "gradient_clipping", optim.clip, f"optim.clip={optim.clip}"),
        *_precision(config, train),
        *_optimizer(config, optim),
        *_scheduler(config, source),
        *refusals(config, train, optim, world),
    ]
    zero: Config = config["zero_optimization"]
    for key, formula in FROM_HIDDEN_SIZE.items():
        if zero.get(key) != AUTO:
            continue
        if hidden_size is not None:
            zero[key] = formula(hidden_size)
        elif key.startswith("stage3_") and zero["stage"] < 3:
            del zero[key]  # without effect there
        else:
            problems.append(
                f'zero_optimization.{key}="auto" needs the hidden size of the base. Write a number.'
            )
    _refuse(source, problems)
    return config


def _refuse(source: str, problems: list[str]) -> None:
    if problems:
        raise ConfigError(
            f"{source}: {len(problems)} mistake(s)\n" + "\n".join(f"  {line}" for line in problems)
        )


def _settle(config: Config, path: str, value: Any, origin: str) -> list[str]:
    """Writes `value` at `path` if the file says "auto" or nothing; otherwise both must agree."""
    *blocks, key = path.split(".")
    block = config
    for name in blocks:
        block = block.setdefault(name, {})
    stated = block.get(key, AUTO)
    if stated not in (AUTO, value):
        return [
            f"{path}={json.dumps(stated)} in the file, but {origin}. Change one of them, or write "
            '"auto" there.'
        ]
    block[key] = value
    return []


def _batches(config: Config, train: Train, ranks: int) -> list[str]:
    sharing = sequence_ranks(config)
    if ranks % sharing:
        return [
            f"{SEQUENCE_KEY}={sharing} does not divide {ranks} rank(s): so many neighbours share "
            f"the tokens of each row. Start a multiple of {sharing} ranks, or write a number that "
            "divides them."
        ]
    world = ranks // sharing
    rows = train.micro_batch * world
    if train.global_batch % rows:
        below = max(train.global_batch // rows, 1) * rows
        fitting = [
            size for size in range(1, train.micro_batch) if train.global_batch % (size * world) == 0
        ]
        other = f"micro_batch={fitting[-1]}" if fitting else "another number of devices"
        return [
            f"train.global_batch={train.global_batch} is not a multiple of "
            f"micro_batch={train.micro_batch} x "
            f"world={world} = {rows}. Use {below} or {below + rows}, or {other}."
        ]
    accumulation = train.global_batch // rows
    product = (
        f"train.global_batch={train.global_batch} / (micro_batch={train.micro_batch} x "
        f"world={world})"
    )
    return [
        *_settle(
            config,
            "train_batch_size",
            train.global_batch,
            f"train.global_batch={train.global_batch}",
        ),
        *_settle(
            config, BATCH_KEYS[1], train.micro_batch, f"train.micro_batch={train.micro_batch}"
        ),
        *_settle(
            config, "gradient_accumulation_steps", accumulation, f"{product} = {accumulation}"
        ),
    ]


def _precision(config: Config, train: Train) -> list[str]:
    blocks: list[Config] = [config.get("bf16", {}), config.get("fp16", {})]
    if all(block.get("enabled") is True for block in blocks):
        return [
            "bf16.enabled and fp16.enabled are both true, but "
            f"train.precision={train.precision!r}. Keep one."
        ]
    origin = f"train.precision={train.precision!r}"
    return [
        *_settle(config, "bf16.enabled", train.precision == "bf16", origin),
        *_settle(config, "fp16.enabled", train.precision == "fp16", origin),
    ]


def _optimizer(config: Config, optim: Optim) -> list[str]:
    """The engine makes the optimizer itself, so the block may only agree with the experiment."""
    if "optimizer" not in config:
        return []
    if optim.name != "adamw":
        stated = json.dumps(config["optimizer"].get("type"))
        return [
            f"optimizer.type={stated} in the file, but optim.name={optim.name!r}. Delete the block."
        ]
    name = config["optimizer"].get("type")
    params: Config = config["optimizer"].setdefault("params", {})
    if not isinstance(name, str) or name.lower() not in ("adamw", "adam"):
        return [
            f"optimizer.type={json.dumps(name)}: the engine makes AdamW itself. Write AdamW, or "
            "delete the block."
        ]
    if params.get("adam_w_mode") is False:
        return [
            "optimizer.params.adam_w_mode=false is Adam with L2 decay, but the engine makes "
            "AdamW. Delete the key."
        ]
    ours: Config = {**optim.model_dump(include=set(OPTIM_KEYS)), "betas": list(optim.betas)}
    return [
        problem
        for key in OPTIM_KEYS
        for problem in _settle(
            config, f"optimizer.params.{key}", ours[key], f"optim.{key}={ours[key]}"
        )
    ]


def _scheduler(config: Config, source: str) -> list[str]:
    if "scheduler" not in config:
        return []
    params: Config = config["scheduler"].get("params", {})
    fixed = [key for key, value in params.items() if value != AUTO]
    if params and not fixed:
        del config["scheduler"]
        logger.info("%s: scheduler block dropped; the experiment's `schedule` is used", source)
        return []
    stated = (
        ", ".join(f"{key}={json.dumps(params[key])}" for key in fixed) or "no parameter as auto"
    )
    return [
        f"scheduler states {stated}, but the loop owns the schedule. Use `schedule` in the "
        "experiment instead."
    ]
