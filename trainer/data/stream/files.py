"""A file whose rows can be read in any order. A file that cannot (packed, a table, a list, Parquet)
is copied once: to JSON lines, or Parquet to Arrow.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.formats.packed import open_file
from trainer.data.formats.picked import Placed
from trainer.data.readers.data_sets import row_of_arrow
from trainer.data.readers.jsonl import is_of_lines, row_of_line
from trainer.data.readers.row_files import arrow_batches, kind_of, placed_rows
from trainer.data.stream.lines import line_of, write_offsets
from trainer.errors import DataError
from trainer.files.atomic import sha256_of

_LINES = (".jsonl", ".json")
_ROWS_OF_ARROW = 4096  # of a record batch of a copy


@dataclass(frozen=True)
class Stamp:
    """What a file looked like when its rows were counted."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """DataError when there is no such file."""
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from None
        return cls(str(path), status.st_size, status.st_mtime_ns)


class RowFile:
    """The rows of one file, in any order."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        """folder: of the index; facts: from index_file()."""
        self._folder, self._facts = folder, facts
        self._stamp = Stamp(**facts["stamp"])
        self._path = Path(self._stamp.path)

    def __len__(self) -> int:
        return self._facts["rows"]

    def rows(self, numbers: Sequence[int]) -> list[Placed]:
        """The rows of these numbers (from 0), in their order. DataError for a row that cannot be
        read, and for a file that is another one by now.
        """
        if Stamp.of(self._path) != self._stamp:
            raise DataError(
                f"{self._path} changed while its rows are read (data.stream). Put the old file "
                "back, or start over with -r 1."
            )
        if self._facts["unit"] == "arrow":
            return self._rows_of_arrow(numbers)
        return [self._row_of_lines(number) for number in numbers]

    def _row_of_lines(self, number: int) -> Placed:
        offsets = self._offsets
        start = int(offsets[number])
        stop = (
            int(offsets[number + 1]) if number + 1 < len(offsets) else os.fstat(self._file).st_size
        )
        content = os.pread(self._file, stop - start, start)
        unit = self._facts["unit"]
        line = line_of(number, self._facts["blanks"]) if unit == "line" else number + 1
        place = f"{self._path}, {unit} {line}"
        if unit != "line":
            return place, json.loads(content)
        return place, row_of_line(self._path, line, content)

    def _rows_of_arrow(self, numbers: Sequence[int]) -> list[Placed]:
        import pyarrow as pa

        positions = np.asarray(numbers, np.int64)
        starts = np.asarray(self._facts["starts"], np.int64)
        batches = np.searchsorted(starts, positions, side="right") - 1
        rows: dict[int, Any] = {}
        for batch in np.unique(batches):
            places = np.flatnonzero(batches == batch)
            local = pa.array(positions[places] - starts[batch])
            of_batch = self._arrow.get_batch(int(batch)).take(local).to_pylist()
            rows.update(zip(places.tolist(), of_batch, strict=True))
        return [
            (f"{self._path}, row {number + 1}", row_of_arrow(rows[place]))
            for place, number in enumerate(positions.tolist())
        ]

    @property
    def _copy(self) -> Path:
        copy = self._facts["copy"]
        return self._path if copy is None else self._folder / copy

    @cached_property
    def _offsets(self) -> np.ndarray:
        return np.memmap(self._folder / self._facts["offsets"], "<i8", "r")

    @cached_property
    def _file(self) -> int:
        return os.open(self._copy, os.O_RDONLY)

    @cached_property
    def _arrow(self) -> Any:
        import pyarrow as pa

        return pa.ipc.open_file(pa.memory_map(str(self._copy)))  # pyright: ignore


def index_file(path: Path, folder: Path, number: int) -> dict[str, Any]:
    """Write the index of a file's rows into `folder`, and what RowFile needs to know besides.

    number: of the file in its split, for names. DataError for a file without rows.
    """
    stamp, kind = Stamp.of(path), kind_of(path)
    facts: dict[str, Any] = {"stamp": asdict(stamp), "copy": None, "blanks": []}
    if kind == ".parquet":
        facts |= _copy_arrow(path, folder / f"{number}.arrow")
        facts |= {"copy": f"{number}.arrow", "unit": "arrow", "sha256": sha256_of(path)}
    else:
        lines, facts["unit"] = path, "line"
        is_packed = path.suffix.lower() == ".gz"
        if kind not in _LINES or not is_of_lines(path):
            facts |= {"copy": f"{number}.jsonl", "unit": "row" if kind not in _LINES else "item"}
            lines = folder / f"{number}.jsonl"
            _write_lines(lines, (row for _, row in placed_rows(path)))
        elif is_packed:
            facts["copy"] = f"{number}.jsonl"
            lines = folder / f"{number}.jsonl"
            with open_file(path) as packed, lines.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
        facts["offsets"] = f"{number}.offsets"
        count, blanks, sha = write_offsets(lines, folder / facts["offsets"])
        facts |= {"rows": count, "blanks": blanks, "sha256": sha}
    if not facts["rows"]:
        raise DataError(f"{path} holds no row. Write at least one.")
    if Stamp.of(path) != stamp:
        raise DataError(
            f"{path} changed while its rows were counted. Start again when nothing writes to it."
        )
    return facts


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as out:
        out.writelines(f"{json.dumps(row)}\n" for row in rows)


def _copy_arrow(path: Path, copy: Path) -> dict[str, Any]:
    """Copy a Parquet file to Arrow, whose rows can be read one by one."""
    import pyarrow as pa

    starts, count = list[int](), 0
    batches: Iterator[Any] = arrow_batches(path, _ROWS_OF_ARROW)
    writer: Any = None
    try:
        for batch in batches:
            if writer is None:
                writer = pa.ipc.new_file(str(copy), batch.schema)  # pyright: ignore
            writer.write_batch(batch)
            starts.append(count)
            count += len(batch)
    finally:
        if writer is not None:
            writer.close()
    return {"rows": count, "starts": starts}
