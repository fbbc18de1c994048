"""Lines and JSON objects of a file, compressed (.gz) or not, one at a time and in order.

Text is UTF-8. A byte order mark at the start is skipped. Only LF and CRLF end a line, because texts
may hold U+2028. Blank lines are counted and skipped. Errors name the line, or the item of a JSON
list, counted from 1.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.formats import problems
from trainer.data.formats.json_stream import json_items
from trainer.data.formats.json_text import BadJson, MalformedJson, json_value
from trainer.data.formats.json_text import preview as preview
from trainer.data.formats.packed import MAX_LINE, open_file
from trainer.data.formats.subset import of_subset
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# How other kinds of files begin.
_OTHERS = {
    b"\x1f\x8b": "it is packed with gzip, once or once more: unpack it, or name it .gz",
    b"PK\x03\x04": "it is a zip or a spreadsheet",
    b"\xff\xfe": "it is UTF-16",
    b"\xfe\xff": "it is UTF-16",
    b"PAR1": "it is Parquet: name it .parquet",
}


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line without its end) of a text file. DataError for what cannot be read."""
    number = 0
    try:
        with open_file(path) as file:
            while content := file.readline(MAX_LINE + 1):
                number += 1
                if len(content) > MAX_LINE:
                    raise bad_line(
                        path, number, f"longer than {MAX_LINE:,} bytes; write one row a line"
                    )
                yield number, _decode(content, path, number)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _torn(path, f"line {number}", error) from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. Put it there, or point --data_path at the "
            f"folder that holds {path.name}."
        ) from error


def tabbed(path: Path, count: int, want: str) -> Iterator[tuple[int, list[str]]]:
    """(number, cells) of each line of a file without a header, with `count` cells and tabs between
    them, in which quotes are plain characters: MS MARCO's. want: what the cells are, for messages.
    """
    is_empty = True
    for line, text in lines(path):
        if not text.strip():
            continue
        cells = [cell.strip() for cell in text.split("\t")]
        if len(cells) != count or not all(cells):
            raise bad_line(
                path, line, f"{len(cells)} tab-separated field(s), want {want}, none of them blank"
            )
        is_empty = False
        yield line, cells
    if is_empty:
        raise DataError(f"{path} holds no line. Put {want} on every line, with tabs between.")


def read_jsonl(path: Path) -> Iterator[Row]:
    """The objects of a JSON-lines file.

    DataError for malformed JSON, a line that is no object, or an empty file.
    """
    return (row for _, row in numbered_jsonl(path))


@of_subset
def numbered_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    """(line, object) of a JSON-lines file, for readers that check the objects."""
    is_empty = True
    for line, text in lines(path):
        if not text.strip():
            continue
        yield line, _object_of_line(path, line, text)
        is_empty = False
    if is_empty:
        raise DataError(f"{path} is empty. Put one JSON object on every line.")


def row_of_line(path: Path, line: int, content: bytes) -> Row:
    """The object of a line that is read by itself, perhaps with blank lines behind it."""
    if len(content) > MAX_LINE:
        raise bad_line(path, line, f"longer than {MAX_LINE:,} bytes; write one row a line")
    return _object_of_line(path, line, _decode(content, path, line))


def _object_of_line(path: Path, line: int, text: str) -> Row:
    try:
        row = json_value(text)
    except BadJson as error:
        advice = "; write one object a line" if isinstance(error, MalformedJson) else ""
        raise bad_line(path, line, f"{error}{advice}") from None
    place = f"{path}, line {line}"
    if len(text) > problems.MAX_TEXT:  # a shorter line needs no second look
        problems.refuse_long_text(row, place)
    return _object(row, place)


@of_subset
def objects(path: Path) -> Iterator[tuple[str, Row]]:
    """(place, object) of JSON lines, of a JSON list, or of one object that is written over several
    lines. A list is read item by item, because those of FiD have 5 GB.

    The first character tells which of them it is, because file names are often wrong.
    """
    if not _beginning(path).startswith(b"["):
        whole = _one_object(path)
        if whole is not None:
            yield f"{path}, item 1", whole
            return
        for line, row in numbered_jsonl(path):
            yield f"{path}, line {line}", row
        return
    number = 0
    for number, row in enumerate(_items(path), start=1):
        place = f"{path}, item {number}"
        problems.refuse_long_text(row, place)
        yield place, _object(row, place)
    if not number:
        raise DataError(f"{path} is an empty list. Put one JSON object for every question into it.")


def _one_object(path: Path) -> Row | None:
    """The object of a file that holds one over several lines, as SQuAD's may; None for any other
    file, which may be too long for it, or not what it seems.
    """
    start = _beginning(path)
    first, _, rest = start.partition(b"\n")
    if not start.startswith(b"{") or first.rstrip().endswith(b"}") or not rest:
        return None
    try:
        with open_file(path) as file:
            content = file.read(MAX_LINE + 1)
        value = json_value(content.decode("utf-8-sig")) if len(content) <= MAX_LINE else None
    except (OSError, EOFError, zlib.error, ValueError):
        return None  # the reader of lines says what is wrong
    return value if isinstance(value, dict) else None


def bad_line(path: Path, line: int, problem: str) -> DataError:
    """The error that names a line of a file."""
    return DataError(f"{path}, line {line}: {problem}.", place=f"{path}, line {line}")


def _torn(path: Path, place: str, error: Exception) -> DataError:
    fix = "Fetch it again."
    if isinstance(error, gzip.BadGzipFile) and place.endswith(" 0"):  # its first bytes
        fix = "Is it no packed file, then take .gz from its name; else fetch it again."
    return DataError(f"{path} cannot be read behind {place}: {error}. {fix}")


def _decode(content: bytes, path: Path, line: int) -> str:
    encoding = "utf-8-sig" if line == 1 else "utf-8"
    try:
        return content.rstrip(b"\r\n").decode(encoding)
    except UnicodeDecodeError as error:
        kind = next((kind for start, kind in _OTHERS.items() if content.startswith(start)), "")
        is_other = bool(kind) and line == 1
        what = f"byte {error.start} is not UTF-8{f' ({kind})' if is_other else ''}"
        raise bad_line(path, line, f"{what}; save the file as UTF-8") from None


def _object(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(
            f"{place}: a JSON {type(value).__name__}, want an object like {{...}}.", place=place
        )
    return value


def is_of_lines(path: Path) -> bool:
    """Whether a file of JSON holds an object a line: neither a list, nor one object."""
    return not _beginning(path).startswith(b"[") and _one_object(path) is None


def begins_as_json(path: Path) -> bool:
    """Whether the first character of a file is that of a JSON object or list."""
    return _beginning(path).startswith((b"{", b"["))


def _beginning(path: Path) -> bytes:
    """The first bytes of a file after white space; b"" if the file cannot be read."""
    try:
        with open_file(path) as file:
            start = file.read(4096)
    except (OSError, EOFError, zlib.error):
        return b""  # the reader of lines meets the same error, and says what to do
    return start.removeprefix(_BYTE_ORDER_MARK).lstrip()


def _items(path: Path) -> Iterator[Any]:
    number = 0
    with open_file(path) as file:
        try:
            for item in json_items(file):
                number += 1
                yield item
        except BadJson as error:
            raise DataError(
                f"{path}, item {number + 1}: {error}.", place=f"{path}, item {number + 1}"
            ) from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _torn(path, f"item {number}", error) from error
