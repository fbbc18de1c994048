"""Decides in one place, and logs, the settings that depend on the GPU and not on the experiment.

Imports torch only where it is needed: the allocator must be told before torch starts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.errors import ConfigError
from trainer.switches import (
    CPU_KERNELS,
    KEEP_MEMORY,
    LIGER,
    TF32,
    has_liger,
    is_on,
    refuse_other_words,
    uses_cpu_kernels,
    uses_liger,
)

logger = logging.getLogger(__name__)

_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_KEPT_PRODUCTS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_TURNS, _WAITING = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"  # how threads wait for one another


@dataclass(frozen=True)
class DeviceDefaults:
    """The settings that are on or off on the GPU of this process."""

    precision: str  # of the experiment
    allows_tf32: bool
    allocator: str
    has_triton: bool  # then long rows of a T5 use the stream kernel
    optimizer: str
    compiles: bool
    has_liger: bool  # then rotations, gated layers and some norms are kernels of liger-kernel

    @classmethod
    def of_experiment(
        cls,
        precision: str,
        *,
        optimizer: str,
        compiles: bool,
        has_triton: bool,
        environment: Mapping[str, str],
    ) -> DeviceDefaults:
        """From the experiment's precision, optimizer and `compile`, and what is installed.

        environment: LATHE_TF32=0 keeps fp32 products exact; LATHE_LIGER=1 asks for liger-kernel, a
        ConfigError where it is not installed; PYTORCH_CUDA_ALLOC_CONF stays as it is.
        """
        allows_tf32 = precision == "fp32" and is_on(TF32, environment, default=True)
        allocator = environment.get(_ALLOCATOR, "torch's own")
        return cls(
            precision,
            allows_tf32,
            allocator,
            has_triton,
            optimizer,
            compiles,
            has_liger=uses_liger(environment),
        )

    def lines(self) -> list[str]:
        """The settings as text for a person."""
        masters = {"bf16": ", masters in fp32", "fp16": ", masters in fp32, scaled loss"}
        products = " by TF32 (LATHE_TF32=0: exact)" if self.allows_tf32 else ""
        streams = "Triton's kernels" if self.has_triton else "grids, for Triton is not installed"
        kernels = {
            "adamw": "torch's fused AdamW",
            "adafactor": "torch's Adafactor",
            "sgd": "torch's fused SGD",
            "lion": "Lion",
            "muon": "Muon, beside torch's fused AdamW",
            "adamw8bit": "bitsandbytes' AdamW in 8 bits, beside torch's fused AdamW",
        }
        blocks = "compiled once for all lengths" if self.compiles else "not compiled"
        return [
            f"numbers: {self.precision}{masters.get(self.precision, products)}",
            "attention: torch's flash or memory-efficient kernel, not cuDNN's, which plans anew "
            f"for each shape; long rows of a T5: {streams}",
            f"optimizer: {kernels[self.optimizer]}; blocks are {blocks}; {self._of_blocks()}",
            f"copies: pinned, on a stream of their own; allocator: {self.allocator}",
        ]

    def _of_blocks(self) -> str:
        """Whose kernels rotate, and multiply in gated layers."""
        if self.has_liger and self.compiles:
            return "liger-kernel's kernels outside of them"
        if self.has_liger:
            return "rotations and gated layers: liger-kernel's"
        other = f" ({LIGER}=1: liger-kernel's)" if has_liger() else ""
        return f"rotations and gated layers: torch's{other}"


def before_torch() -> None:
    """Make torch's CUDA allocator use expandable segments: packed shapes hardly ever repeat, so
    blocks of fixed size would often stay unused. The allocator reads the environment only once.

    Let oneDNN keep few products of a processor: it has one for every number of tokens, with memory
    of its own, and by default the last 1024 (a reranker in bf16 grew from 4.7 to 14 GiB by that).

    Let a thread that waits for another one of OpenMP (gcc's) give its core away after 20,000 turns,
    some tens of microseconds, and not after 300,000: beside another program, all of a step's
    threads have hardly ever a core at once, and a step took up to 12 times as long.

    And let tokenizers start no threads: many rows are encoded by processes, which are forked from
    this one, and a process with such threads warns of that when it is forked.

    A value that the environment has already stays. ConfigError for a switch of ours with a word
    that it does not know.
    """
    refuse_other_words(os.environ)
    os.environ.setdefault(_ALLOCATOR, "expandable_segments:True")
    os.environ.setdefault(_KEPT_PRODUCTS, "32")  # a micro-batch has fewer
    if _WAITING not in os.environ:
        os.environ.setdefault(_TURNS, "20000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def settle(precision: str, *, optimizer: str, compiles: bool) -> DeviceDefaults | None:
    """Apply the settings for the GPU of this process and return them; None without a GPU. Without
    one, freed memory is kept for the next step (host_memory.py).

    ConfigError where the environment wants kernels of a GPU and there is none, or where they are
    not installed.
    """
    import importlib.util

    import torch

    from trainer.runtime import distributed, host_memory

    if not distributed.is_gpu():
        if is_on(LIGER, os.environ, default=False):
            raise ConfigError(
                f"{LIGER}=1 in the environment: liger-kernel's kernels run on a CUDA GPU, and this "
                f"run has a processor. Unset it: what a processor has is on ({CPU_KERNELS})."
            )
        is_kept = host_memory.keep(os.environ)
        how = f"kept ({KEEP_MEMORY}=0: given back)" if is_kept else "as malloc does it"
        logger.debug("device: a processor; freed memory: %s", how)
        rows = "one by one" if uses_cpu_kernels(os.environ) else "on grids"
        logger.debug("device: a processor; rows are attended to %s (%s)", rows, CPU_KERNELS)
        return None
    has_triton = importlib.util.find_spec("triton") is not None
    defaults = DeviceDefaults.of_experiment(
        precision,
        optimizer=optimizer,
        compiles=compiles,
        has_triton=has_triton,
        environment=os.environ,
    )
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_tf32 = defaults.allows_tf32
    torch.backends.cudnn.allow_tf32 = defaults.allows_tf32
    minutes = f"ranks wait {distributed.GROUP_TIMEOUT_S / 60:.0f} min for each other"
    for line in [*defaults.lines(), minutes]:
        logger.info("device: %s", line)
    return defaults
