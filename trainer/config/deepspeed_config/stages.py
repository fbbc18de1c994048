"""What a stage of ZeRO cannot do: DeepSpeed would ignore it, assert on it, or compute something
else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from trainer.config.deepspeed_config.check import Config, sequence_ranks
from trainer.config.schema import Optim, Train

OFFLOADS: dict[Literal["offload_param", "offload_optimizer"], tuple[int, str]] = {
    "offload_param": (3, "DeepSpeed ignores it below stage 3"),
    "offload_optimizer": (1, "stage 0 has none"),
}


def refusals(config: Config, train: Train, optim: Optim, world: int) -> Iterator[str]:
    """A line for each thing that the stage of `config` cannot do. world: all devices."""
    yield from _stage(config)
    stage = config["zero_optimization"]["stage"]
    if train.base_bits is not None and stage >= 3:
        # packed weights are buffers, which ZeRO-3 would neither share out nor gather
        yield (
            f"train.base_bits={train.base_bits} needs ZeRO stage 0, 1 or 2, got stage=3: every "
            "device holds the packed base whole. Use --deepspeed zero2, or leave base_bits out."
        )
    if train.compile and stage >= 3:
        # Hooks of ZeRO-3 gather the weights of every layer of a block as it is called, and a graph
        # ends at each of them: nothing would be left to fuse.
        yield (
            "train.compile=true needs ZeRO stage 0, 1 or 2, got stage=3: it gathers weights within "
            "the blocks that would be compiled. Use --deepspeed zero2, or leave train.compile out."
        )
    sharing = sequence_ranks(config)
    if train.compile and sharing > 1:
        yield (
            f"train.compile=true with sequence_parallel_size={sharing}: compiled blocks were never "
            "tried with an exchange inside. Leave one of the two out."
        )
    # zero_hpz_partition_size: a second copy of the weights within each group of ranks, which
    # DeepSpeed cuts from all ranks without a look at whether they are so many, or ignores
    size = config["zero_optimization"].get("zero_hpz_partition_size", 1)
    name = f"zero_optimization.zero_hpz_partition_size={size}"
    if size != 1 and stage < 3:
        yield f"{name} needs stage 3, got stage={stage}. Delete the key."
    elif size < 1 or world % size:
        yield (
            f"{name} does not divide {world} ranks: it is the number of those that share a node, "
            "whose weights are then gathered within it. Write that number, or use zero3."
        )
    offloads: list[dict[str, Any]] = [
        config["zero_optimization"].get(key) or {} for key in OFFLOADS
    ]
    if train.ema is not None and any(one.get("device") == "nvme" for one in offloads):
        yield (
            f"train.ema={train.ema}: the weights that it averages are on NVMe between two steps. "
            'Offload to "cpu" (--deepspeed zero3_offload), or leave ema out.'
        )
    yield from _whole_weights(config, optim)
    offload: dict[str, Any] = config["zero_optimization"].get("offload_optimizer") or {}
    if offload.get("device", "none") != "none" and any(one.since for one in train.freeze):
        # deepspeed 0.19.8, norm_for_param_grads: never forgets what a weight without a gradient
        # once had
        yield (
            "train.freeze: a since above 0 needs the optimizer on the device: DeepSpeed would "
            "count the last gradient of what stands still in the norm that clips. Use --deepspeed "
            "zero2 or zero3, or leave since out."
        )
    if optim.name != "adamw" and offload.get("device", "none") != "none":
        # deepspeed 0.19.8 has such a kernel for Adam, Adagrad and Lion; its Lion keeps the moments
        # of a step that was left out, and its Muon is clipped after it is orthogonal
        yield (
            f"zero_optimization.offload_optimizer: optim.name={optim.name!r} is stepped on the "
            "device alone, for only AdamW has a kernel for the host here. Use --deepspeed zero2 or "
            "zero3, or optim.name='adamw'."
        )
    dtype = config.get("data_types", {}).get("grad_accum_dtype")
    if stage == 0 and dtype not in (None, train.precision):
        yield (
            f"data_types.grad_accum_dtype={dtype!r} needs stage 1 or more when "
            f"train.precision={train.precision!r}: "
            "DeepSpeed accumulates in the dtype of the model at stage 0."
        )


def _stage(config: Config) -> list[str]:
    """What a stage cannot do, which DeepSpeed ignores or asserts on."""
    zero: Config = config["zero_optimization"]
    problems = [problem for key in OFFLOADS if zero.get(key) for problem in _offload(zero, key)]
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
    stage, reason = OFFLOADS[key]
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
