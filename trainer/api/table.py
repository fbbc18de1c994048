"""A table that a notebook shows as one."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

_SHOWN = 20  # rows at the beginning, and as many at the end


class Table(list[dict[str, Any]]):
    """A list of rows; each is a dictionary, column -> value. `pandas.DataFrame(table)` reads it."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        super().__init__(dict(row) for row in rows)

    @property
    def columns(self) -> list[str]:
        """The names of all columns, in the order in which the rows have them."""
        return list(dict.fromkeys(name for row in self for name in row))

    def _repr_html_(self) -> str:
        columns = self.columns
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        lines = [self._line(row, columns) for row in self]
        left_out = len(lines) - 2 * _SHOWN
        if left_out > 0:
            gap = f'<tr><td colspan="{len(columns)}">{left_out:,} more rows</td></tr>'
            lines[_SHOWN:-_SHOWN] = [gap]
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"

    def _line(self, row: Mapping[str, Any], columns: Iterable[str]) -> str:
        from trainer.telemetry.console import format_number  # imports rich

        cells: list[str] = []
        for name in columns:
            value = row.get(name, "")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            cells.append(html.escape(format_number(value) if is_number else str(value)))
        return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
