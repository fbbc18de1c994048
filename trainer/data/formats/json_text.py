"""A JSON text to its value, for all that other people wrote: what no program could use is refused.

Refused are, besides malformed JSON: half of a surrogate pair (an emoji that was cut in two is no
text to a tokenizer), lists within lists within lists beyond 100, integers beyond 64 bits and
other numbers that few programs read, and a key that stands twice in an object, of which one value
would be lost. NaN, which Python and pandas write for a missing value, is null.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, cast

MAX_DEPTH = 100  # lists and objects inside each other; Python itself fails from about 980
TOO_DEEP = f"lists and objects nested deeper than {MAX_DEPTH} levels; write it flatter"
INFINITE = "a number beyond those of 64 bits, which is infinite; write it as text"
TOO_LONG = "an integer beyond 64 bits; write it as text"
_MOST = 2**63 - 1
_SAFE_DIGITS = 18
# half of a pair: a high one without its low one, or the other way round
_HALF = re.compile(r"[\ud800-\udfff]")


class BadJson(ValueError):
    """The text is no JSON that can be used; the message says why, without a full stop."""


class MalformedJson(BadJson):
    """The text is no JSON at all."""


def json_value(text: str) -> Any:
    """The value of a JSON text. BadJson for one that cannot be used."""
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise MalformedJson(f"malformed JSON ({error.msg}, column {error.colno})") from None
    except BadJson:
        raise
    except RecursionError:
        raise BadJson(TOO_DEEP) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and is_too_deep(value):
        raise BadJson(TOO_DEEP)
    if "\\u" in text and (half := half_of_pair(value)) is not None:
        raise BadJson(half)
    return value


def preview(value: Any) -> str:
    """The value as text for messages, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects are nested beyond MAX_DEPTH."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return False
    return True


def half_of_pair(value: Any) -> str | None:
    """What is wrong with a text that holds half of a surrogate pair: its own, or one inside the
    value; None when there is none.
    """
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        name, one = waiting.pop()
        if isinstance(one, str) and (match := _HALF.search(one)):
            of_key = f"{name!r} holds " if name else ""
            return (
                f"{of_key}\\u{ord(match[0]):04x}, half of a surrogate pair, as of an emoji that "
                "was cut in two; take it out"
            )
        if isinstance(one, dict):
            for key, inner in cast("dict[str, Any]", one).items():
                waiting += [("a key", key), (key, inner)]
        elif isinstance(one, list):
            waiting += [(name, inner) for inner in cast("list[Any]", one)]
    return None


def _integer(text: str) -> int:
    if len(text) > _SAFE_DIGITS and (len(text) > 20 or abs(int(text)) > _MOST):
        raise BadJson(TOO_LONG)
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise BadJson(INFINITE)
    return value


def _constant(name: str) -> None:
    """NaN is a missing value."""
    if name != "NaN":
        raise BadJson(INFINITE)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise BadJson(f"the key {twice!a} stands twice in one object; leave one")
    return values


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast("dict[Any, Any]", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant
)
