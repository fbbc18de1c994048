"""The id of an experiment: a digest of its dictionary, the same as haven's. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from typing import Any, cast

from trainer.errors import ConfigError


def canonical_json(values: dict[str, Any]) -> str:
    """`values` as sorted, compact JSON: the text of which its sha256 digest is taken."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(values: dict[str, Any]) -> str:
    """sha256 of the canonical JSON, 64 hex characters.

    Unlike exp_id it cannot collide by concatenation.
    """
    return hashlib.sha256(canonical_json(values).encode()).hexdigest()


def exp_id(values: dict[str, Any]) -> str:
    """The folder name of an experiment, 32 hex characters: haven's hash_dict, bit for bit.

    Raises ConfigError for what would not survive a JSON round trip (tuples, non-string keys, NaN)
    or what haven refuses (a dot in a key, a list that mixes dictionaries and other values). Source:
    haven-ai 0.7.3, md5 over "key/value" of the sorted keys without a separator.
    """
    try:
        copied = json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"experiment dictionary: {error}. Use only what JSON can hold.") from None
    if copied != values:
        raise ConfigError(
            "experiment dictionary changes when written as JSON (a key that is not a string?)."
        )
    # plain JSON types: str(numpy.float64) inside a list depends on the numpy version
    return _haven_hash(copied)


def _haven_hash(values: dict[str, Any]) -> str:
    text = ""
    for key in sorted(values):
        value = values[key]
        if "." in key:
            raise ConfigError(
                f"experiment dictionary: key {key!r} holds a dot, which haven refuses. Rename it."
            )
        if isinstance(value, dict):
            value = _haven_hash(cast("dict[str, Any]", value))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            items = cast("list[Any]", value)
            if not all(isinstance(item, dict) for item in items):
                raise ConfigError(
                    f"experiment dictionary: list {key!r} mixes dictionaries and other values."
                )
            value = "".join(_haven_hash(item) for item in items)
        text += f"{key}/{value}"
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
