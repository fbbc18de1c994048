"""What is wrong with a row that a person wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from trainer.data.formats.json_text import preview
from trainer.errors import DataError


class RowProblem(NamedTuple):
    """What is wrong with a row."""

    name: str  # of the field: "messages[0].role"; "" where the whole row is wrong
    value: Any
    want: str

    def at(self, place: str) -> DataError:
        """The error of the row that was read at `place`."""
        if not self.name:
            return DataError(f"{place}: {self.value}, want {self.want}.", place=place)
        name = repr(self.name) if self.name.isidentifier() else self.name
        message = f"{place}: {name} is {preview(self.value)}, want {self.want}."
        return DataError(message, place=place, field=self.name)


Report = Callable[[RowProblem], None]
