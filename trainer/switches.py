"""What the environment switches on or off in a run. Imports no torch."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping

from trainer.errors import ConfigError

CPU_KERNELS = "LATHE_CPU_KERNELS"  # kernels of a processor whose last bits differ; off
KEEP_MEMORY = "LATHE_KEEP_MEMORY"  # malloc keeps freed memory for the next step; on
TF32 = "LATHE_TF32"  # fp32 products of a GPU; on
LIGER = "LATHE_LIGER"  # kernels of liger-kernel on a GPU; on where they are installed
EXAMINE = "LATHE_EXAMINE"  # DeepSpeed is examined before its first use: on, or off
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
    for name in (CPU_KERNELS, KEEP_MEMORY, TF32, EXAMINE):
        is_on(name, environment, default=name != CPU_KERNELS)
    is_on(LIGER, environment, default=has_liger())


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
    is_used = is_on(LIGER, environment, default=has_liger())
    if is_used and not has_liger():
        raise ConfigError(
            f"{LIGER}=1 in the environment: liger-kernel is not installed. It comes with the "
            "extra: pip install -e '.[gpu]'. Or unset the variable: torch computes the same."
        )
    return is_used
