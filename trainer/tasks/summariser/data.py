"""Documents with their summaries: from JSONL, CSV, TSV and Parquet files, from Hugging Face
`datasets`, or embedded.

Every row is {"id": text, "document": text, "summaries": [texts]}, always in the same order. A blank
document stays (`python -m trainer stats` counts it); blank summaries are left out, and a row
without any trains nothing.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data import lookup, stdlib_docs
from trainer.data.readers.folders import given_folder
from trainer.data.readers.jsonl import numbered_jsonl, shown
from trainer.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from trainer.tasks.protocol import Places, Row
    from trainer.tasks.summariser.config import Data

SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")
_FILE_NAMES = {
    "train": ("train",),
    "valid": ("valid", "val", "dev", "validation"),
    "test": ("test",),
}
_SPLIT_NAMES = {"train": "train", "valid": "validation", "test": "test"}
_INSTALL = "Install it: pip install 'lathe[datasets]'."


def rows(data: Data, places: Places, split: str) -> Iterator[Row]:
    """The rows of "train", "valid" or "test".

    DataError names file and line of what is missing or of another type.
    """
    if data.source == "lookup":
        yield from lookup.summaries(split, facts=data.facts)
        return
    if split not in _FILE_NAMES:
        raise DataError(f"split={split!r} does not exist. Use {', '.join(_FILE_NAMES)}.")
    if data.source == "stdlib_docs":
        yield from _docstrings(split)
        return
    if data.source == "files":
        path = _file_of(data, places.data_path, split)
        found, place = _numbered(path), str(path)
    else:
        found, place = _of_datasets(data, places, split), f"{data.dataset} ({split})"
    for number, raw in found:
        yield _row(
            raw,
            data,
            place=f"{place}, {'line' if place.endswith('l') else 'row'} {number}",
            number=number,
        )


def _row(raw: Row, data: Data, *, place: str, number: int) -> Row:
    columns = [data.document, *data.summaries]
    missing = [column for column in columns if column not in raw]
    if missing:
        close = "; ".join(
            f"{column!r}: {nearest(column, [str(key) for key in raw])}" for column in missing
        )
        raise DataError(
            f"{place}: no such column. {close} Name the columns of your data in data.document "
            "and data.summaries."
        )
    document = " ".join(text.strip() for text in _texts(raw[data.document], data.document, place))
    summaries = [
        text
        for column in data.summaries
        for text in _texts(raw[column], column, place)
        if text.strip()
    ]
    return {"id": str(raw.get(data.id, number)), "document": document, "summaries": summaries}


def _texts(value: Any, column: str, place: str) -> list[str]:
    """A text, a list of texts, or nothing at all, as a list."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    wrong = [item for item in values if not isinstance(item, str)]
    if wrong:
        raise DataError(
            f"{place}: {column!r} is {shown(wrong[0])}, want a text or a list of texts."
        )
    return values


def _docstrings(split: str) -> Iterator[Row]:
    """The first line of a docstring as the summary of what follows a blank line (PEP 257)."""
    for row in stdlib_docs.texts(split):
        name, _, docstring = row["text"].partition("\n")
        summary, _, body = docstring.partition("\n\n")
        if body.strip() and "\n" not in summary:
            yield {"id": name, "document": " ".join(body.split()), "summaries": [summary.strip()]}


# Files
# --------------------------------------------------------------------------------------------------


def _file_of(data: Data, folder: Path | None, split: str) -> Path:
    folder = given_folder(folder, "train and valid as .jsonl, .csv, .tsv or .parquet")
    named = getattr(data.files, split)
    if named is not None:
        path = folder / named
        if not path.is_file():
            raise DataError(
                f"{path} is not there. It is named in data.files.{split}: put it there, or name "
                "another."
            )
        if path.suffix not in SUFFIXES:
            raise DataError(f"{path}: want a file that ends in {', '.join(SUFFIXES)}.")
        return path
    paths = [folder / f"{name}{suffix}" for name in _FILE_NAMES[split] for suffix in SUFFIXES]
    there = [path for path in paths if path.is_file()]
    if len(there) != 1:
        found = (
            f"holds {', '.join(path.name for path in there)}"
            if there
            else f"holds no {split} split"
        )
        raise DataError(
            f"{folder} {found}. Want one of {', '.join(_FILE_NAMES[split])} with "
            f"{', '.join(SUFFIXES)}; or name the file in data.files.{split}."
        )
    return there[0]


def _numbered(path: Path) -> Iterator[tuple[int, Row]]:
    """(number, row) of a file, counted from 1.

    The number is the line of JSONL, else the row behind the header.
    """
    readers = {".jsonl": numbered_jsonl, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet}
    return readers[path.suffix](path)


def _csv(path: Path) -> Iterator[tuple[int, Row]]:
    # documents are longer than the 131,072 characters of old
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(
                file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True
            )
            for number, row in enumerate(reader, start=1):
                width, wanted = (
                    len(row) - (None in row or None in row.values()),
                    len(reader.fieldnames or ()),
                )
                if width != wanted or None in row:
                    raise DataError(
                        f"{path}, row {number}: not as many fields as the {wanted} columns of "
                        "the header."
                    )
                yield number, dict(row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}, row {number + 1}: {error}. Save it as UTF-8, with texts quoted as CSV."
        ) from None
    if not number:
        raise DataError(
            f"{path} holds no row. Write a header with the names of the columns, then the rows."
        )


def _parquet(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(
            f"{path}: reading Parquet needs pyarrow, which is not here. {_INSTALL}"
        ) from None
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: {str(error).splitlines()[0]}. Is it a Parquet file?") from None
    if not number:
        raise DataError(f"{path} holds no row.")


# Hugging Face datasets
# --------------------------------------------------------------------------------------------


def _of_datasets(data: Data, places: Places, split: str) -> Iterator[tuple[int, Row]]:
    name = getattr(data.splits, split) or _SPLIT_NAMES[split]
    found = _dataset(data, places, name)
    columns = {data.document, *data.summaries, data.id}
    found = found.select_columns([column for column in found.column_names if column in columns])
    yield from enumerate(found, start=1)


def _dataset(data: Data, places: Places, name: str) -> Any:
    """One split: of a folder of save_to_disk, of a folder of files, or of a data set on the Hub."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f'data.source="datasets" needs the package of that name, which is not here. {_INSTALL}'
        ) from None
    assert data.dataset is not None
    below = (places.data_path or Path()) / data.dataset
    folder = below if below.is_dir() else Path(data.dataset)
    is_saved = any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))
    datasets.disable_progress_bars()
    try:
        if is_saved:
            saved = datasets.load_from_disk(str(folder))
            return saved[name] if isinstance(saved, datasets.DatasetDict) else saved
        source = str(folder) if folder.is_dir() else data.dataset
        cache = str(places.cache_dir / "datasets")
        return datasets.load_dataset(
            source, data.subset, split=name, revision=data.revision, cache_dir=cache
        )
    except KeyError:
        raise DataError(
            f"{folder} has no split {name!r}. Name its splits in data.splits."
        ) from None
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # RuntimeError: DatasetGenerationError and its like
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"data.dataset={data.dataset!r}, split {name!r}: {reason}. Give a folder (here or "
            "below --data_path), or a "
            "Hub id that this machine can reach; data.subset and data.splits choose within it."
        ) from None
