"""What becomes of a built dictionary: what the engine hands to DeepSpeed, and what people read."""

from __future__ import annotations

import copy
from typing import Literal

from trainer.config.deepspeed_config.check import (
    BATCH_KEYS,
    SEQUENCE_KEY,
    Config,
    sequence_ranks,
)
from trainer.config.deepspeed_config.stages import OFFLOADS

_OURS = ("optimizer", "scheduler", "steps_per_print")  # never handed to DeepSpeed
_PARTITIONED = (
    "nothing",
    "optimizer states",
    "optimizer states and gradients",
    "optimizer states, gradients, weights",
)


def for_engine(config: Config) -> Config:
    """`build`'s dictionary as trainer/training/engine.py hands it to DeepSpeed: one engine.step()
    is one optimizer step.

    Accumulation is unmanaged: the loop calls backward once per micro-batch and step once per
    window, so that a window may hold any number of micro-batches and GradCache needs no loop of its
    own. With managed accumulation of 1, several backwards before a step are silently wrong at
    stages 1 and 2. DeepSpeed is thus told 1 accumulation step and micro x world rows, and divides
    nothing; overlap_comm exists from stage 2 on in this mode. One rank sends nothing: there
    gradients are not copied into buckets (two of reduce_bucket_size elements, at stages 1 and 2) to
    be sent.

    DeepSpeed's throughput timer waits for the whole device before every forward, and nobody reads
    it: it is off unless the file says otherwise. The optimizer and the schedule are ours. Gradients
    of a bf16 model accumulate in fp32, except at stage 0, where DeepSpeed raises
    NotImplementedError. In fp32 at stage 0 DeepSpeed keeps the norm to itself, so the engine clips
    and gradient_clipping is 0.0 here.
    """
    engine = {key: copy.deepcopy(value) for key, value in config.items() if key not in _OURS}
    zero: Config = engine["zero_optimization"]
    engine["managed_gradient_accumulation"] = False
    # Ranks that share rows are ranks like all others to DeepSpeed: each has its part of the loss.
    world = num_ranks(config)
    engine.pop(SEQUENCE_KEY, None)
    engine["train_batch_size"] = config["train_micro_batch_size_per_gpu"] * world
    engine["gradient_accumulation_steps"] = 1
    engine["zero_allow_untested_optimizer"] = True
    engine.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    if zero["stage"] < 2 or world == 1:
        zero["overlap_comm"] = False
    if (
        zero["stage"] in (1, 2)
        and world == 1
        and offload_device(config, "offload_optimizer") == "none"
    ):
        zero["contiguous_gradients"] = False
    if zero["stage"] == 0 and precision(config) == "fp32":
        engine["gradient_clipping"] = 0.0
    is_all_bf16 = engine["bf16"].get("bf16_master_weights_and_grads", False)
    if zero["stage"] > 0 and precision(config) == "bf16" and not is_all_bf16:
        engine.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    return engine


def num_ranks(config: Config) -> int:
    """The ranks of a dictionary from `build`: all of them, those that share rows, too."""
    total, micro, accumulation = (config[key] for key in BATCH_KEYS)
    return total // (micro * accumulation) * sequence_ranks(config)


def precision(config: Config) -> str:
    """ "fp32", "bf16" or "fp16" of a dictionary from `build`."""
    return next((name for name in ("bf16", "fp16") if config[name]["enabled"]), "fp32")


def offload_device(config: Config, key: Literal["offload_param", "offload_optimizer"]) -> str:
    """Where a dictionary of `build` keeps weights or optimizer states: "none", "cpu" or "nvme"."""
    block: Config = config["zero_optimization"].get(key) or {}
    return block.get("device", "none")


def summary(config: Config) -> list[tuple[str, str]]:
    """What a dictionary from `build` amounts to, as (label, text) lines for --dry_run."""
    zero: Config = config["zero_optimization"]
    places = {key: offload_device(config, key) for key in OFFLOADS}
    offload = [
        f"{key.removeprefix('offload_')} to {place}"
        for key, place in places.items()
        if place != "none"
    ]
    total, micro, accumulation = (config[key] for key in BATCH_KEYS)
    clip, sharing = config["gradient_clipping"], sequence_ranks(config)
    of_each = f" groups of {sharing} devices that share rows" if sharing > 1 else " devices"
    return [
        ("ZeRO stage", f"{zero['stage']} (partitioned: {_PARTITIONED[zero['stage']]})"),
        ("offload", ", ".join(offload) or "none"),
        ("precision", precision(config)),
        (
            "batch",
            f"{total} = {micro} micro x {accumulation} accumulation x "
            f"{total // (micro * accumulation)}{of_each}",
        ),
        ("clipping", f"gradient norm at {clip}" if clip else "off"),
    ]
