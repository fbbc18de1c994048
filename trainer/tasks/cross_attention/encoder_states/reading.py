"""States read through memory maps, every one checked when it is read first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.data.readings.key_index import KeyIndex
from trainer.data.shard_folder import META, PLAN
from trainer.errors import CheckpointError, ConfigError, DataError
from trainer.files.safetensors_file import WrittenFile, checksum_of, tensors_of
from trainer.tasks.cross_attention.encoder_states.layout import (
    Identity,
    StatesPlan,
    dequantise,
    folder_name,
    key_of,
    shards_in,
)


class StateCache:
    """A finished folder of states. They stay on the disk until they are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = shards_in(folder).read(PLAN, lambda plan: StatesPlan(**plan))
        self.records = shards_in(folder).read(
            META, lambda meta: [WrittenFile(**record) for record in meta["shards"]]
        )
        self._shards = [self._map(record) for record in self.records]
        self._index = KeyIndex([shard["keys"] for shard in self._shards])
        self._is_checked = [np.zeros(len(shard["checksums"]), bool) for shard in self._shards]

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, ids: Sequence[int] | np.ndarray) -> bool:
        return self._index.find(key_of(ids)) is not None

    def states(self, ids: Sequence[int] | np.ndarray) -> Tensor:
        """(L, D) states of a context by its token ids: a view of the file (fp32, bf16), or a bf16
        copy (int8).

        DataError when the context was not prepared, or its bytes are not those that were written.
        """
        where = self._index.find(key_of(ids))
        if where is None:
            raise DataError(
                f"{self.folder}: holds no states of a context of {len(ids)} tokens. The data "
                "changed since they were "
                "prepared: run `python -m trainer prepare` on it, with a new --out."
            )
        number, place = where
        shard = self._shards[number]
        start, stop = shard["offsets"][place : place + 2].tolist()
        parts = [shard[field][start:stop] for field in ("states", "scales") if field in shard]
        if not self._is_checked[number][place]:
            if checksum_of(parts) != int(shard["checksums"][place]):
                raise self._alteration(
                    self.records[number], f"the checksum of its context {place} is another"
                )
            self._is_checked[number][place] = True
        return parts[0] if len(parts) == 1 else dequantise(*parts)

    def _map(self, record: WrittenFile) -> dict[str, Tensor]:
        path = self.folder / record.name
        try:
            if path.stat().st_size != record.size:
                raise self._alteration(
                    record, f"it has {path.stat().st_size} bytes, want {record.size}"
                )
            return dict(tensors_of(path))
        except (OSError, CheckpointError) as error:
            raise self._alteration(record, str(error)) from error

    def _alteration(self, record: WrittenFile, problem: str) -> DataError:
        return DataError(
            f"{self.folder / record.name}: {problem}. Delete this file and run the same prepare "
            "command again: it makes what is missing."
        )


def open_states(root: Path, identity: Identity) -> StateCache:
    """The states of an identity below `root`. ConfigError says what stands there instead."""
    folder = root / folder_name(identity)
    if shards_in(folder).is_finished:
        return StateCache(folder)
    if shards_in(folder).is_begun:
        raise ConfigError(
            f"{folder} is not finished. Run the same `python -m trainer prepare` command again."
        )
    others = [
        shards_in(path.parent).read(PLAN, lambda plan: plan["identity"])
        for path in sorted(root.glob(f"*/{PLAN}"))
    ]
    differing: list[str] = []
    for other in others:
        names = [name for name in identity if other.get(name) != identity[name]]
        values = (f"{name}={other.get(name)!r} (want {identity[name]!r})" for name in names)
        differing.append(", ".join(values))
    present = f"It holds states with {' | '.join(differing)}." if others else "It holds none."
    raise ConfigError(
        f"{root}: holds no states for this experiment. {present} Run `python -m trainer prepare` "
        "with this group and give its --out as --data_path, or set data.encode='online'."
    )


def pad_states(rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """The states of each row's contexts, joined -> (B, L, D), zeros behind the shorter ones, and a
    bool mask (B, L).
    """
    lengths = [sum(map(len, parts)) for parts in rows]
    first = rows[0][0]
    states = first.new_zeros(len(rows), max(lengths), first.shape[1])
    mask = torch.zeros(states.shape[:2], dtype=torch.bool)
    for index, (parts, length) in enumerate(zip(rows, lengths, strict=True)):
        torch.cat(list(parts), out=states[index, :length])
        mask[index, :length] = True
    return states, mask
