"""What several rows hold, such as a passage that is the positive of several queries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Shared:
    """For each row the numbers of the things that it holds and that other rows hold, too."""

    def __init__(self, rows: np.ndarray, things: np.ndarray, *, num_rows: int) -> None:
        """rows, things (pairs,): row rows[i] holds thing things[i], which is any 64-bit number."""
        _, thing = np.unique(things, return_inverse=True)
        many = int(thing.max(initial=0)) + 1
        row, thing = np.divmod(np.unique(rows.astype(np.int64) * many + thing), many)
        is_shared = np.bincount(thing)[thing] > 1
        held_by = np.bincount(row[is_shared], minlength=num_rows)
        self._starts: list[int] = [0, *np.cumsum(held_by).tolist()]
        self._things: list[int] = thing[is_shared].tolist()  # row after row
        self.num_rows = int((held_by > 0).sum())  # rows that share something

    def of(self, row: int) -> Sequence[int]:
        """The things of a row that other rows hold, too."""
        return self._things[self._starts[row] : self._starts[row + 1]]
