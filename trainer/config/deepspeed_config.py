"""Experiment + preset -> the complete, checked DeepSpeed dictionary, without importing deepspeed.

DeepSpeed ignores unknown top-level keys, drops "auto" and clips at 1.0 when nothing is said. So
every name and type is checked here against a table, every "auto" is settled here, and two numbers
that disagree are refused with both sources.
"""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any, Literal, cast

from trainer.config.deepspeed_check import (
    AUTO,
    BATCH_KEYS,
    FROM_HIDDEN_SIZE,
    OPTIM_KEYS,
    Config,
    mistakes,
)
from trainer.config.schema import Optim, Train
from trainer.errors import ConfigError, nearest

logger = logging.getLogger(__name__)

PRESETS = Path(__file__).resolve().parent.parent.parent / "ds_configs"

_OURS = ("optimizer", "scheduler", "steps_per_print")  # never handed to DeepSpeed
_OFFLOADS: dict[Literal["offload_param", "offload_optimizer"], tuple[int, str]] = {
    "offload_param": (3, "DeepSpeed ignores it below stage 3"),
    "offload_optimizer": (1, "stage 0 has none"),
}
_PARTITIONED = (
    "nothing",
    "optimizer states",
    "optimizer states and gradients",
    "optimizer states, gradients, weights",
)


def read(name_or_path: str) -> Config:
    """The DeepSpeed file as a dictionary: "zero2" is ds_configs/zero2.json, anything with a slash
    or a dot is a path.

    Raises ConfigError when the file is missing, is no JSON object, or states a key twice.
    """
    is_path = "/" in name_or_path or "." in name_or_path
    path = Path(name_or_path) if is_path else PRESETS / f"{name_or_path}.json"
    if not path.is_file():
        names = sorted(file.stem for file in PRESETS.glob("*.json"))
        hint = "" if is_path else f" {nearest(name_or_path, names)}"
        raise ConfigError(
            f"deepspeed={name_or_path!r}: there is no file {path}.{hint} Use one of "
            f"{', '.join(names)}, or the path of a JSON file."
        )
    try:
        values = json.loads(path.read_text(), object_pairs_hook=_unique, parse_constant=_finite)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ConfigError(f"{path}: not a DeepSpeed file: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds a {type(values).__name__}. Want one JSON object.")
    return cast(Config, values)


def _unique(pairs: list[tuple[str, Any]]) -> Config:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"stated twice in one block: {', '.join(twice)}")
    return dict(pairs)


def _finite(constant: str) -> float:
    raise ValueError(f"{constant} is not a number that JSON knows")


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

    world: data-parallel devices. source: the file that `preset` came from, for the messages.
    hidden_size: of the base, needed only when a bucket size is "auto". A scheduler block whose
    parameters are all "auto" is dropped, for the loop owns the schedule; any other is refused.
    Raises ConfigError with every mistake at once.
    """
    _refuse(source, mistakes(preset))
    config = copy.deepcopy(preset)
    config.setdefault("zero_optimization", {"stage": 0})
    _refuse(
        source,
        [
            *_batches(config, train, world),
            *_settle(config, "gradient_clipping", optim.clip, f"optim.clip={optim.clip}"),
            *_precision(config, train),
            *_optimizer(config, optim),
            *_scheduler(config, source),
            *_stage(config),
            *_packed_weights(config, train),
            *_compiled(config, train),
            *_secondary(config, world),
            *_whole_weights(config, optim),
            *_bucket_sizes(config["zero_optimization"], hidden_size),
            *_grad_accum_dtype(config, train),
        ],
    )
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
    given = block.get(key, AUTO)
    if given not in (AUTO, value):
        return [
            f"{path}={json.dumps(given)} in the file, but {origin}. Change one of them, or write "
            '"auto" there.'
        ]
    block[key] = value
    return []


def _batches(config: Config, train: Train, world: int) -> list[str]:
    rows = train.micro_batch * world
    if train.global_batch % rows:
        return [_not_a_multiple(train, world)]
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


def _not_a_multiple(train: Train, world: int) -> str:
    rows = train.micro_batch * world
    below = max(train.global_batch // rows, 1) * rows
    fitting = [
        size for size in range(1, train.micro_batch) if train.global_batch % (size * world) == 0
    ]
    other = f"micro_batch={fitting[-1]}" if fitting else "another number of devices"
    return (
        f"train.global_batch={train.global_batch} is not a multiple of "
        f"micro_batch={train.micro_batch} x "
        f"world={world} = {rows}. Use {below} or {below + rows}, or {other}."
    )


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
    wanted: Config = {**optim.model_dump(include=set(OPTIM_KEYS)), "betas": list(optim.betas)}
    return [
        problem
        for key in OPTIM_KEYS
        for problem in _settle(
            config, f"optimizer.params.{key}", wanted[key], f"optim.{key}={wanted[key]}"
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


def _stage(config: Config) -> list[str]:
    """What a stage cannot do, which DeepSpeed ignores or asserts on."""
    zero: Config = config["zero_optimization"]
    problems = [problem for key in _OFFLOADS if zero.get(key) for problem in _offload(zero, key)]
    if zero.get("overlap_comm") and zero["stage"] < 2:
        problems.append(
            f"zero_optimization.overlap_comm=true needs stage 2 or 3, got stage={zero['stage']}: "
            "the loop decides where a window ends, and then DeepSpeed reduces in step() below "
            "stage 2. Delete the key."
        )
    if config["fp16"].get("enabled") is True and zero["stage"] == 0:
        # deepspeed 0.19.8, engine.backward: only a ZeROOptimizer scales the loss, and stage 0 in
        # fp16 has none
        problems.append(
            "train.precision='fp16' needs ZeRO stage 1, 2 or 3, got stage=0: there DeepSpeed "
            "divides gradients by a "
            "loss scale that it never applied. Use --deepspeed zero1, or train.precision='bf16'."
        )
    return problems


def _packed_weights(config: Config, train: Train) -> list[str]:
    """Packed weights are buffers, which ZeRO-3 would neither share out nor gather."""
    if train.base_bits is None or config["zero_optimization"]["stage"] < 3:
        return []
    return [
        f"train.base_bits={train.base_bits} needs ZeRO stage 0, 1 or 2, got stage=3: every device "
        "holds the packed base whole. Use --deepspeed zero2, or leave base_bits out."
    ]


def _secondary(config: Config, world: int) -> list[str]:
    """A second copy of the weights within each group of ranks, which DeepSpeed cuts from all ranks
    without a look at whether they are so many, or ignores.
    """
    zero: Config = config["zero_optimization"]
    size = zero.get("zero_hpz_partition_size", 1)
    if size == 1:
        return []
    name = f"zero_optimization.zero_hpz_partition_size={size}"
    if zero["stage"] < 3:
        return [f"{name} needs stage 3, got stage={zero['stage']}. Delete the key."]
    if size < 1 or world % size:
        return [
            f"{name} does not divide {world} ranks: it is the number of those that share a node, "
            "whose weights are then gathered within it. Write that number, or use zero3."
        ]
    return []


def _compiled(config: Config, train: Train) -> list[str]:
    """Hooks of ZeRO-3 gather the weights of every layer of a block as it is called, and a graph
    ends at each of them: nothing would be left to fuse.
    """
    stage = config["zero_optimization"]["stage"]
    if not train.compile or stage < 3:
        return []
    return [
        "train.compile=true needs ZeRO stage 0, 1 or 2, got stage=3: it gathers weights within the "
        "blocks that would be compiled. Use --deepspeed zero2, or leave train.compile out."
    ]


def _whole_weights(config: Config, optim: Optim) -> list[str]:
    """Adafactor needs every weight in its own shape.

    deepspeed 0.19.8, stage_1_and_2.__init__ and stage3._create_fp32_partitions: the optimizer gets
    one flat fp32 vector per group (or sub-group) and rank, whatever it is. Adafactor would run:
    with a full second moment, and with steps scaled and clipped by the size of the whole vector,
    which changes with the world size.
    """
    stage = config["zero_optimization"]["stage"]
    if optim.name != "adafactor" or stage == 0:
        return []
    return [
        f"optim.name='adafactor' needs ZeRO stage 0, got stage={stage}: from stage 1 on DeepSpeed "
        "lays all weights into one flat vector per rank, where Adafactor factors nothing (as much "
        "memory as a moment of AdamW) and scales its steps by the whole vector. Use --deepspeed "
        "zero0, or optim.name='adamw'."
    ]


def _offload(zero: Config, key: Literal["offload_param", "offload_optimizer"]) -> list[str]:
    stage, reason = _OFFLOADS[key]
    block: Config = zero[key]
    device, path = block.get("device", "none"), block.get("nvme_path")
    name = f"zero_optimization.{key}"
    if device not in ("none", "cpu", "nvme"):
        return [f"{name}.device={device!r}: want none, cpu or nvme."]
    problems: list[str] = []
    if device != "none" and zero["stage"] < stage:
        problems.append(f"{name} needs stage {stage} or more, got stage={zero['stage']}: {reason}.")
    if block.get("ratio", 1.0) < 1.0 and zero["stage"] < 3:
        problems.append(f"{name}.ratio={block['ratio']} needs stage 3, got stage={zero['stage']}.")
    if device == "nvme" and (path is None or not Path(path).is_dir()):
        problems.append(
            f"{name}.nvme_path={path!r} is not a folder here. Name a folder on the local disk."
        )
    return problems


def _bucket_sizes(zero: Config, hidden_size: int | None) -> list[str]:
    problems: list[str] = []
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
    return problems


def _grad_accum_dtype(config: Config, train: Train) -> list[str]:
    dtype = config.get("data_types", {}).get("grad_accum_dtype")
    if config["zero_optimization"]["stage"] > 0 or dtype in (None, train.precision):
        return []
    return [
        f"data_types.grad_accum_dtype={dtype!r} needs stage 1 or more when "
        f"train.precision={train.precision!r}: "
        "DeepSpeed accumulates in the dtype of the model at stage 0."
    ]


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
    engine["train_batch_size"] = config["train_batch_size"] // config["gradient_accumulation_steps"]
    engine["gradient_accumulation_steps"] = 1
    engine["zero_allow_untested_optimizer"] = True
    engine.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    world = config["train_batch_size"] // (
        config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    )
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
    places = {key: offload_device(config, key) for key in _OFFLOADS}
    offload = [
        f"{key.removeprefix('offload_')} to {place}"
        for key, place in places.items()
        if place != "none"
    ]
    total, micro, accumulation = (config[key] for key in BATCH_KEYS)
    clip = config["gradient_clipping"]
    return [
        ("ZeRO stage", f"{zero['stage']} (partitioned: {_PARTITIONED[zero['stage']]})"),
        ("offload", ", ".join(offload) or "none"),
        ("precision", precision(config)),
        (
            "batch",
            f"{total} = {micro} micro x {accumulation} accumulation x "
            f"{total // (micro * accumulation)} devices",
        ),
        ("clipping", f"gradient norm at {clip}" if clip else "off"),
    ]
