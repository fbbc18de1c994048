"""What is wrong with a row that a person wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from trainer.data.formats.json_text import preview
from trainer.errors import DataError

# Characters of a text. Its tokens take up to 130 bytes a character while they are made (measured
# on one of 100 million), so the longest takes 2 GiB.
MAX_TEXT = 16 << 20


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


def refuse_long_text(value: Any, place: str, *, name: str = "") -> None:
    """DataError for a text of more than MAX_TEXT characters anywhere in a row. name: of `value`,
    such as "messages[0].content".
    """
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise DataError(
                f"{place}: {name!r} is a text of {len(value):,} characters, want at most "
                f"{MAX_TEXT:,}, for it is encoded as a whole. Write it as several rows.",
                place=place,
                field=name,
            )
    elif isinstance(value, dict):
        for key, one in cast("dict[str, Any]", value).items():
            refuse_long_text(one, place, name=f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for number, one in enumerate(cast("list[Any]", value)):
            refuse_long_text(one, place, name=f"{name}[{number}]")
