"""When two texts ask the same: equal but for case, white space and the form of Unicode."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from typing import Any, cast

# what names a row or a passage, or ranks a passage; and what a task puts "beside" what a row says
_NAMES = {"id", "item", "passage_id", "score", "beside"}

# white space, and characters of no width: the joiners and marks of Unicode, a byte order mark
_INVISIBLE = re.compile(r"[\s\u00ad\u180e\u200b-\u200f\u2060-\u2064\ufeff]*")


def is_blank(text: str) -> bool:
    """Whether nothing of a text can be seen."""
    return _INVISIBLE.fullmatch(text) is not None


def normal_form(text: str) -> str:
    """The text in NFKC (full-width letters, ligatures and composed accents as plain ones), with
    case folded and single blanks; equal for texts that a split must not part.
    """
    if text.isascii():
        return " ".join(text.lower().split())
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(folded.split())


def normal_value(value: Any) -> Any:
    """normal_form of every text in lists and objects; a list of one item becomes that item. Other
    values become texts, so that the result is plain JSON.
    """
    if isinstance(value, str):
        return normal_form(value)
    if isinstance(value, list):
        values = [normal_value(one) for one in cast("list[Any]", value)]
        return values[0] if len(values) == 1 else values
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value).items()
        return {str(key): normal_value(one) for key, one in pairs}
    return str(value)


def row_hash(row: Any) -> int:
    """64 bits of a row without its names, equal for rows whose texts have one normal form."""
    text = json.dumps(_without_names(row), sort_keys=True, ensure_ascii=False, default=str)
    content = normal_form(text).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _without_names(row: Any) -> Any:
    """The row without the names at its top and in the passages of its lists; a key further inside,
    such as an argument of a tool's call, is a part of what the row says.
    """
    if not isinstance(row, dict):
        return _plain(row)
    values: dict[str, Any] = {}
    for key, value in cast("dict[str, Any]", row).items():
        if key in _NAMES:
            continue
        is_list = isinstance(value, (list, tuple))
        values[key] = [_nameless(one) for one in value] if is_list else _plain(value)
    return values


def _nameless(passage: Any) -> Any:
    if not isinstance(passage, dict) or "text" not in passage:
        return _plain(passage)
    pairs = cast("dict[str, Any]", passage).items()
    return {key: _plain(value) for key, value in pairs if key not in _NAMES}


def _plain(value: Any) -> Any:
    """The value with single blanks in its texts."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in cast("list[Any]", value)]
    return " ".join(value.split()) if isinstance(value, str) else value
