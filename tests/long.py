"""Which cases of a parametrized test `make test` runs; the others are for `make test-long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_but(short: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """The values as parameters: those in `short` for `make test`, every other one marked long.

    ValueError when `short` names one that is not there, which would leave `make test` without it.
    """
    short, values = list(short), list(values)
    if unknown := [one for one in short if one not in values]:
        raise ValueError(f"no such values: {unknown}")
    return [one if one in short else pytest.param(one, marks=pytest.mark.long) for one in values]


def cases_long_but(short: Iterable[tuple[Any, ...]], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """As long_but, of the tuples of values of several parameters."""
    short, cases = list(short), list(cases)
    long_but(short, cases)  # refuses what is not there
    return [pytest.param(*one, marks=() if one in short else pytest.mark.long) for one in cases]
