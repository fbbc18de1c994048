"""Rows of a file, one at a time and in order: JSON lines, a JSON list, CSV, TSV or Parquet, each
also compressed (.gz), or a folder of such files.

The file name decides the format. Every row comes with its place, for messages: "train.csv, row 7".
Lines, items and rows of a table (after the header) are counted from 1. A cell of a table is text,
and an empty cell is None.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from trainer.data.formats.packed import MAX_LINE, open_file
from trainer.data.readers.jsonl import begins_as_json, objects, preview
from trainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_INSTALL = "Install it: pip install -e '.[datasets]'."
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_LIST = re.compile(r"(?:^|\t)\s*\[\s*['\"]")  # as DPR's .qa.csv hold answers, without a header
_ROWS_AT_ONCE = 1024  # rows of a Parquet file in memory


def placed_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """(place, row) of a file, or of every file of a folder by their names.

    DataError for a name of no known kind, and for whatever cannot be read; ConfigError without
    pyarrow.
    """
    if path.is_dir():
        for file in files_in(path):
            yield from placed_rows(file)
        return
    kind = kind_of(path)
    if kind in _SEPARATORS:
        yield from _table_rows(path, _SEPARATORS[kind])
    elif kind == ".parquet":
        yield from _parquet(path)
    else:
        yield from objects(path)


def kind_of(path: Path) -> str:
    """The one of SUFFIXES that the file name has, without .gz. For other names ".json" if the
    content begins like JSON, else DataError.
    """
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind in SUFFIXES:
        return kind
    if not path.exists() or begins_as_json(path):
        return ".json"  # if the file does not exist, the reader of lines raises the error
    raise DataError(
        f"{path}: want a file that ends in {', '.join(SUFFIXES)}, each also with .gz, or a folder "
        "of them."
    )


def files_in(folder: Path) -> list[Path]:
    """The files of rows in a folder, by their names; DataError when there are none."""
    files = sorted(file for file in folder.iterdir() if is_row_file(file))
    if not files:
        raise DataError(
            f"{folder} holds no file of rows. Put files there that end in {', '.join(SUFFIXES)}."
        )
    return files


def is_row_file(path: Path) -> bool:
    """Whether the name of a file is that of a file of rows."""
    is_known = Path(path.name.removesuffix(".gz")).suffix in SUFFIXES
    return is_known and not path.name.startswith(".") and path.is_file()


# Tables
# --------------------------------------------------------------------------------------------------


def _table_rows(path: Path, separator: str) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(MAX_LINE)  # the default is 131,072 characters
    number = 0
    try:
        with io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=separator, strict=True)
            names = next(reader, [])
            _check_header(names, path, separator)
            for cells in reader:
                if not cells:
                    continue
                number += 1
                place = f"{path}, row {number}"
                if len(cells) != len(names):
                    raise DataError(
                        f"{place}: not as many fields as the {len(names)} columns of the header: "
                        f"{len(cells)}. It ends in line {reader.line_num}. Put texts that hold "
                        f"{separator!r} or a line's end in double quotes."
                    )
                row: Row = {name: cell or None for name, cell in zip(names, cells, strict=True)}
                yield place, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}, row {number + 1}: {error}. Save it as UTF-8, with texts quoted as CSV."
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} cannot be read behind row {number}: {error}. Fetch it again."
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from error
    if not number:
        raise DataError(
            f"{path} holds no row. Write a header with the names of the columns, then the rows."
        )


def _check_header(names: list[str], path: Path, separator: str) -> None:
    other = next((sign for sign in (";", "\t", "|", ",") if names and sign in names[0]), None)
    is_other = len(names) == 1 and other not in (None, separator)
    has_tabs = separator != "\t" and any("\t" in name for name in names)
    has_lists = any(_LIST.search(name) for name in names)
    no_header = " It has no header either: write the names of the columns into its first line."
    if is_other or has_tabs:
        count = "one column" if is_other else f"{len(names)} columns"
        raise DataError(
            f"{path}: its header is {count}, {preview(names[0])}: its columns are separated by "
            f"{other if is_other else chr(9)!r}, want {separator!r}. Save it so, or as .tsv for "
            f"tabs.{no_header if has_lists else ''}"
        )
    if has_lists:
        raise DataError(
            f"{path}: its first line is {preview(names)}, which holds a list, so it is a row and "
            "no header. Write the names of the columns into the first line."
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            f"{path}: the header names {preview(twice[0])} twice. Give every column a name of its "
            "own."
        )


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(
            f"{path}: reading Parquet needs pyarrow, which is not here. {_INSTALL}"
        ) from None
    number = 0
    try:
        with _seekable(path) as content, ParquetFile(content) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except FileNotFoundError as error:
        raise _unreadable(path, error) from error
    except (ArrowException, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: {str(error).splitlines()[0]}. Is it a Parquet file?") from None
    if not number:
        raise DataError(f"{path} holds no row. Write at least one.")


def _seekable(path: Path) -> IO[Any]:
    """The file, or an uncompressed copy of a compressed one: Parquet is read from its end."""
    if path.suffix.lower() != ".gz":
        return path.open("rb")
    copy = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    with open_file(path) as packed:
        shutil.copyfileobj(packed, copy)
    copy.seek(0)
    return copy


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path} cannot be read: {error.strerror}. Put it there, or point --data_path at the "
        f"folder that holds {path.name}."
    )
