"""What a folder of states holds (a folder of shards, see trainer/data/shard_folder.py). Every
distinct context stands in it once, under a key made of its token ids.

<root>/<name>/            one for each identity: base model, tokenizer, template, limits, dtype
  states-<n>.safetensors  `states` (tokens, D), whole contexts one after another; `offsets`
                          (entries + 1,) in tokens; `keys` (entries, 32); `checksums` (entries,);
                          int8 has `scales` (tokens,) besides

A shard's bytes depend on nothing but its own contexts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trainer.config.identity import digest
from trainer.data.shard_folder import FORMAT, ShardFolder
from trainer.errors import StorageError

KEY_BYTES = 32
MAX_SHARD_BYTES = 256 * 2**20  # held in memory while it is made; what a kill costs a rank at most
MIN_SHARDS = 64  # of a set that is large enough for so many: that many ranks have work
MIN_SHARD_TOKENS = 8192

Dtype = Literal["bf16", "fp32", "int8"]
Identity = dict[str, Any]  # JSON: everything that states depend on besides token ids
TORCH: dict[Dtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "int8": torch.int8,
}
_ENTRY_BYTES = KEY_BYTES + 8 + 8  # key, offset, checksum
_SCALE_BYTES = 4  # int8: one fp32 number a token
_FILE_BYTES = 1024  # header and record of a shard


@dataclass(frozen=True)
class StatesPlan:
    """What a folder is to hold; one that was begun with another plan is not continued."""

    identity: Identity
    contexts: str  # digest of the keys, in their order
    dtype: Dtype
    width: int
    count: int  # contexts
    tokens: int
    shard_tokens: int

    @property
    def bytes_per_token(self) -> int:
        return self.width * TORCH[self.dtype].itemsize + (
            _SCALE_BYTES if self.dtype == "int8" else 0
        )

    def bytes_needed(self, *, contexts: int, tokens: int, shards: int) -> int:
        """What so many contexts take on the disk, rounded up."""
        return tokens * self.bytes_per_token + contexts * _ENTRY_BYTES + shards * _FILE_BYTES


def plan_for(
    identity: Identity,
    keys: np.ndarray,
    lengths: np.ndarray,
    *,
    dtype: Dtype,
    width: int,
    shard_tokens: int | None,
) -> StatesPlan:
    """The plan of these contexts: (E,) keys and lengths.

    shard_tokens: of a shard; None: by size alone.
    """
    tokens = int(lengths.sum())
    sized = StatesPlan(identity, _digest(keys), dtype, width, len(keys), tokens, 1)
    most = max(1, MAX_SHARD_BYTES // sized.bytes_per_token)
    by_size = min(most, max(MIN_SHARD_TOKENS, -(-tokens // MIN_SHARDS)))
    return StatesPlan(**{**vars(sized), "shard_tokens": shard_tokens or by_size})


def shard_bounds(lengths: np.ndarray, shard_tokens: int) -> list[range]:
    """The contexts of every shard: whole ones, shard_tokens of them or a little more."""
    starts = np.cumsum(lengths) - lengths
    firsts = np.flatnonzero(np.diff(starts // shard_tokens, prepend=-1))
    return [range(int(a), int(b)) for a, b in zip(firsts, [*firsts[1:], len(lengths)], strict=True)]


def key_of(ids: Sequence[int] | np.ndarray) -> bytes:
    """The key of a context: SHA-256 of its token ids, cut as they are encoded."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i4").tobytes()).digest()


def folder_name(identity: Identity) -> str:
    """The folder of an identity below the root: no other template or base is taken for it."""
    return digest({"format": FORMAT, **identity})[:32]


def shards_in(folder: Path) -> ShardFolder:
    """The files of a folder of states."""
    how: Any = {"refusal": StorageError, "notes_kernels": True}
    return ShardFolder(folder, "states", ".safetensors", "prepare", **how)


# int8
# --------------------------------------------------------------------------------------------------


def quantise(states_LD: Tensor) -> tuple[Tensor, Tensor]:
    """(L, D) -> int8 numbers and the fp32 scale of each token, (L,).

    The largest number of a token becomes 127.
    """
    scale_L = states_LD.float().abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (states_LD.float() / scale_L[:, None]).round().to(torch.int8), scale_L


def dequantise(numbers_LD: Tensor, scale_L: Tensor) -> Tensor:
    """(L, D) bf16 states, whose own rounding is a fraction of what int8 lost."""
    return (numbers_LD.float() * scale_L[:, None]).to(torch.bfloat16)


def _digest(keys: np.ndarray) -> str:
    return hashlib.sha256(keys.tobytes()).hexdigest()
