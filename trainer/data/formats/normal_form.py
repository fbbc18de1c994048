"""When two texts ask the same: equal but for case, white space and the form of Unicode."""

from __future__ import annotations

import unicodedata
from typing import Any, cast


def normal_form(text: str) -> str:
    """The text in NFKC (full-width letters, ligatures and composed accents as plain ones), with
    case folded and single blanks; equal for texts that a split must not part.
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(folded.split())


def normal_value(value: Any) -> Any:
    """The same of every text in lists and objects; a list of one is that one. Other values as
    texts, such that they are plain JSON.
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
