"""What a sweep gives one key: values to choose from, or a range. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

from trainer.config.userfile import kind
from trainer.errors import ConfigError, nearest

DIGITS = 4  # of a number that is drawn from a range: it stands in a dictionary that people read
RANGES = ("uniform", "log_uniform", "integer")
FORMS = ("choice", *RANGES)


@dataclass(frozen=True)
class Choice:
    """Values to choose from."""

    values: tuple[Any, ...]

    def at(self, place: float) -> Any:
        """The value at a place from 0 (the first) up to 1."""
        return self.values[min(int(place * len(self.values)), len(self.values) - 1)]


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float
    is_log: bool = False
    is_whole: bool = False

    def at(self, place: float) -> float | int:
        """The number at a place from 0 (the lowest) up to 1, in DIGITS digits."""
        if self.is_whole:
            low, high = int(self.low), int(self.high)
            return min(low + int(place * (high - low + 1)), high)
        if self.is_log:
            low, high = math.log(self.low), math.log(self.high)
            return self.rounded(math.exp(low + place * (high - low)))
        return self.rounded(self.low + place * (self.high - self.low))

    def rounded(self, value: float) -> float:
        """A number in DIGITS digits, inside of the range."""
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)


Axis = Choice | Range


def axis(key: str, form: Any) -> Axis:
    """What sweep[key] says. ConfigError for anything but a list of values, {"choice": [...]}, and a
    range such as {"log_uniform": [1e-5, 1e-3]}.
    """
    where = f"sweep[{key!r}]"
    if isinstance(form, dict):
        stated = cast("dict[Any, Any]", form)
        name = next(iter(stated), None)
        if len(stated) != 1 or name not in FORMS:
            hint = "" if name is None else f" {nearest(str(name), list(FORMS))}"
            raise ConfigError(
                f"{where}: got a dictionary with the keys {', '.join(map(repr, stated)) or 'none'},"
                f" want exactly one of {', '.join(FORMS)}.{hint}"
            )
        if name != "choice":
            return _range(where, str(name), stated[name])
        form = stated[name]
    if not isinstance(form, list):
        raise ConfigError(
            f"{where}: got {kind(form)}, want a list of values, or a range such as "
            '{"log_uniform": [1e-5, 1e-3]}.'
        )
    values = cast("list[Any]", form)
    if not values:
        raise ConfigError(
            f"{where}: got an empty list, want at least one value. Leave the key out to keep what "
            "the dictionary says."
        )
    twice = [value for place, value in enumerate(values) if value in values[:place]]
    if twice:
        raise ConfigError(f"{where}: got {twice[0]!r} twice, want each value once. Remove one.")
    return Choice(tuple(values))


def _range(where: str, name: str, bounds: Any) -> Range:
    is_pair = isinstance(bounds, list) and len(cast("list[Any]", bounds)) == 2
    numbers = [
        bound
        for bound in cast("list[Any]", bounds if is_pair else [])
        if type(bound) in (int, float)
    ]
    if len(numbers) != 2 or not all(map(math.isfinite, numbers)) or numbers[0] >= numbers[1]:
        raise ConfigError(
            f"{where}: {name} got {bounds!r}, want two numbers, the lower one first: "
            f'{{"{name}": [{"1, 8" if name == "integer" else "1e-5, 1e-3"}]}}.'
        )
    low, high = numbers
    if name == "log_uniform" and low <= 0:
        raise ConfigError(f"{where}: log_uniform got {bounds!r}, want numbers above 0.")
    if name == "integer" and not all(isinstance(bound, int) for bound in numbers):
        raise ConfigError(f"{where}: integer got {bounds!r}, want whole numbers.")
    return Range(low, high, is_log=name == "log_uniform", is_whole=name == "integer")
