"""Reads single rows of a training split through the readers that read whole splits.

Inside reading() the reader of a person's own rows gives a few raw rows, which were picked from
their places in the files, instead of all. What a reader learns from the first rows of a split
(their format) it learns from `Picked.first`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Placed = tuple[str, dict[str, Any]]  # the place of a row, for messages, and the row


@dataclass(frozen=True)
class Picked:
    """Raw rows of a split that follow one another."""

    number: int  # of the first one among the rows of the split, from 0
    rows: Sequence[Placed]
    first: Sequence[Placed]  # the first rows of the split
    what: str  # the file or data set, for messages
    # what readers have learnt from the first rows, by their own keys: the same for every row
    learnt: dict[str, Any]


class Sought(Exception):
    """Raised by the reader of a split inside seeking(), instead of reading: where its rows are."""

    def __init__(self, source: Path | tuple[str, str]) -> None:
        """source: a file or folder; (data set, split) of a data set."""
        super().__init__(str(source))
        self.source = source


_picked: ContextVar[Picked | Sought | None] = ContextVar("picked", default=None)
_ANY = Sought(Path())


def current() -> Picked | None:
    """The rows that are to be read instead of a split; None: the whole split is."""
    picked = _picked.get()
    return picked if isinstance(picked, Picked) else None


def tell(source: Path | tuple[str, str]) -> None:
    """Say where the rows of a split are; inside seeking() this ends the reading (Sought)."""
    if _picked.get() is _ANY:
        raise Sought(source)


@contextmanager
def reading(picked: Picked) -> Iterator[None]:
    """Inside, the training split consists of these rows."""
    token = _picked.set(picked)
    try:
        yield
    finally:
        _picked.reset(token)


@contextmanager
def seeking() -> Iterator[None]:
    """Inside, the reader of a split raises Sought."""
    token = _picked.set(_ANY)
    try:
        yield
    finally:
        _picked.reset(token)


def enumerated(items: Iterable[T]) -> Iterator[tuple[int, T]]:
    """`enumerate` of the rows of a split, which counts on where only some are read."""
    picked = current()
    return enumerate(items, start=0 if picked is None else picked.number)
