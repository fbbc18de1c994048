"""The arguments of functions, checked as the commands check theirs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from trainer.errors import ConfigError, nearest


def dictionary(values: Any) -> dict[str, Any]:
    """A copy of an experiment's dictionary. ConfigError for anything else."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"the experiment is a {type(values).__name__}, want its dictionary: "
            '{"task": ..., "train": {...}, ...}. docs/keys.md lists the keys.'
        )
    return copy.deepcopy(dict(values))


def run_flags(data: Any, flags: Mapping[str, Any]) -> Any:
    """The RunFlags of a call: `data` is --data_path, and `flags` are others by their names.

    ConfigError with every mistake: a name that is no flag, a value of another type, or below the
    least.
    """
    from trainer.config.flags import RunFlags

    kinds = get_type_hints(RunFlags, include_extras=True)
    legal = sorted(kinds.keys() - {"data_path"} | {"data"})
    mistakes = [
        f"{name}={value!r}: there is no such flag. {nearest(name, legal)}"
        for name, value in flags.items()
        if name not in legal
    ]
    values = {"data_path": data, **{name: flags[name] for name in flags if name in kinds}}
    checked: dict[str, Any] = {}
    for name, value in values.items():
        kind, *declarations = get_args(kinds[name])
        try:
            checked[name] = _check(value, kind, declarations)
        except ValueError as error:
            label = "data" if name == "data_path" else name
            mistakes.append(f"{label}={value!r}: {error}.")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return RunFlags(**checked)


def refuse_below_one(**numbers: int | None) -> None:
    """ConfigError for numbers that are no counts: want None, or an integer of at least 1."""
    wrong = [
        f"{name}={number!r}"
        for name, number in numbers.items()
        if number is not None and (type(number) is not int or number < 1)
    ]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)}: want a whole number of at least 1.")


def _check(value: Any, kind: Any, declarations: list[Any]) -> Any:
    """The value as `kind`. ValueError says what is wanted."""
    from pydantic import TypeAdapter, ValidationError

    try:
        checked = TypeAdapter(kind).validate_python(value, strict=not _is_path(kind))
    except ValidationError:
        names = [one.__name__ for one in get_args(kind) or (kind,) if one is not type(None)]
        want = "a path" if _is_path(kind) else f"a value of type {' or '.join(names)}"
        raise ValueError(f"want {want}") from None
    least = next((one.min for one in declarations if getattr(one, "min", None) is not None), None)
    if least is not None and checked is not None and checked < least:
        raise ValueError(f"want at least {least}")
    return checked


def _is_path(kind: Any) -> bool:
    return kind is Path or Path in get_args(kind)
