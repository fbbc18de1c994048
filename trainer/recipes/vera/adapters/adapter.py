"""What an adapter is, and how publishers' files are opened: every record with the file and the
place it came from.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from trainer.data.formats.json_text import json_value
from trainer.data.readers import jsonl
from trainer.errors import DataError
from trainer.recipes.vera.problem import BadRecord, Problem, one_line, write_line

Variants = Mapping[str, str]


class Raw(NamedTuple):
    """A record as it stands in its file."""

    path: Path
    unit: str  # "line", or "item" of a list, counted from 1
    number: int
    value: Any

    @property
    def place(self) -> str:
        return f"{self.path}, {self.unit} {self.number}"


@dataclass(frozen=True)
class Adapter:
    """One publisher's format.

    `files`: split -> names below the raw folder; "a|b" is either, "a?" may be missing.
    """

    files: Mapping[str, tuple[str, ...]]
    read: Callable[[Sequence[Path | None]], Iterator[Raw]]
    problem: Callable[[Any, Variants], Problem]  # raises BadRecord
    # the first is default
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    is_joined: bool = False  # rule (b) of declare.py
    is_statement: bool = False  # of a boolean: what is asked is a statement already
    is_cloze: bool = False  # every question is meant to have a blank
    line: Callable[[Problem], str] = write_line


Reader = Callable[[Any, Variants], Problem]


def add_to(
    adapters: dict[str, Adapter],
    name: str,
    files: Mapping[str, tuple[str, ...]],
    read: Callable[[Sequence[Path | None]], Iterator[Raw]],
    **options: Any,
) -> Callable[[Reader], Reader]:
    """A decorator: the function becomes the `problem` of an adapter, which is added by its name.

    options: the other fields of Adapter.
    """

    def add(problem: Reader) -> Reader:
        adapters[name] = Adapter(files, read, problem, **options)
        return problem

    return add


# Files
# --------------------------------------------------------------------------------------------------


def json_lines(paths: Sequence[Path | None]) -> Iterator[Raw]:
    """The objects of JSON-lines files, one file after the other."""
    for path in _present(paths):
        for number, row in jsonl.numbered_jsonl(path):
            yield Raw(path, "line", number, row)


def json_list(paths: Sequence[Path | None]) -> Iterator[Raw]:
    """The objects of a file that is one JSON list."""
    (path,) = _present(paths)
    rows = whole_json(path)
    if not isinstance(rows, list) or not rows:
        raise DataError(
            f"{path} is no JSON list with something in it. Take the publisher's file as it is."
        )
    for number, row in enumerate(rows, start=1):
        yield Raw(path, "item", number, row)


def labelled_json_lines(paths: Sequence[Path | None]) -> Iterator[Raw]:
    """(object, label) of a JSON-lines file and of the file whose lines are its labels."""
    questions, labels = _present(paths)
    label_texts = [text.strip() for _, text in jsonl.lines(labels)]
    rows = list(jsonl.numbered_jsonl(questions))
    if len(rows) != len(label_texts):
        raise DataError(
            f"{labels} has {len(label_texts)} lines for {len(rows)} of {questions.name}. "
            "Take both of one release."
        )
    for (number, row), label in zip(rows, label_texts, strict=True):
        yield Raw(questions, "line", number, (row, label))


def tab_lines(paths: Sequence[Path | None]) -> Iterator[Raw]:
    """The fields of tab-separated lines, where a quote is a quote."""
    for raw in plain_lines(paths):
        yield raw._replace(value=raw.value.split("\t"))


def plain_lines(paths: Sequence[Path | None]) -> Iterator[Raw]:
    """The lines of a file, without their ends."""
    (path,) = _present(paths)
    for number, text in jsonl.lines(path):
        yield Raw(path, "line", number, text)


def csv_rows(path: Path) -> Iterator[Raw]:
    """The fields of every row of a CSV file, a header included; `number` is the line where the row
    ends.
    """
    text = "\n".join(line for _, line in jsonl.lines(path))
    reader = csv.reader(io.StringIO(text), strict=True)
    try:
        for row in reader:
            if row:
                yield Raw(path, "line", reader.line_num, row)
    except csv.Error as error:
        raise jsonl.bad_line(
            path, reader.line_num, f"{error}; take the publisher's file as it is"
        ) from None


def csv_objects(paths: Sequence[Path | None]) -> Iterator[Raw]:
    """The rows of a CSV file as objects, by the names in its header."""
    (path,) = _present(paths)
    rows = csv_rows(path)
    header = next(rows, None)
    if header is None:
        raise DataError(f"{path} is empty. Take the publisher's file as it is.")
    for raw in rows:
        if any(cell.strip() for cell in raw.value[len(header.value) :]):
            raise jsonl.bad_line(
                path,
                raw.number,
                f"{len(raw.value)} fields, and the header names {len(header.value)}: a comma in a "
                "text that is not quoted; take the publisher's file as it is",
            )
        yield raw._replace(value=dict(zip(header.value, raw.value, strict=False)))


def xml_items(paths: Sequence[Path | None], tag: str) -> Iterator[Raw]:
    """The elements of a tag in an XML file."""
    path = _present(paths)[0]
    try:
        elements = ElementTree.parse(path).getroot().iter(tag)
    except (OSError, ElementTree.ParseError) as error:
        raise DataError(
            f"{path} cannot be read as XML ({error}). Take the publisher's file as it is."
        ) from None
    for number, element in enumerate(elements, start=1):
        yield Raw(path, "item", number, element)


def whole_json(path: Path) -> Any:
    try:
        return json_value(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as JSON ({error}). Take the publisher's file as it is."
        ) from None


def _present(paths: Sequence[Path | None]) -> list[Path]:
    return [path for path in paths if path is not None]


# Fields
# --------------------------------------------------------------------------------------------------


def value_of(row: Any, *names: str) -> Any:
    """row[name][name]...; BadRecord where there is none."""
    for name in names:
        if not isinstance(row, dict) or name not in row:
            there = ", ".join(row) if isinstance(row, dict) else jsonl.preview(row)
            raise BadRecord(f"{'.'.join(names)!r} is missing (there is: {there or 'nothing'})")
        row = row[name]
    return row


def text_of(row: Any, *names: str) -> str:
    """A text on one line that is not blank; spaces at its ends are kept.

    BadRecord for anything else.
    """
    return checked_text(value_of(row, *names), ".".join(names))


def checked_text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadRecord(f"{name!r} is {jsonl.preview(value)}, want text that is not blank")
    return one_line(value)


def index_of(value: Any, legal: Sequence[str], name: str) -> int:
    """The place of a label, a number or a text, among the legal ones."""
    if str(value).strip() not in legal:
        raise BadRecord(f"{name!r} is {jsonl.preview(value)}, want one of {', '.join(legal)}")
    return list(legal).index(str(value).strip())


def column(fields: Sequence[str], index: int, name: str) -> str:
    if index >= len(fields):
        raise BadRecord(f"{len(fields)} field(s), and {name!r} should be number {index + 1}")
    return checked_text(fields[index], name)
