"""Steps that are filled row by row, so that no step has two rows that share something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from trainer.data.arranged.shared import Shared
from trainer.errors import DataError

# T steps, K kinds of rows: a step keeps its number of rows of each kind


class FilledSteps:
    """Some steps with room for rows."""

    def __init__(
        self, room_TK: np.ndarray, shared: Shared | None, kind_of: Callable[[int], int]
    ) -> None:
        self._room: list[list[int]] = room_TK.tolist()
        self._shared, self._kind_of = shared, kind_of
        self._count = len(self._room)
        self._rows: list[list[int]] = [[] for _ in self._room]
        self._held: list[set[int]] = [set() for _ in self._room]  # shared things, by step
        self._uses: Counter[int] = Counter()  # in how many steps a shared thing is
        # by kind: for each step, one at or behind it from which the search for room goes on
        self._next = [list(range(self._count + 1)) for _ in range(room_TK.shape[1])]
        self._turn = 0  # the candidate that the next repetition begins with

    def fill(self, rows: Sequence[int]) -> list[int]:
        """Put each row into the first step with room that stands behind all steps in which
        something of it is. Returns the rows that no step can take.
        """
        last: dict[int, int] = {}
        late: list[int] = []
        for row in rows:
            things = self._of(row)
            behind = 1 + max((last.get(thing, -1) for thing in things), default=-1)
            step = self._with_room(self._kind_of(row), behind)
            if step == self._count:
                late.append(row)
                continue
            self._add(row, step)
            for thing in things:
                last[thing] = step
        return [row for row in late if not self._exchange(row)]

    def repeat(self, *candidates: Sequence[int]) -> None:
        """Fill the room that is left with rows that stand in other steps, of the first list where
        it has some that fit. DataError where no row fits.
        """
        for step, room in enumerate(self._room):
            for kind, count in enumerate(list(room)):
                for _ in range(count):
                    row = self._fitting(step, kind, candidates)
                    if row is None:
                        size = len(self._rows[step]) + sum(room)
                        raise DataError(
                            f"data.batches.distinct: got a step of {size} rows for which the data "
                            f"have only {len(self._rows[step])} without a common query or positive,"
                            f" want {size}. Use a smaller train.global_batch, or leave it out."
                        )
                    self._add(row, step)

    def rows(self) -> np.ndarray:
        """(T, rows of a step) the rows of the steps, now that no room is left."""
        return np.array(self._rows, dtype=np.int64).reshape(self._count, -1)

    def _exchange(self, row: int) -> bool:
        """Put a row into a step with room, or in the place of a row that can move to such a step;
        False where that cannot be done.
        """
        kind, things = self._kind_of(row), self._of(row)
        if any(self._uses[thing] >= self._count for thing in things):
            return False  # every step holds something of it
        hole = self._with_room(kind, 0)
        while hole < self._count:
            if self._held[hole].isdisjoint(things):
                self._add(row, hole)
                return True
            for step in range(self._count):
                if not self._held[step].isdisjoint(things):
                    continue
                moved = next((one for one in self._rows[step] if self._fits(one, hole, kind)), None)
                if moved is not None:
                    self._take(moved, step)
                    self._put(row, step)
                    self._add(moved, hole)
                    return True
            hole = self._with_room(kind, hole + 1)
        return False

    def _fitting(self, step: int, kind: int, candidates: Sequence[Sequence[int]]) -> int | None:
        for rows in candidates:
            for offset in range(len(rows)):
                row = int(rows[(self._turn + offset) % len(rows)])
                if self._fits(row, step, kind):
                    self._turn += offset + 1
                    return row
        return None

    def _fits(self, row: int, step: int, kind: int) -> bool:
        return (
            self._kind_of(row) == kind
            and row not in self._rows[step]
            and self._held[step].isdisjoint(self._of(row))
        )

    def _of(self, row: int) -> Sequence[int]:
        return () if self._shared is None else self._shared.of(row)

    def _add(self, row: int, step: int) -> None:
        kind = self._kind_of(row)
        self._put(row, step)
        self._room[step][kind] -= 1
        if not self._room[step][kind]:
            self._next[kind][step] = step + 1

    def _put(self, row: int, step: int) -> None:
        self._rows[step].append(row)
        self._held[step].update(self._of(row))
        self._uses.update(self._of(row))

    def _take(self, row: int, step: int) -> None:
        self._rows[step].remove(row)
        self._held[step].difference_update(self._of(row))
        self._uses.subtract(self._of(row))

    def _with_room(self, kind: int, start: int) -> int:
        """The first step from `start` on with room for a row of a kind; T: none has."""
        following, step = self._next[kind], min(start, self._count)
        root = step
        while following[root] != root:
            root = following[root]
        while following[step] != root:  # the next search is short
            following[step], step = root, following[step]
        return root
