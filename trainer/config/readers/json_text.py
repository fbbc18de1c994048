"""Stricter reading of JSON, for json.loads: no key twice, no number that JSON does not know."""

from __future__ import annotations

from typing import Any


def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, as object_pairs_hook makes it. ValueError for a key that is stated twice."""
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"stated twice in one block: {', '.join(twice)}")
    return dict(pairs)


def finite(constant: str) -> float:
    """Refuses NaN and infinities, as parse_constant gets them. Always raises ValueError."""
    raise ValueError(f"{constant} is not a number that JSON knows")
