"""Raw rows that remember which of their keys were read, so that a run names the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainer.data.left_out import Keys, current

_EMPTY: tuple[Any, ...] = (None, "", [], {})
# What readers know to be no content, even where another key names the row.
_KNOWN = frozenset(
    {"id", "_id", "qid", "query_id", "docid", "passage_id", "psg_id", "split", "metadata"}
)


class WatchedRow(dict[str, Any]):
    """A raw row. The first look at one of its keys counts the keys that it holds; `[]`, get() and
    `in` count a key as read, and so does nothing else.
    """

    def __init__(self, values: Mapping[str, Any], held: Iterable[str], keys: Keys) -> None:
        """held: the keys of the row as its file has them."""
        super().__init__(values)
        self._held: Iterable[str] | None = held
        self._keys = keys

    def __getitem__(self, name: str) -> Any:
        self._look_at(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._look_at(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._look_at(name)
        return super().get(name, default)

    def _look_at(self, name: Any) -> None:
        if self._held is not None:
            for one in self._held:
                self._keys.held[one] = self._keys.held.get(one, 0) + 1
            self._held = None
        self._keys.read.add(name)


def watched(
    row: dict[str, Any],
    *,
    raw: Mapping[str, Any] | None = None,
    sources: Iterable[str] = (),
    replaced: Iterable[str] = (),
) -> dict[str, Any]:
    """The row; while a split is read (left_out.reading), as a WatchedRow.

    raw: the row as its file has it, where columns were renamed: `sources` are the columns that were
    read for that, `replaced` those whose place another one took.
    """
    notes = current()
    if notes is None:
        return row
    raw, sources = row if raw is None else raw, set(sources)
    lost = {name for name in replaced if name not in sources}
    held = [_named(name, lost) for name, value in raw.items() if _is_content(name, value, sources)]
    return WatchedRow(row, held, notes.keys)


def _named(name: str, lost: set[str]) -> str:
    """The key under which a column is counted: one that was replaced is never read."""
    return f"{name} (replaced by data.columns)" if name in lost else str(name)


def _is_content(name: str, value: Any, sources: set[str]) -> bool:
    is_empty = isinstance(value, str | list | dict | None) and value in _EMPTY
    return name not in _KNOWN and name not in sources and not is_empty
