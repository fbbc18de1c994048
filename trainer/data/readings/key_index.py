"""Which shard holds an entry, by the entry's key of 32 bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from trainer.data.readings.row_store import KEY_BYTES

# numpy searches among these; it ignores zeros at their end, on both sides alike
_KEY = f"S{KEY_BYTES}"


class KeyIndex:
    """The sorted keys of several shards."""

    def __init__(self, keys: Sequence[Tensor]) -> None:
        """keys: (entries, 32) uint8 of every shard."""
        sizes = [len(of_shard) for of_shard in keys]
        every = [of_shard.numpy().view(_KEY)[:, 0] for of_shard in keys]
        joined = np.concatenate(every) if every else np.empty(0, _KEY)
        self._order = np.argsort(joined, kind="stable")
        self._sorted = joined[self._order]
        self._shard_of = np.repeat(np.arange(len(sizes)), sizes)
        self._first_of = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return len(self._sorted)

    def find(self, key: bytes) -> tuple[int, int] | None:
        """(shard, entry of it) of a key, the first of several; None when no shard has it."""
        target = np.frombuffer(key, dtype=_KEY)[0]
        place = int(np.searchsorted(self._sorted, target))
        if place == len(self._sorted) or self._sorted[place] != target:
            return None
        entry = int(self._order[place])
        shard = int(self._shard_of[entry])
        return shard, entry - int(self._first_of[shard])
