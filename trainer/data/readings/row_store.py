"""Folders of shards (trainer/data/shard_folder.py) of what a frozen model says of rows, one for
each identity and split. Values are looked up by the token ids of a row, so that the order of rows
and their mix may change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from trainer.config.identity import digest
from trainer.data.shard_folder import ShardFolder
from trainer.errors import StorageError
from trainer.files.atomic import refusals
from trainer.files.build_once import waiting_lock
from trainer.runtime import distributed

KEY_BYTES = 32
_PATIENCE_S = 7 * 24 * 3600.0  # another run may compute all of a folder meanwhile

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

    @contextmanager
    def filling(self, shards: ShardFolder, count: int) -> Iterator[list[int]]:
        """Those of `count` shards that are to be written, and inside no other run writes any. A
        folder that is whole is left as it is, also on a disk that is read-only. A collective.

        Of several runs that are started at once one computes, and the others wait and find it
        there: values that two of them computed would differ in their last bits.
        """
        if distributed.on_main(lambda: shards.is_whole(count)):
            yield []
            return
        lock_file = shards.path.with_name(f"{shards.path.name}.lock")
        with ExitStack() as locks:
            if distributed.is_main():
                with refusals(lock_file):
                    locks.enter_context(waiting_lock(lock_file, waiting_for=shards.path))
            distributed.wait_for_all(_PATIENCE_S)
            yield distributed.broadcast(shards.missing(count))
            distributed.wait_for_all(_PATIENCE_S)  # a rank may have had more to compute
            shards.finish(count)
