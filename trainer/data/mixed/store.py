"""The encoded rows of several sources as if they were one store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.left_out import Notes

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore


class MixedStore:
    """The rows of several stores, one after the other, with the methods of a TokenStore.

    Each source keeps a store of its own, in its own encoding, which runs without the mix share. A
    field that a row does not have is no field of that row.
    """

    def __init__(
        self, stores: Mapping[str, TokenStore], split: str, labels: Mapping[str, str]
    ) -> None:
        """stores: by the name of the source. labels: of the sources, in metrics."""
        self.stores = dict(stores)
        self.labels = [labels.get(name, name) for name in stores]
        self._list = list(self.stores.values())
        self._ends = np.cumsum([len(store) for store in self._list])
        self.lengths = np.concatenate([store.lengths for store in self._list])
        fields = [field for store in self._list for field in store.meta["fields"]]
        self.meta: dict[str, Any] = {"split": split, "fields": list(dict.fromkeys(fields))}

    @property
    def sources(self) -> tuple[int, ...]:
        """The rows of each source."""
        return tuple(len(store) for store in self._list)

    @property
    def digest(self) -> str:
        """sha256 of the names of the sources and the digests of their stores."""
        return mixed_digest({name: store.digest for name, store in self.stores.items()})

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        source = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[source]) - len(self._list[source])
        return self._list[source][index - first]

    def summary(self) -> dict[str, Any]:
        """Each source's summary and digest, and what they are together."""
        of_sources = {
            name: {**store.summary(), "digest": store.digest} for name, store in self.stores.items()
        }
        tokens: dict[str, int] = {}
        for one in of_sources.values():
            for field, count in one["tokens"].items():
                tokens[field] = tokens.get(field, 0) + count
        return {
            "rows": len(self),
            "tokens": tokens,
            "truncated_rows": sum(one["truncated_rows"] for one in of_sources.values()),
            "sources": of_sources,
        }

    def lost_labels(self) -> tuple[int, int]:
        pairs = [store.lost_labels() for store in self._list]
        return sum(lost for lost, _ in pairs), sum(of for _, of in pairs)

    def row_hashes(self, fields: Sequence[str]) -> np.ndarray:
        hashes = [
            store.row_hashes([name for name in fields if name in store.meta["fields"]])
            for store in self._list
        ]
        return np.concatenate(hashes)

    def raw_hashes(self) -> np.ndarray | None:
        hashes = [store.raw_hashes() for store in self._list]
        parts = [one for one in hashes if one is not None]
        return np.concatenate(parts) if len(parts) == len(hashes) else None

    def cuts(self) -> dict[str, dict[str, Any]]:
        """What limits cut, added up over the sources."""
        together: dict[str, dict[str, Any]] = {}
        for store in self._list:
            for name, counts in store.cuts().items():
                before = together.get(name)
                if before is None:
                    together[name] = dict(counts)
                    continue
                for key in ("texts", "texts_cut", "tokens", "tokens_cut"):
                    before[key] += counts[key]
        return together

    def notes(self) -> Notes:
        """The notes of each store are gathered when it is opened, under its own name."""
        return Notes()

    def close(self) -> None:
        """Close the store of every source."""
        for store in self._list:
            store.close()

    def axes(self, fields: Sequence[str] = ()) -> np.ndarray:
        """(rows, axes) int64: the sizes of each row in these fields; without any, its length."""
        if not fields:
            return np.asarray(self.lengths, dtype=np.int64)[:, None]
        return np.stack([self.sizes(field) for field in fields], axis=1)

    def sizes(self, field: str) -> np.ndarray:
        """(rows,) int64: the number of ids of each row in `field`, 0 where a row has no such
        field.
        """
        sizes = [
            store.sizes(field) if field in store.meta["fields"] else np.zeros(len(store), np.int64)
            for store in self._list
        ]
        return np.concatenate(sizes)

    def texts(self, field: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all rows in `field`, and where those of each row begin in them."""
        ids, starts = zip(*(store.texts(field) for store in self._list), strict=True)
        ends = np.cumsum([0, *map(len, ids)])
        moved = [of_store[:-1] + end for of_store, end in zip(starts, ends[:-1], strict=True)]
        return np.concatenate(ids), np.concatenate([*moved, ends[-1:]])

    def numbers(self, field: str) -> np.ndarray:
        return np.concatenate([store.numbers(field) for store in self._list])


def mixed_digest(digests: Mapping[str, str]) -> str:
    """sha256 of the digests of a split's sources, by their names."""
    return hashlib.sha256(json.dumps(list(digests.items())).encode()).hexdigest()


def sources_in(store: object) -> tuple[int, ...]:
    """The rows of each source of a mixed store; () of any other store."""
    return store.sources if isinstance(store, MixedStore) else ()


def parts_of(store: object, num_rows: int) -> Iterator[tuple[str | None, range]]:
    """(label of a source, its rows) among the first `num_rows` of a store; (None, all of them) of a
    store without sources, or of a split that none of them has.
    """
    if not isinstance(store, MixedStore) or store.labels == [store.meta["split"]]:
        yield None, range(num_rows)
        return
    first = 0
    for label, count in zip(store.labels, store.sources, strict=True):
        rows = range(first, min(first + count, num_rows))
        first += count
        if rows:
            yield label, rows
