"""Which rows of one file are its validation split: the one rule of the trainings and the service.

What a row asks decides, and nothing else. So rows that ask the same (see normal_form.py) are never
parted, and adding rows never moves another row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.config.identity import canonical_json
from trainer.data.formats.conversation import question_in, with_input
from trainer.data.formats.lists import as_list
from trainer.data.formats.normal_form import normal_value

if TYPE_CHECKING:
    from trainer.config.formats.layouts import Layout

PLACES = 1000  # a share of the rows is a number of these


def is_held_out(name: str, *, per_mille: int) -> bool:
    """Whether `name` is held out: by its hash alone."""
    return _place(name) < per_mille


def place_of_row(row: Mapping[str, Any], layout: Layout) -> int | None:
    """The place of a row, 0 to 999: it is held out by every share that is larger, in thousandths.
    None for a row that asks nothing, or nothing that can be read: its reader says what is wrong.

    Rows that ask the same have the same place. layout: the names that the row may have. DataError
    for a text in place of a list that cannot be read as one.
    """
    names = [name for group in layout.groups for name in group]
    first = next((name for name in names if row.get(name) not in (None, "", [])), None)
    if first is None:
        return None
    value = with_input(row) if first == "prompt" else row[first]
    value = as_list(value, "row", first) if first in layout.lists else value
    question = question_in(value)
    return None if question is None else _place(canonical_json({"told": normal_value(question)}))


def _place(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % PLACES
