"""Renames the columns of a user's rows to our names."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.config.own_rows import FROM
from trainer.data.formats import picked
from trainer.data.formats.lists import as_list, is_nan, structure
from trainer.data.left_out import doubt, watched
from trainer.data.readers.jsonl import preview
from trainer.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from trainer.config.formats.layouts import Layout
    from trainer.config.own_rows import Column
    from trainer.protocol.task import Row

_LOOKED_AT = 100  # a column must occur in so many first rows; JSON lines may leave columns out

_CHECKED = "columns"  # that the first rows of a split have them

Placed = Iterator[tuple[str, "Row"]]


def in_our_names(
    rows: Iterable[tuple[str, Row]], columns: Mapping[str, Column], layout: Layout
) -> Placed:
    """The same rows with columns renamed by `columns` (our name -> their name, or for a list of
    objects {"from": its column, our key: theirs}).

    A mapped name replaces every other name for the same thing. A name that needs a list gets one,
    out of a text too (see lists.py). ConfigError for a column that none of the first rows has.
    """
    rows = iter(rows)
    some = picked.current()
    if columns and some is None:
        first = list(itertools.islice(rows, _LOOKED_AT))
        _check_columns(first, columns)
        rows = itertools.chain(first, rows)
    elif some is not None and columns and _CHECKED not in some.learnt:
        _check_columns(list(some.first), columns)
        some.learnt[_CHECKED] = True
    names = {name for group in layout.groups for name in group}
    replaced = {other for name in columns for other in layout.alternatives(name)}
    sources = {
        name
        for column in map(_column_of, columns.values())
        for name in (column, _parts(column)[0].removesuffix("[]"))
    }
    for place, raw in rows:
        row = {name: value for name, value in raw.items() if name not in replaced}
        for name, spec in columns.items():
            column = _column_of(spec)
            value = raw[column] if column in raw else _follow(raw, _parts(column), place, column)
            if not isinstance(spec, str):
                value = _objects(value, spec, place)
            if value is not None:
                _write(row, name, value, place)
        row |= {name: None for name, value in row.items() if is_nan(value)}
        for name in names & row.keys():
            if isinstance(row[name], bytes):
                raise DataError(
                    f"{place}: {name!r} is {preview(row[name])}, bytes of a binary column, want "
                    "text. Write the column as strings, in UTF-8.",
                    place=place,
                    field=name,
                )
        for name in names & row.keys():
            value, is_list = row[name], name in layout.lists
            if is_list:
                row[name] = as_list(value, place, name)
            if row[name] in (value, [value]):  # else it was a list
                doubt(value, place, name, is_list=is_list)
        yield place, watched(row, raw=raw, sources=sources, replaced=replaced)


def columns_in(rows: Sequence[tuple[str, Row]], columns: Mapping[str, Column]) -> dict[str, Column]:
    """Those of `columns` whose first part one of the rows has."""
    present = {str(name) for _, row in rows for name in row}
    return {name: spec for name, spec in columns.items() if _is_in(_column_of(spec), present)}


def _is_in(column: str, present: Collection[str]) -> bool:
    return column in present or _parts(column)[0].removesuffix("[]") in present


def _column_of(said: Column) -> str:
    """The column that a value of data.columns names."""
    return said if isinstance(said, str) else said[FROM]


def _check_columns(rows: list[tuple[str, Row]], columns: Mapping[str, Column]) -> None:
    """ConfigError for a column whose first part no row has; it names the existing columns."""
    present = list(dict.fromkeys(str(name) for _, row in rows for name in row))
    ours = {_column_of(spec): name for name, spec in columns.items()}
    missing = [column for column in ours if not _is_in(column, present)]
    if not rows:
        return
    if not missing:
        for name, spec in columns.items():
            if not isinstance(spec, str):
                _check_keys(rows, name, spec)
        return
    lines = [
        f"  {ours[column]!r}: {column!r} is no column. {nearest(column, present)}"
        for column in missing
    ]
    raise ConfigError(
        f"data.columns names what {rows[0][0]} does not have\n"
        + "\n".join(lines)
        + f"\nColumns there: {', '.join(present)}."
    )


def _check_keys(rows: list[tuple[str, Row]], name: str, said: Mapping[str, str]) -> None:
    """ConfigError for a key that no object of the first rows has; it names the existing ones."""
    column, present = said[FROM], dict[str, None]()
    for place, raw in rows:
        value = raw[column] if column in raw else _follow(raw, _parts(column), place, column)
        for one in as_list(value, place, column) or ():
            present |= dict.fromkeys(one) if isinstance(one, dict) else {}
    for key, theirs in said.items():
        if key != FROM and present and _parts(theirs)[0] not in present and theirs not in present:
            raise ConfigError(
                f"data.columns.{name}: {key!r} is {theirs!r}, which no object of {column!r} has in "
                f"{rows[0][0]}. {nearest(theirs, [*present])}"
            )


def _objects(value: Any, said: Mapping[str, str], place: str) -> Any:
    """The objects of a list, with keys renamed by `said` (our key -> theirs); a key that it does
    not name keeps its name.
    """
    column = said[FROM]
    items = as_list(value, place, column)
    if items is None:
        return None
    if not isinstance(items, list) or not all(isinstance(one, dict) for one in items):
        raise DataError(
            f"{place}: {column!r} of data.columns is {preview(value)}, want a list of objects.",
            place=place,
            field=column,
        )
    ours = {key: theirs for key, theirs in said.items() if key != FROM}
    renamed = {*ours, *ours.values()}
    objects: list[Row] = []
    for one in items:
        row = {key: inner for key, inner in one.items() if key not in renamed}
        for key, theirs in ours.items():
            inner = one[theirs] if theirs in one else _follow(one, _parts(theirs), place, theirs)
            if inner is not None:
                row[key] = inner
        objects.append(row)
    return objects


def _parts(column: str) -> list[str]:
    return column.split(".")


def _follow(value: Any, parts: list[str], place: str, column: str) -> Any:
    for number, part in enumerate(parts):
        name = part.removesuffix("[]")
        value = _structure(value, place, column)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise DataError(
                f"{place}: {column!r} of data.columns looks for {name!r} in {preview(value)}, want "
                "an object there. Write [] behind the name of a list.",
                place=place,
                field=column,
            )
        value = value.get(name)
        if not part.endswith("[]"):
            continue
        items, rest = _structure(value, place, column), parts[number + 1 :]
        if items is not None and not isinstance(items, list):
            raise DataError(
                f"{place}: {column!r} of data.columns wants a list, got {preview(items)}. Leave "
                "[] out.",
                place=place,
                field=column,
            )
        if items is None or not rest:
            return items
        return [_follow(item, rest, place, column) for item in items]
    return value


def _structure(value: Any, place: str, column: str) -> Any:
    """The object or list that a cell holds as text; any other value unchanged."""
    content = structure(value, place, column) if isinstance(value, str) else None
    return value if content is None else content


def _write(row: Row, name: str, value: Any, place: str) -> None:
    """Write a value under our name. A name like "ctxs[].text" writes into the objects of a list."""
    outer, brackets, inner = name.partition("[].")
    if not brackets:
        row[name] = value
        return
    values = as_list(value, place, name)
    if values is None:
        return
    if not isinstance(values, list):
        raise DataError(
            f"{place}: {name!r} of data.columns is {preview(value)}, want a list.",
            place=place,
            field=name,
        )
    objects = row.setdefault(outer, [{} for _ in values])
    if len(objects) != len(values):
        raise DataError(
            f"{place}: {name!r} of data.columns has {len(values)} values where the others of "
            f"{outer!r} have {len(objects)}; give one each.",
            place=place,
            field=name,
        )
    for one, item in zip(objects, values, strict=True):
        if item is not None:
            one[inner] = item
