"""The id of an experiment: a digest of its dictionary, the same as haven's. Imports no torch."""

from __future__ import annotations

import enum
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from trainer.errors import ConfigError

_HALF = re.compile("[\ud800-\udfff]")
_OF_HALF = (
    "holds half of a surrogate pair, as of an emoji that was cut in two, which no file can. Take "
    "it out."
)


def canonical_json(values: Any) -> str:
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
    foreign = list(_foreign(values, ""))
    if foreign:
        raise ConfigError(
            f"experiment dictionary: {len(foreign)} mistake(s), for it holds what JSON cannot\n"
            + "\n".join(f"  {line}" for line in foreign)
        )
    # plain JSON types: str(numpy.float64) inside a list depends on the numpy version
    return _haven_hash(json.loads(json.dumps(values)))


def base_id(values: Mapping[str, Any]) -> str | None:
    """The id of the experiment that must have been trained before this one: the run that it goes on
    with, else the one whose model it begins with; None when it needs neither.
    """
    for key in ("continues", "base"):  # what goes on needs no more than the run before had
        block = values.get(key)
        before = cast("dict[str, Any]", block).get("experiment") if isinstance(block, dict) else 0
        if isinstance(before, dict):
            return exp_id(cast("dict[str, Any]", before))
    return None


def teacher_id(values: Mapping[str, Any]) -> str | None:
    """The id of the experiment whose model is the teacher of this one; None when there is none."""
    teacher = values.get("teacher")
    return base_id(cast("dict[str, Any]", teacher)) if isinstance(teacher, dict) else None


def base_label(values: Mapping[str, Any]) -> str:
    """A short name of the model that an experiment begins with, for people: "starcoderbase-1b",
    "random t5", "experiment 0f3a...".
    """
    base = values.get("base")
    if isinstance(base, str):  # a folder, a package's folder, or a name of the Hub
        return base.partition("#")[0].rstrip("/").rpartition("/")[2]
    before = base_id(values)
    if before is not None:
        return f"experiment {before[:12]}"
    config = cast("dict[str, Any]", base).get("config") if isinstance(base, dict) else None
    family = cast("dict[str, Any]", config).get("model_type") if isinstance(config, dict) else None
    return f"random {family or 'weights'}"


def _foreign(value: Any, path: str) -> Iterator[str]:
    """A line for each part of a value that a JSON file would not give back as it is: where it
    stands, what it is, and what to write instead.
    """
    if isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            inner = f"{path}.{key}" if path else str(key)
            where = f"in {path}" if path else "at the top level"
            if not isinstance(key, str):
                yield f"key {key!r} {where} is {_kind(key)}. Write it as text: {str(key)!r}."
            elif isinstance(key, enum.Enum):
                yield f"key {key!r} {where} is an Enum. Write its value: {key.value!r}."
            elif _HALF.search(key):
                yield f"key {key!r} {where} {_OF_HALF}"
            yield from _foreign(item, inner.encode(errors="backslashreplace").decode())
    elif isinstance(value, list):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _foreign(item, f"{path}[{index}]")
    elif isinstance(value, enum.Enum):
        yield f"{path or 'it'} is an Enum, {value!r}. Write its value: {value.value!r}."
    elif isinstance(value, str) and _HALF.search(value):
        yield f"{path or 'it'}, {value!r}, {_OF_HALF}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path or 'it'} is {value}. Want a finite number."
    elif value is not None and not isinstance(value, (str, int, float)):
        yield f"{path or 'it'} is {_kind(value)}, {value!r}. {_instead(value)}"


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _instead(value: Any) -> str:
    if isinstance(value, (tuple, set, frozenset)):
        return "Write a list: [...]."
    if isinstance(value, os.PathLike):
        return f"Write its text: {os.fspath(cast('os.PathLike[str]', value))!r}."
    if callable(getattr(value, "item", None)):
        return "Write the plain number: value.item()."
    return "Use text, numbers, True, False, None, lists and dictionaries."


def _without_dot(key: str) -> str:
    """What to write in place of a key with a dot: "messages[].role" has a spelling without one."""
    outer, brackets, inner = key.partition("[].")
    if not brackets:
        return "Rename it."
    return f'Write {{"{outer}": {{"from": the column of the list, "{inner}": its name there}}}}.'


# In `data`, the keys below these are names of files. haven refuses a dot in a key and so gives such
# a dictionary no id that this one could differ from.
_NAMES_OF_FILES = ("mix", "mixing")


def _haven_hash(
    values: dict[str, Any], *, is_data: bool = False, may_have_dots: bool = False
) -> str:
    text = ""
    for key in sorted(values):
        value = values[key]
        if "." in key and not may_have_dots:
            raise ConfigError(
                f"experiment dictionary: key {key!r} holds a dot, which haven refuses. "
                f"{_without_dot(key)}"
            )
        below = {"is_data": key == "data", "may_have_dots": may_have_dots}
        below["may_have_dots"] |= is_data and key in _NAMES_OF_FILES
        if isinstance(value, dict):
            value = _haven_hash(cast("dict[str, Any]", value), **below)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            items = cast("list[Any]", value)
            if not all(isinstance(item, dict) for item in items):
                raise ConfigError(
                    f"experiment dictionary: list {key!r} mixes dictionaries and other values."
                )
            value = "".join(_haven_hash(item, **below) for item in items)
        text += f"{key}/{value}"
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
