"""Renames the columns of a user's rows to our names."""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer.data.readers.jsonl import preview
from trainer.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from trainer.config.own_rows import Layout
    from trainer.protocol.task import Row

_LOOKED_AT = 100  # a column must occur in so many first rows; JSON lines may leave columns out
_LISTS = ("[", "{")  # the first characters of JSON lists and objects
_SURE_LISTS = ('["', "['", "[{", '{"', "{'")  # beginnings that no ordinary text has

Placed = Iterator[tuple[str, "Row"]]


def in_our_names(
    rows: Iterable[tuple[str, Row]], columns: Mapping[str, str], layout: Layout, *, are_cells: bool
) -> Placed:
    """The same rows with columns renamed by `columns` (our name -> their name), and cells parsed.

    A mapped name replaces every other name for the same thing. are_cells: the rows are those of a
    table, whose cells may hold a list as JSON; for a name that needs a list, any other text becomes
    a list of one. ConfigError for a column that none of the first rows has.
    """
    rows = iter(rows)
    if columns:
        first = list(itertools.islice(rows, _LOOKED_AT))
        _check_columns(first, columns)
        rows = itertools.chain(first, rows)
    replaced = {other for name in columns for other in layout.alternatives(name)}
    for place, raw in rows:
        row = {name: value for name, value in raw.items() if name not in replaced}
        for name, column in columns.items():
            value = raw[column] if column in raw else _follow(raw, _parts(column), place, column)
            if value is not None:
                _write(row, name, value, place)
        if are_cells:
            for name in layout.lists & row.keys():
                row[name] = _list_of_cell(row[name], place, name)
        yield place, row


def _check_columns(rows: list[tuple[str, Row]], columns: Mapping[str, str]) -> None:
    """ConfigError for a column whose first part no row has; it names the existing columns."""
    present = list(dict.fromkeys(str(name) for _, row in rows for name in row))
    missing = [
        column
        for column in columns.values()
        if column not in present and _parts(column)[0].removesuffix("[]") not in present
    ]
    if not rows or not missing:
        return
    ours = {column: name for name, column in columns.items()}
    lines = [
        f"  {ours[column]!r}: {column!r} is no column. {nearest(column, present)}"
        for column in missing
    ]
    raise ConfigError(
        f"data.columns names what {rows[0][0]} does not have\n"
        + "\n".join(lines)
        + f"\nColumns there: {', '.join(present)}."
    )


def _parts(column: str) -> list[str]:
    return column.split(".")


def _follow(value: Any, parts: list[str], place: str, column: str) -> Any:
    for number, part in enumerate(parts):
        name = part.removesuffix("[]")
        value = _parse(value)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise DataError(
                f"{place}: {column!r} of data.columns looks for {name!r} in {preview(value)}, want "
                "an object there. Write [] behind the name of a list."
            )
        value = value.get(name)
        if not part.endswith("[]"):
            continue
        items, rest = _parse(value), parts[number + 1 :]
        if items is not None and not isinstance(items, list):
            raise DataError(
                f"{place}: {column!r} of data.columns wants a list, got {preview(items)}. Leave "
                "[] out."
            )
        if items is None or not rest:
            return items
        return [_follow(item, rest, place, column) for item in items]
    return value


def _write(row: Row, name: str, value: Any, place: str) -> None:
    """Write a value under our name. A name like "ctxs[].text" writes into the objects of a list."""
    outer, brackets, inner = name.partition("[].")
    if not brackets:
        row[name] = value
        return
    values = _list_of_cell(value, place, name)
    if not isinstance(values, list):
        raise DataError(f"{place}: {name!r} of data.columns is {preview(value)}, want a list.")
    objects = row.setdefault(outer, [{} for _ in values])
    if len(objects) != len(values):
        raise DataError(
            f"{place}: {name!r} of data.columns has {len(values)} values where the others of "
            f"{outer!r} have {len(objects)}; give one each."
        )
    for one, item in zip(objects, values, strict=True):
        if item is not None:
            one[inner] = item


# Cells
# --------------------------------------------------------------------------------------------------


def _list_of_cell(value: Any, place: str, name: str) -> Any:
    """The list in a cell. Any other text becomes a list of one; a value that is no text stays."""
    if not isinstance(value, str):
        return value
    parsed = _parse(value)
    if isinstance(parsed, list):
        return parsed
    if value.lstrip().startswith(_SURE_LISTS):
        raise DataError(
            f"{place}: {name!r} is {preview(value)}, which begins as a list and is none. Write it "
            'as JSON: ["one", "two"].'
        )
    return [value]


def _parse(value: Any) -> Any:
    """The value of a text that is a JSON list or object, or a list as Python prints it; any other
    value unchanged.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(_LISTS):
        return value
    for read in (json.loads, ast.literal_eval):  # pandas writes lists into CSV as Python does
        try:
            parsed = read(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return parsed if isinstance(parsed, (list, dict)) else value
    return value
