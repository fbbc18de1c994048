"""What differs between dictionaries, and how a person reads it. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

MOST_DIFFERENCES = 4  # in the name of an experiment
_LONGEST_VALUE = 24  # characters


def names_by_difference(experiments: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells each of these experiments from the others: "lr=0.0003 seed=2"; "" where nothing
    does, or much does.
    """
    flat = [flatten(values) for values in experiments]
    keys = differing(flat)
    if len(keys) > MOST_DIFFERENCES:
        return [""] * len(flat)
    names = short_names(keys)
    return [
        " ".join(
            f"{name}={_cut(written(values[key]))}"
            for name, key in zip(names, keys, strict=True)
            if key in values
        )
        for values in flat
    ]


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dictionary as one of dotted keys; lists and empty dictionaries stay values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differing(dictionaries: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Keys that are absent somewhere or differ in value, in order of appearance."""
    keys = dict.fromkeys(key for values in dictionaries for key in values)
    return tuple(key for key in keys if _differs(dictionaries, key))


_ABSENT = object()
_EXACT = (str, int, bool, type(None))  # of one type, equal values are written equally


def _differs(dictionaries: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Whether a key is absent in some of these, or has another value than in the first one."""
    first = dictionaries[0].get(key, _ABSENT)
    kind, identity = type(first), _identity(first)
    is_exact = kind in _EXACT
    for values in dictionaries:
        value = values.get(key, _ABSENT)
        if is_exact and type(value) is kind and value == first:
            continue
        if _identity(value) != identity:
            return True
    return False


def _identity(value: Any) -> str:
    # 1, 1.0, "1" and True differ
    return "" if value is _ABSENT else json.dumps(value, sort_keys=True, default=str)


def short_names(keys: Sequence[str]) -> list[str]:
    """The last part of each dotted key, or as many parts as tell it from the others."""
    names: list[str] = []
    for key in keys:
        parts = key.split(".")
        others = [other.split(".") for other in keys if other != key]
        lengths = (
            n for n in range(1, len(parts)) if all(other[-n:] != parts[-n:] for other in others)
        )
        names.append(".".join(parts[-next(lengths, len(parts)) :]))
    return names


def written(value: Any) -> str:
    """A hyper-parameter as one reads it: text bare, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
