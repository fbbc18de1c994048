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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from trainer.data.formats import problems
from trainer.data.formats.packed import open_file
from trainer.data.formats.subset import of_subset
from trainer.data.left_out import note
from trainer.data.readers.data_sets import row_of_arrow
from trainer.data.readers.jsonl import begins_as_json, lines, objects, preview
from trainer.data.readers.quotes import is_quoted
from trainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
# in a folder: of programs (Spark's _SUCCESS and .crc files), and what is written about the data
_LEFT_OUT = re.compile(r"[._]|(?:readme|license)(?:\.|$)", re.IGNORECASE)
LEFT_OUT = "files of rows named as no data is: ._..., .x, _x, README or LICENSE (left out)"
_INSTALL = "Install it: pip install -e '.[datasets]'."
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_LIST = re.compile(r"(?:^|\t)\s*\[\s*['\"]")  # as DPR's .qa.csv hold answers, without a header
QA = ".qa.csv"  # DPR's questions and answers, with a tab between and no header
_BYTE_ORDER_MARK = "\ufeff"
_ROWS_AT_ONCE = 1024  # rows of a Parquet file in memory


@of_subset
def placed_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """(place, row) of a file, or of every file of a folder by their names; of a part of its rows,
    where one stands behind the name: "train.csv[:100]".

    DataError for a name of no known kind, and for whatever cannot be read; ConfigError without
    pyarrow.
    """
    if path.is_dir():
        for file in files_in(path):
            yield from placed_rows(file)
        return
    kind = kind_of(path)
    if kind == QA:
        yield from _qa_rows(path)
    elif kind in _SEPARATORS:
        yield from _table_rows(path, _SEPARATORS[kind])
    elif kind == ".parquet":
        yield from _parquet(path)
    else:
        yield from objects(path)


def kind_of(path: Path) -> str:
    """The one of SUFFIXES that the file name has, in whatever case and without .gz; .ndjson is
    .jsonl. For other names ".json" if the content begins like JSON, else DataError.
    """
    kind = _kind_of_name(path.name)
    if kind is not None:
        return kind
    if not path.exists() or begins_as_json(path):
        return ".json"  # if the file does not exist, the reader of lines raises the error
    raise DataError(
        f"{path}: want a file that ends in {', '.join(SUFFIXES)}, each also with .gz, or a folder "
        "of them."
    )


def files_in(folder: Path) -> list[Path]:
    """The files of rows in a folder, by their names.

    Left out are names that begin with . or _ (which programs write for themselves), README and
    LICENSE. DataError for any other entry that is no file of rows, for a file that is there twice,
    and when there is no such file.
    """
    everything = sorted(folder.iterdir())
    entries = [path for path in everything if not _LEFT_OUT.match(path.name)]
    for path in everything:
        if path not in entries and _kind_of_name(path.name) and not path.name.startswith("._"):
            note(str(path), LEFT_OUT)
    problems = {path.name: problem for path in entries if (problem := _problem(path))}
    if problems:
        names = ", ".join(f"{name} ({problem})" for name, problem in problems.items())
        raise DataError(
            f"{folder} is read as one split, and holds what is no file of rows: {names}. Want "
            f"files that end in {', '.join(SUFFIXES)}, each also with .gz: unpack, rename or move "
            "the others, or name one file in data.files."
        )
    if twins := _twins(entries):
        raise DataError(
            f"{folder} is read as one split, and holds rows twice: {', '.join(twins)}. Take one of "
            "each out, or name one file in data.files."
        )
    if not entries:
        raise DataError(
            f"{folder} holds no file of rows. Put files there that end in {', '.join(SUFFIXES)}."
        )
    return entries


def _problem(path: Path) -> str | None:
    """Why an entry of a folder is no file of rows; None for one that is."""
    if path.is_dir():
        return "a folder"
    if not path.exists():
        return "a link to nothing"
    return None if _kind_of_name(path.name) else "another kind of file"


def _twins(entries: list[Path]) -> list[str]:
    """The entries whose rows an earlier one holds as well, with that one: links to one file, and a
    file beside its packed form.
    """
    twins: dict[str, None] = {}
    first: dict[Path, Path] = {}
    for path in entries:
        for same in (path.resolve(), path.with_name(path.name.removesuffix(".gz"))):
            earlier = first.setdefault(same, path)
            if earlier != path:
                twins[f"{path.name} (as {earlier.name})"] = None
    return list(twins)


def _kind_of_name(name: str) -> str | None:
    if name.lower().removesuffix(".gz").endswith(QA):
        return QA
    kind = Path(name.lower().removesuffix(".gz")).suffix
    return ".jsonl" if kind == ".ndjson" else kind if kind in SUFFIXES else None


# Tables
# --------------------------------------------------------------------------------------------------


def _table_rows(path: Path, separator: str) -> Iterator[tuple[str, Row]]:
    is_plain = separator == "\t" and not is_quoted(path)
    names: list[str] = []
    number = -1  # the header comes first
    plain_cells = ((line, text.split("\t")) for line, text in lines(path) if text)
    for line, cells in plain_cells if is_plain else _quoted_cells(path, separator):
        number += 1
        if not number:
            names = cells
            _check_header(names, path, separator)
            continue
        place = f"{path}, row {number}"
        if len(names) > 1 and is_header(cells, names):
            raise DataError(
                f"{place}: the header once more, as where two files were put together. Take that "
                "line out.",
                place=place,
            )
        if len(cells) != len(names):
            advice = (
                "Its tabs separate fields, and its quotes are plain characters."
                if is_plain
                else f"Put texts that hold {separator!r} or a line's end in double quotes."
            )
            raise DataError(
                f"{place}: not as many fields as the {len(names)} columns of the header: "
                f"{len(cells)}. It ends in line {line}. {advice}",
                place=place,
            )
        yield place, {name: cell or None for name, cell in zip(names, cells, strict=True)}
    if number < 1:
        raise DataError(
            f"{path} holds no row. Write a header with the names of the columns, then the rows."
        )


def is_header(cells: Sequence[str], names: Sequence[str]) -> bool:
    """Whether cells are the names of columns once more: but for case, blanks around, and the byte
    order mark of a second file that was put behind the first.
    """

    def plain(cell: str) -> str:
        return cell.removeprefix(_BYTE_ORDER_MARK).strip().casefold()

    return plain(cells[0]) == plain(names[0]) and [*map(plain, cells)] == [*map(plain, names)]


def _quoted_cells(path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    """(line where it ends, cells) of every row of a file that is quoted as CSV."""
    csv.field_size_limit(problems.MAX_TEXT)  # the default is 131,072 characters
    number = 0  # of rows, the header among them
    try:
        with io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=separator, strict=True)
            for cells in reader:
                if cells:
                    yield reader.line_num, cells
                    number += 1
    except UnicodeDecodeError as error:
        for _ in lines(path):
            pass  # names the line that is not UTF-8
        raise DataError(
            f"{path}, row {number}: {error}. Save it as UTF-8.", place=f"{path}, row {number}"
        ) from None
    except csv.Error as error:
        raise DataError(
            f"{path}, row {number}: {error}. Save it as UTF-8, with texts quoted as CSV.",
            place=f"{path}, row {number}",
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} cannot be read behind row {max(number - 1, 0)}: {error}. Fetch it again."
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from error


def _qa_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """{"question", "answers"} of each line of a .qa.csv; the answers are the text of a list."""
    number = 0
    for number, (line, cells) in enumerate(_quoted_cells(path, "\t"), start=1):
        if len(cells) != 2:
            raise DataError(
                f"{path}, row {number}: {len(cells)} tab-separated field(s), which ends in line "
                f"{line}; want a question and the list of its answers, as DPR's {QA} have them.",
                place=f"{path}, row {number}",
            )
        yield f"{path}, row {number}", {"question": cells[0], "answers": cells[1]}
    if not number:
        raise DataError(f"{path} holds no row. Write a question and the list of its answers a row.")


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
            "no header. Write the names of the columns into the first line; DPR's questions with "
            f"answers are read where the name of their file ends in {QA}."
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise _repeated_name(path, twice[0])


def _repeated_name(path: Path, name: str) -> DataError:
    return DataError(
        f"{path}: the header names {preview(name)} twice. Give every column a name of its own."
    )


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    number = 0
    for batch in arrow_batches(path, _ROWS_AT_ONCE):
        for row in batch.to_pylist():
            number += 1
            place, values = f"{path}, row {number}", row_of_arrow(row)
            problems.refuse_long_text(values, place)
            yield place, values
    if not number:
        raise DataError(f"{path} holds no row. Write at least one.")


def arrow_batches(path: Path, num_rows: int) -> Iterator[Any]:
    """The record batches of a Parquet file, each of at most `num_rows` rows. DataError for what is
    no Parquet file; ConfigError without pyarrow.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(
            f"{path}: reading Parquet needs pyarrow, which is not here. {_INSTALL}"
        ) from None
    try:
        with _seekable(path) as content, ParquetFile(content) as file:
            names: list[str] = file.schema_arrow.names
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise _repeated_name(path, twice)
            yield from file.iter_batches(batch_size=num_rows)
    except FileNotFoundError as error:
        raise _unreadable(path, error) from error
    except (ArrowException, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: {str(error).splitlines()[0]}. Is it a Parquet file?") from None


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
