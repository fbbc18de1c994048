"""The check of a file of rows, and its conversion to what a task reads.

Needs no torch and reads one line at a time. A mistake says line, got and want. A report counts all
mistakes of a file and names the first ones.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from jobs.serve.rows.kinds import KINDS
from jobs.serve.rows.turns import Row, cut
from trainer.data.formats.held_out import PLACES, place_of_row
from trainer.data.formats.json_text import BadJson, json_value
from trainer.errors import DataError
from trainer.files.atomic import aside, open_file

MAX_MISTAKES = 20
MAX_LINE = 8 << 20  # bytes; a longer line is refused
MAX_VALUES = 100_000  # of one row; Python needs up to 250 bytes for one of two bytes, such as {}
TEXT_OR_SIGN = re.compile(rb'"[^"]*"?|[,\[{]')  # once no text holds an escaped quote


class Mistake(NamedTuple):
    """A mistake in a line. line: counted from 1."""

    line: int
    got: str
    want: str

    def __str__(self) -> str:
        return f"line {self.line}: got {self.got}, want {self.want}"


@dataclass
class RowReport:
    """The number and kind of the rows in a file, and its mistakes."""

    num_rows: int = 0
    kind: str | None = None  # of the first row that has a kind
    num_mistakes: int = 0
    mistakes: list[Mistake] = field(default_factory=list[Mistake])  # the first ones
    # how many rows without a mistake have each place (place_of_row)
    places: Counter[int] = field(default_factory=Counter[int])

    def add(self, line: int, got: str, want: str) -> None:
        self.num_mistakes += 1
        if len(self.mistakes) < MAX_MISTAKES:
            self.mistakes.append(Mistake(line, got, want))


def check(path: Path, kinds: Sequence[str] | None = None) -> RowReport:
    """Check a JSON-lines file whose rows are all of one kind, among `kinds` (None: all kinds)."""
    report = RowReport()
    allowed = list(kinds or KINDS)
    for line, content in lines_of(path):
        row = _object(report, line, content)
        if row is None:
            continue
        report.num_rows += 1
        kind = kind_of(row, allowed)
        if kind is None:
            want = " or ".join(
                f"{name} rows with {', '.join(KINDS[name].needs)}" for name in allowed
            )
            report.add(line, f"the keys {cut(', '.join(sorted(row)))}", want)
        elif report.kind not in (None, kind):
            report.add(line, f"a {kind} row", f"a {report.kind} row, as before")
        else:
            report.kind = kind
            problems = list(KINDS[kind].problems(row))
            for got, want in problems:
                report.add(line, got, want)
            if not problems:
                report.places[_place(row, kind)] += 1
    if not report.num_rows and not report.num_mistakes:
        report.add(1, "an empty file", "one JSON object on every line")
    return report


def count(path: Path) -> RowReport:
    """The report of a file whose lines are no rows to learn from; whoever reads it checks it."""
    return RowReport(num_rows=sum(1 for _ in lines_of(path)))


def kind_of(row: Row, kinds: Sequence[str]) -> str | None:
    """The first of these kinds whose keys a row has."""
    return next((name for name in kinds if all(key in row for key in KINDS[name].needs)), None)


def _place(row: Row, kind: str) -> int:
    """The place of a row, by which it is held out or not; one that asks nothing never is."""
    place = place_of_row(KINDS[kind].files_row(row, 0), KINDS[kind].layout)
    return PLACES if place is None else place


def write_split(source: Path, target: Path, kind: str, *, keep: Callable[[int], bool]) -> int:
    """Write rows of an upload in the format that a task reads; returns how many.

    keep: whether to write a row of this place (place_of_row). DataError when the upload has changed
    since it was checked; StorageError.
    """
    written = 0
    with aside(target) as temporary, temporary.open("wb") as file:
        for number, (line, content) in enumerate(lines_of(source)):
            report = RowReport()
            row = _object(report, line, content)
            if row is None:
                raise DataError(f"{source}, {report.mistakes[0]}. Upload the file again.")
            if keep(_place(row, kind)):
                converted = KINDS[kind].files_row(row, number)
                file.write(json.dumps(converted, ensure_ascii=False).encode() + b"\n")
                written += 1
    return written


def write_splits(train: Path, valid: Path | None, folder: Path, kind: str, limit: int) -> None:
    """Write train.jsonl and valid.jsonl of a job into a folder. DataError, StorageError.

    valid: the file of the validation rows; None: the rows of `train` that are held out.
    limit: the rows of `train` with a place below it are held out; 0 with a validation file.
    """
    write_split(train, folder / "train.jsonl", kind, keep=lambda place: place >= limit)
    if valid is not None:
        write_split(valid, folder / "valid.jsonl", kind, keep=lambda place: True)
    else:
        write_split(train, folder / "valid.jsonl", kind, keep=lambda place: place < limit)


def lines_of(path: Path, longest: int = MAX_LINE) -> Iterator[tuple[int, bytes]]:
    """(number from 1, content with its end) of every line that is not blank. One of more than
    `longest` bytes is cut after one byte more. The byte order mark of a file is left out.
    """
    with open_file(path) as file:
        number = 0
        while content := file.readline(longest + 1):
            number += 1
            if len(content) > longest:
                yield number, content
                while content and not content.endswith(b"\n"):
                    content = file.readline(longest)
                continue
            text = content.removeprefix(b"\xef\xbb\xbf") if number == 1 else content
            if text.strip():
                yield number, text


def _object(report: RowReport, line: int, content: bytes) -> Row | None:
    """The JSON object in a line; None, with a mistake added to the report, when there is none."""
    if len(content) > MAX_LINE:
        report.add(line, "a line that is too long", f"at most {MAX_LINE} bytes")
        return None
    if _has_many_values(content):
        report.add(line, f"a row of more than {MAX_VALUES} values", "a smaller row")
        return None
    try:
        value: Any = json_value(content.decode())  # as the trainings read it
    except UnicodeDecodeError as error:
        report.add(line, f"byte {error.start} that is not UTF-8", "a file saved as UTF-8")
        return None
    except BadJson as error:
        report.add(line, str(error), "one JSON object")
        return None
    if not isinstance(value, dict):
        report.add(line, f"a JSON {type(value).__name__}", 'an object like {"messages": [...]}')
        return None
    return cast("Row", value)


def _has_many_values(content: bytes) -> bool:
    """Whether the JSON of a line may have more than MAX_VALUES values; found without reading it as
    JSON, in little memory.

    Outside of texts, a value follows the beginning of the line, a comma or an opening bracket. A
    row has at most two texts for each value: a key and the value itself.
    """
    if sum(content.count(sign) for sign in (b",", b"[", b"{")) < MAX_VALUES:
        return False
    rest = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_texts = num_signs = 0
    for match in TEXT_OR_SIGN.finditer(rest):
        is_text = rest[match.start()] == ord('"')
        num_texts += is_text
        num_signs += not is_text
        if num_signs >= MAX_VALUES or num_texts > 2 * MAX_VALUES:
            return True
    return False
