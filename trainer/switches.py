"""What the environment switches on or off in a run. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping

from trainer.errors import ConfigError

CPU_KERNELS = "LATHE_CPU_KERNELS"  # kernels of a processor whose last bits differ; on
KEEP_MEMORY = "LATHE_KEEP_MEMORY"  # malloc keeps freed memory for the next step; on
TF32 = "LATHE_TF32"  # fp32 products of a GPU; on
LIGER = "LATHE_LIGER"  # kernels of liger-kernel on a GPU; off
EXAMINE = "LATHE_EXAMINE"  # DeepSpeed is examined before its first use: on, or off
# Raise it with every change by which these kernels give other last bits.
CPU_KERNELS_VERSION = 2
# keys of a run's data.json, by the switch of these kernels; a run without them has no key
KERNELS = {CPU_KERNELS: "cpu_kernels", LIGER: "liger"}
# of malloc itself: who sets one of them has decided
_OF_MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")
_WORDS = {EXAMINE: ("on", "off")}  # of others: 1 and 0


def is_on(name: str, environment: Mapping[str, str], *, default: bool) -> bool:
    """What the environment says of a switch; `default` where it says nothing. ConfigError for a
    word that is none of the two of this switch.
    """
    on, off = _WORDS.get(name, ("1", "0"))
    word = environment.get(name, "")
    if word not in ("", on, off):
        raise ConfigError(
            f"{name}={word} in the environment: want {on} or {off}, or the variable unset, which "
            f"is {on if default else off}."
        )
    return default if not word else word == on


def refuse_other_words(environment: Mapping[str, str]) -> None:
    """ConfigError for a switch with a word that it does not know."""
    for name in (CPU_KERNELS, KEEP_MEMORY, TF32, LIGER, EXAMINE):
        is_on(name, environment, default=name != LIGER)


def words_of_a_run(environment: Mapping[str, str]) -> dict[str, str]:
    """What the environment says of the switches that all ranks of a run need alike, "" for nothing:
    numbers depend on them, or which collectives are called.
    """
    return {name: environment.get(name, "") for name in (CPU_KERNELS, TF32, LIGER, EXAMINE)}


def uses_cpu_kernels(environment: Mapping[str, str]) -> bool:
    """Whether a processor attends to rows one by one, and computes losses in the tensor of their
    logits (docs/decisions/0041-kernels-of-a-processor.md).
    """
    return is_on(CPU_KERNELS, environment, default=True)


@contextlib.contextmanager
def with_cpu_kernels_of(began: bool | None) -> Iterator[None]:
    """Inside, a processor computes as work did that began before, so that it goes on to the same
    bits. What the environment says counts first: a word that differs from it is refused where the
    work is claimed. began: whether that was with these kernels; None for work that begins now.
    """
    if began is None or os.environ.get(CPU_KERNELS):
        yield
        return
    os.environ[CPU_KERNELS] = str(int(began))
    try:
        yield
    finally:
        del os.environ[CPU_KERNELS]


def keeps_memory(environment: Mapping[str, str]) -> bool:
    """Whether a run on a processor keeps freed memory (runtime/host_memory.py): unless it is told
    not to, or malloc has a setting of its own.
    """
    is_set = any(name in environment for name in _OF_MALLOC)
    is_set |= "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    return is_on(KEEP_MEMORY, environment, default=True) and not is_set


@functools.cache
def has_liger() -> bool:
    """Whether liger-kernel and Triton, which compiles its kernels, are installed: extra `gpu`."""
    return all(importlib.util.find_spec(name) for name in ("liger_kernel", "triton"))


def uses_liger(environment: Mapping[str, str]) -> bool:
    """Whether a GPU computes by the kernels of liger-kernel (models/lean/liger.py). ConfigError
    where the environment wants them and they are not installed.
    """
    is_used = is_on(LIGER, environment, default=False)
    if is_used and not has_liger():
        raise ConfigError(
            f"{LIGER}=1 in the environment: liger-kernel is not installed. It comes with the "
            "extra: pip install -e '.[gpu]'. Or unset the variable: torch computes the same."
        )
    return is_used
