"""Folders of shards (trainer/data/shard_folder.py) of what a frozen model says of rows, one for
each identity and split. Values are looked up by the token ids of a row, so that the order of rows
and their mix may change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from trainer.config.identity import digest
from trainer.data.shard_folder import ShardFolder
from trainer.errors import StorageError

KEY_BYTES = 32

Row = Mapping[str, Any]  # an encoded row


def key_of(row: Row, names: Sequence[str]) -> bytes:
    """SHA-256 of some fields of an encoded row."""
    total = hashlib.sha256()
    for name in names:
        values = np.ascontiguousarray(row[name], dtype="<i4")
        total.update(len(values).to_bytes(8, "little"))
        total.update(values.tobytes())
    return total.digest()


def table_of(keys: Sequence[bytes]) -> Tensor:
    """(entries, KEY_BYTES) uint8."""
    return torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(-1, KEY_BYTES)


def bounds_of(count: int, size: int) -> list[range]:
    """The rows of every shard of `size` rows."""
    return [range(at, min(at + size, count)) for at in range(0, count, size)]


@dataclass(frozen=True)
class RowStore:
    """Where the values of one experiment are, whatever the split."""

    content: ClassVar[str]  # what the shards hold: the first word of their names
    flag: ClassVar[str]  # the key of the dictionary that names the root

    root: Path
    is_named: bool  # by the experiment: a folder for each split, which is refused for other rows
    identity: Mapping[str, Any]  # all that values depend on besides rows

    def shards(self, split: str, plan: Mapping[str, Any]) -> ShardFolder:
        """The folder of a split. plan: all that its values depend on."""
        name = split if self.is_named else digest(dict(plan))[:32]
        return ShardFolder(
            self.root / name,
            self.content,
            ".safetensors",
            command="train",
            flag=self.flag,
            refusal=StorageError,
        )
