"""What a dictionary leaves open until rows are counted and memory is planned, and what it becomes.
Imports no torch.
"""

from __future__ import annotations

from typing import Any

from trainer.config import deepspeed_config
from trainer.config.schema import Experiment

AUTO = "auto"
CHUNKS = "loss.chunk_tokens"
# The fastest first; stage 0 is not among them, for it accumulates gradients of a bf16 model in
# bf16.
PRESETS = ("zero2", "zero3", "zero2_offload", "zero3_offload")


def with_micro_batch(cfg: Experiment, rows: int) -> Experiment:
    """The experiment with a micro-batch of `rows`."""
    return cfg.model_copy(update={"train": cfg.train.model_copy(update={"micro_batch": rows})})


def with_steps(cfg: Experiment, steps: int) -> Experiment:
    """The experiment with the steps that `train.epochs` are."""
    return cfg.model_copy(update={"train": cfg.train.model_copy(update={"steps": steps})})


def with_frozen(cfg: Experiment, how: str) -> Experiment:
    """The experiment with `train.frozen` settled."""
    return cfg.model_copy(update={"train": cfg.train.model_copy(update={"frozen": how})})


def with_recomputation(cfg: Experiment, how: bool | int) -> Experiment:
    """The experiment with `train.gradient_checkpointing` settled."""
    train = cfg.train.model_copy(update={"gradient_checkpointing": how})
    return cfg.model_copy(update={"train": train})


def with_chunk_tokens(cfg: Any, tokens: int) -> Any:
    """The experiment of a retriever with its chunks of tokens settled."""
    return cfg.model_copy(update={"loss": cfg.loss.model_copy(update={"chunk_tokens": tokens})})


def chunk_tokens(cfg: Any) -> int | str | None:
    """The chunks of tokens that an experiment states; None where it has none."""
    return getattr(getattr(cfg, "loss", None), "chunk_tokens", None)


def placeholder(name: str, cfg: Experiment) -> str:
    """The DeepSpeed file that stands for "auto" until the plan has chosen."""
    if name != AUTO:
        return name
    return presets_of(cfg)[0]


def presets_of(cfg: Experiment) -> tuple[str, ...]:
    """The files that "auto" chooses among."""
    if cfg.optim.name == "adafactor":
        return ("zero0",)
    fitting = PRESETS
    if cfg.train.base_bits is not None:
        fitting = tuple(name for name in PRESETS if name.startswith("zero2"))
    if cfg.optim.name != "adamw":  # no other is stepped on the host
        fitting = tuple(name for name in fitting if not name.endswith("offload"))
    return fitting


def rebuilt(cfg: Experiment, preset: str, *, world: int) -> dict[str, Any]:
    """The complete DeepSpeed dictionary of a chosen file."""
    return deepspeed_config.build(
        deepspeed_config.read(preset), train=cfg.train, optim=cfg.optim, world=world, source=preset
    )
