"""The steps whose rows may change places."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Pool:
    """Some steps whose rows may change places, usually those of an epoch."""

    first: int  # the first step; with `source`, how many rows of it were read before
    count: int  # of steps
    source: int | None = None  # the source of all of these steps, where each step has one


class Pools(Protocol):
    """The epochs of a run, as far as arranged steps need them."""

    @property
    def seed(self) -> int | None: ...

    @property
    def steps(self) -> Fraction:
        """Steps of one epoch."""
        ...

    def pool(self, step: int) -> tuple[Pool, int]:
        """The pool that a step belongs to, and the place of the step in it."""
        ...

    def rows_of(self, pool: Pool) -> np.ndarray:
        """(steps, rows of a step) the rows of a pool as the epoch has them."""
        ...
