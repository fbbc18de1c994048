"""Stricter reading of JSON, for json.loads: no key twice, no number that JSON does not know."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError


def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, as object_pairs_hook makes it. ValueError for a key that is stated twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = sorted(name for name, count in counts.items() if count > 1)
        raise ValueError(f"stated twice in one block: {', '.join(twice)}")
    return values


def finite(constant: str) -> float:
    """Refuses NaN and infinities, as parse_constant gets them. Always raises ValueError."""
    raise ValueError(f"{constant} is not a number that JSON knows")


def read(text: str, path: Path) -> Any:
    """The values of a JSON text. ConfigError with file and line for what is no JSON."""
    try:
        return json.loads(text, object_pairs_hook=without_twins, parse_constant=finite)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}:{error.lineno}: it is not JSON ({error.msg}, column {error.colno}). Correct "
            "the line."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}. Correct the file.") from None
