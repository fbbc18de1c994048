"""States read through memory maps, every one checked when it is read first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.data.shard_folder import META, PLAN
from trainer.errors import CheckpointError, ConfigError, DataError
from trainer.files.safetensors_file import WrittenFile, tensors_of
from trainer.tasks.cross_attention.encoder_states.layout import (
    KEY_BYTES,
    Identity,
    StatesPlan,
    checksum,
    dequantise,
    folder_name,
    key_of,
    shards_in,
)

# numpy searches among these; it ignores zeros at their end, on both sides alike
_KEY = f"S{KEY_BYTES}"


class StateCache:
    """A finished folder of states. They stay on the disk until they are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = shards_in(folder).read(PLAN, lambda plan: StatesPlan(**plan))
        self.records = shards_in(folder).read(
            META, lambda meta: [WrittenFile(**record) for record in meta["shards"]]
        )
        self._shards = [self._map(record) for record in self.records]
        sizes = [len(shard["checksums"]) for shard in self._shards]
        keys = np.concatenate([shard["keys"].numpy().view(_KEY)[:, 0] for shard in self._shards])
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]
        self._shard_of = np.repeat(np.arange(len(sizes)), sizes)
        self._first_of = np.cumsum([0, *sizes])
        self._is_checked = np.zeros(len(keys), dtype=bool)

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, ids: Sequence[int] | np.ndarray) -> bool:
        return self._find(ids) is not None

    def states(self, ids: Sequence[int] | np.ndarray) -> Tensor:
        """(L, D) states of a context by its token ids: a view of the file (fp32, bf16), or a bf16
        copy (int8).

        DataError when the context was not prepared, or its bytes are not those that were written.
        """
        entry = self._find(ids)
        if entry is None:
            raise DataError(
                f"{self.folder}: holds no states of a context of {len(ids)} tokens. The data "
                "changed since they were "
                "prepared: run `python -m trainer prepare` on it, with a new --out."
            )
        number = int(self._shard_of[entry])
        shard, place = self._shards[number], entry - int(self._first_of[number])
        start, stop = shard["offsets"][place : place + 2].tolist()
        parts = [shard[field][start:stop] for field in ("states", "scales") if field in shard]
        if not self._is_checked[entry]:
            if checksum(parts) != int(shard["checksums"][place]):
                raise self._alteration(
                    self.records[number], f"the checksum of its context {place} is another"
                )
            self._is_checked[entry] = True
        return parts[0] if len(parts) == 1 else dequantise(*parts)

    def _find(self, ids: Sequence[int] | np.ndarray) -> int | None:
        key = np.frombuffer(key_of(ids), dtype=_KEY)[0]
        place = int(np.searchsorted(self._sorted, key))
        is_there = place < len(self._sorted) and self._sorted[place] == key
        return int(self._order[place]) if is_there else None

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
