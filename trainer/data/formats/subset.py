"""A part of a split, behind its name, as Hugging Face `datasets` writes it: "train.jsonl[:100]" is
its first hundred rows, "train[100:200]" the next, "[:10%]" a tenth of the usual file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from trainer.errors import DataError

Item = TypeVar("Item")
_PART = re.compile(r"(?P<name>.*)\[(?P<part>[^\[\]/]*)\]\Z", re.DOTALL)
_BOUNDS = re.compile(r"\s*(-?\d+%?)?\s*:\s*(-?\d+%?)?\s*\Z")


@dataclass(frozen=True)
class Subset:
    """From which row to which; a bound is a number of rows, a share such as "10%", or None."""

    text: str  # as it was written: "[:100]"
    start: str | None
    stop: str | None

    @property
    def needs_total(self) -> bool:
        """Whether the number of all rows decides: of a share, or of rows from the end."""
        return any(
            bound is not None and (bound.startswith("-") or bound.endswith("%"))
            for bound in (self.start, self.stop)
        )

    def rows(self, total: int) -> range:
        """The rows of `total`, from 0. Shares are rounded to the nearest row."""
        bounds = [_row(bound, total) for bound in (self.start, self.stop)]
        return range(*slice(*bounds).indices(total))


def split_name(name: str) -> tuple[str, Subset | None]:
    """A name without its part, and the part; None where it has none.

    DataError for a part that is none.
    """
    match = _PART.match(name)
    if match is None:
        return name, None
    bounds = _BOUNDS.match(match["part"])
    if bounds is None:
        raise DataError(
            f"{name}: got [{match['part']}], want a part such as [:100], [100:200], [:10%] or "
            "[-100:]. Both numbers count rows from 0; a file whose name ends so is renamed."
        )
    return match["name"], Subset(f"[{match['part']}]", *bounds.groups())


def of_subset(
    read: Callable[[Path], Iterator[Item]],
) -> Callable[[Path], Iterator[Item]]:
    """The reader of a file's rows, which also takes a path with a part behind it.

    A file of that very name comes first. DataError for a part without a row.
    """

    @functools.wraps(read)
    def rows(path: Path) -> Iterator[Item]:
        name, subset = (path.name, None) if path.exists() else split_name(path.name)
        if subset is None:
            yield from read(path)
            return
        whole = path.with_name(name)
        if subset.needs_total:
            span = subset.rows(sum(1 for _ in read(whole)))
            start, stop = span.start, span.stop
        else:
            start, stop = int(subset.start or 0), None if subset.stop is None else int(subset.stop)
        is_empty = True
        for item in islice(read(whole), start, stop):
            is_empty = False
            yield item
        if is_empty:
            raise DataError(f"{whole} has no row in {subset.text}. Name rows that it has.")

    return rows


def _row(bound: str | None, total: int) -> int | None:
    if bound is None:
        return None
    return round(int(bound[:-1]) * total / 100) if bound.endswith("%") else int(bound)
