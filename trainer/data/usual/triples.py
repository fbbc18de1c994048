"""Rows as sentence-transformers trains on them: anchor, positive and negatives, all texts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trainer.data.readers import fields
from trainer.data.usual.placed import Around, Placed, named

if TYPE_CHECKING:
    from trainer.protocol.task import Row

_ANCHORS = ("anchor", "query", "question")
_POSITIVES = ("positive", "answer")
_NUMBERED = re.compile(r"negative_(\d+)$")  # of mine_hard_negatives


def triples(placed: Placed, around: Around) -> Placed:
    """{"query", "positive_passages", "negative_passages"}. The negatives are "negative" (a text or
    a list), "negatives", and negative_1, negative_2, ... in the order of their numbers.
    """
    for place, raw in placed:
        name, anchor = fields.first_given(raw, _ANCHORS)
        row: Row = {"query": fields.text(anchor, place, name)}
        name, positive = fields.first_given(raw, _POSITIVES)
        row["positive_passages"] = _passages(positive, place, name)
        row["negative_passages"] = []
        numbers = {int(match[1]): name for name in raw if (match := _NUMBERED.match(name))}
        numbered = [numbers[number] for number in sorted(numbers)]
        for name in ["negative", "negatives", *numbered]:
            if raw.get(name) is not None:
                row["negative_passages"] += _passages(raw[name], place, name)
        yield place, named(raw, row)


def _passages(value: Any, place: str, name: str) -> list[Row]:
    """The passages that a field holds, a text or a list of texts. A text of one's own may look like
    a list: it is none.
    """
    if isinstance(value, list):
        return [{"text": fields.text(one, place, f"{name}[{n}]")} for n, one in enumerate(value)]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return [{"text": fields.text(value, place, name)}]
