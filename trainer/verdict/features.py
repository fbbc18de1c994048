"""What is known of rows besides their results, so that slices of them can be compared."""

from __future__ import annotations

import functools
import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from trainer.verdict.slices import MIN_ROWS, MOST_VALUES, Feature

Row = Mapping[str, Any]

_NAMES = {"id", "ids", "item", "piece", "passage_id", "answer_spans", "weight", "prediction"}
# Of a field with more different texts than this share of the rows no value is a slice.
_MOST_DIFFERENT = 0.5
_SCRIPT_LETTERS = 200  # of a text that are looked at


def features(rows: Sequence[Row]) -> dict[str, Feature]:
    """By name, a value for each row: of a text its words, its first word, its first two, and itself
    where texts repeat; of a list its items and their words; of a conversation its turns; a number
    or a truth value as it is; and the script that the longest text of a row is written in.

    Nothing that is the same in every row, and no name of a row.
    """
    columns: dict[str, list[Any]] = {}
    for number, row in enumerate(rows):
        values = {
            name: value
            for field, content in row.items()
            if field not in _NAMES
            for name, value in _values(field, content)
        }
        values["script"] = _script(row)
        for name, value in values.items():
            columns.setdefault(name, [None] * len(rows))[number] = value
    return {name: column for name, column in columns.items() if _is_feature(column)}


def _values(field: str, content: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(content, bool):
        yield field, "true" if content else "false"
    elif isinstance(content, (int, float)):
        yield field, _number(content)
    elif isinstance(content, str):
        yield from _of_text(field, content)
    elif isinstance(content, (list, tuple)):
        items = cast("Sequence[Any]", content)
        yield f"number of {field}", float(len(items))
        texts = [text for item in items for text in _texts(item)]
        yield f"words of {field}", float(sum(len(text.split()) for text in texts))
        asked = [item for item in items if isinstance(item, Mapping) and item.get("role") == "user"]
        if asked and isinstance(asked[0].get("content"), str):
            yield from _of_text("first question", asked[0]["content"])


def _number(value: float) -> float | None:
    """A number as a feature; None for one that is not finite, or too large for a float."""
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _of_text(field: str, text: str) -> Iterable[tuple[str, Any]]:
    words = text.split()
    yield field, text
    yield f"words of {field}", float(len(words))
    if len(words) > 1:
        yield f"first word of {field}", words[0].lower()
    if len(words) > 2:
        yield f"first two words of {field}", " ".join(words[:2]).lower()


def _texts(value: Any) -> Iterable[str]:
    """Every text in a value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in cast("Mapping[str, Any]", value).values():
            yield from _texts(one)
    elif isinstance(value, (list, tuple)):
        for one in cast("Sequence[Any]", value):
            yield from _texts(one)


def _script(row: Row) -> str | None:
    """The first word of the Unicode names of most letters of the longest text: "latin", "cjk"."""
    texts = _texts({key: value for key, value in row.items() if key not in _NAMES})
    longest = max(texts, key=len, default="")
    letters = [one for one in longest[: 5 * _SCRIPT_LETTERS] if one.isalpha()][:_SCRIPT_LETTERS]
    scripts = Counter(map(_script_of, letters))
    return scripts.most_common(1)[0][0] if scripts else None


@functools.cache
def _script_of(letter: str) -> str:
    return unicodedata.name(letter, "unknown").split()[0].lower()


def _is_feature(column: Sequence[Any]) -> bool:
    """Whether some slice of a column's values may have enough rows in it and outside it."""
    counts = Counter(column)
    if len(counts) < 2:
        return False
    if any(isinstance(value, str) for value in counts):
        repeats = [count for _, count in counts.most_common(MOST_VALUES) if count >= MIN_ROWS]
        return bool(repeats) and len(counts) <= max(MOST_VALUES, _MOST_DIFFERENT * len(column))
    return True
