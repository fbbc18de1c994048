"""Records as publishers keep them.

JSON, JSON lines, gzip of these, or a data set of the `datasets` library.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import ijson

from trainer.data.formats.json_stream import checked, json_items
from trainer.data.formats.json_text import BadJson
from trainer.data.formats.packed import open_file
from trainer.data.readers import jsonl
from trainer.errors import ConfigError, DataError

Part = Literal["train", "dev"]
T = TypeVar("T")

# Words in the name of a file or a split that say which part it is.
_MARKS: dict[Part, tuple[str, ...]] = {"train": ("train",), "dev": ("dev", "val")}
_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
_SAVED = ("dataset_dict.json", "state.json")  # what `datasets` puts into a folder that it saves
# MS MARCO is one object of these columns, each of which maps a number to a value.
_COLUMNS: tuple[str, ...] = ("query", "answers", "passages")


@dataclass(frozen=True)
class PublishedRecord:
    """One record, and where it stands."""

    values: dict[str, Any]
    place: str

    def bad(self, problem: str) -> DataError:
        """An error that names the place."""
        return DataError(f"{self.place}: {problem}.", place=self.place)

    def text(self, name: str) -> str:
        """A field that must be text."""
        value = self.values.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self.bad(
                f"{name!r} is {value!r:.60}, want text that is not blank (keys: "
                f"{', '.join(self.values)})"
            )
        return value


# The records of a part of one set.
RecordsOf = Callable[[Part], Iterator[PublishedRecord]]


def records(
    place: Path | str, part: Part, *, without: Sequence[str] = (), config: str | None = None
) -> Iterator[PublishedRecord]:
    """The records of a part of a data set, in the order of its files, one in memory at a time.

    place: a folder with files, a folder that `datasets` saved, or an id on the Hub (of which
    `config` is read). without: a file with one of these words in its name is not read. A record
    that lacks a field that a reader asks for is a DataError with file and line, or item.
    """
    if isinstance(place, Path) and not any((place / name).is_file() for name in _SAVED):
        return (record for path in _files(place, part, without) for record in _of_file(path))
    return _of_dataset(place, part, config)


def read_as(read: Callable[[PublishedRecord], T], record: PublishedRecord) -> T:
    """What `read` makes of a record; a missing field, or one of another kind, is a DataError."""
    try:
        return read(record)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        keys = ", ".join(record.values)
        problem = (
            f"it is not of its publisher's form ({type(error).__name__}: {error}; keys: {keys})"
        )
        raise record.bad(problem) from error


def _files(folder: Path, part: Part, without: Sequence[str]) -> list[Path]:
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name.endswith(_SUFFIXES)
    ]
    fitting = [path for path in files if any(mark in path.name.lower() for mark in _MARKS[part])]
    of_part = [path for path in fitting if not any(word in path.name.lower() for word in without)]
    if not of_part:
        marks = " or ".join(_MARKS[part])
        raise DataError(
            f"{folder}: holds no .json, .jsonl or .gz of these with {marks} in its name (it has "
            f"{', '.join(path.name for path in files) or 'none of any part'}). Put the "
            "publisher's file there."
        )
    return of_part


def _of_file(path: Path) -> Iterator[PublishedRecord]:
    is_lines = path.name.removesuffix(".gz").endswith(".jsonl")
    try:
        yield from _lines(path) if is_lines else _document(path)
    except (
        *(OSError, EOFError, zlib.error),
        *(ijson.JSONError, BadJson, UnicodeDecodeError),
    ) as error:
        raise DataError(f"{path}: cannot be read ({error}). Download it again.") from error


def _lines(path: Path) -> Iterator[PublishedRecord]:
    for number, values in jsonl.numbered_jsonl(path):
        yield _record(values, f"{path}, line {number}")


def _document(path: Path) -> Iterator[PublishedRecord]:
    """A list of records, or an object: SQuAD's with articles under "data", or one of columns."""
    with open_file(path) as file:
        events = ijson.parse(checked(file), use_float=True)
        first = next((event, value) for _, event, value in events if event != "start_map")
    if first[0] == "start_array":
        yield from _items(path, "item")
    elif first[1] == "version" or first[1] == "data":
        for record in _items(path, "data.item"):
            yield from _of_article(record) if "paragraphs" in record.values else (record,)
    else:
        yield from _of_columns(path)


def _items(path: Path, prefix: str) -> Iterator[PublishedRecord]:
    with open_file(path) as file:
        for number, values in enumerate(json_items(file, prefix), start=1):
            yield _record(values, f"{path}, item {number}")


def _record(values: Any, where: str) -> PublishedRecord:
    if not isinstance(values, dict):
        raise DataError(f"{where}: a JSON {type(values).__name__}, want an object.", place=where)
    return PublishedRecord(values, where)


def _of_article(article: PublishedRecord) -> Iterator[PublishedRecord]:
    """SQuAD: the questions of an article's paragraphs, in the form that the Hub has them in."""
    for paragraph in article.values["paragraphs"]:
        for item in paragraph["qas"]:
            answers = {"text": [answer["text"] for answer in item["answers"]]}
            values = {"title": article.values.get("title", ""), "context": paragraph["context"]}
            yield PublishedRecord(
                {**values, "question": item["question"], "answers": answers},
                f"{article.place}, {item['id']}",
            )


def _of_columns(path: Path) -> Iterator[PublishedRecord]:
    """Records from columns. Each column is read by a reader of its own, because the file does not
    fit into memory.
    """
    with ExitStack() as stack:
        columns: list[Any] = [
            ijson.kvitems(checked(file), name, use_float=True)
            for file, name in ((stack.enter_context(open_file(path)), name) for name in _COLUMNS)
        ]
        for pairs in zip(*columns, strict=True):
            numbers = {number for number, _ in pairs}
            if len(numbers) > 1:
                raise DataError(
                    f"{path}: its columns {', '.join(_COLUMNS)} list other records "
                    f"({', '.join(numbers)})."
                )
            values: dict[str, Any] = dict(zip(_COLUMNS, (value for _, value in pairs), strict=True))
            yield PublishedRecord(values, f"{path}, record {pairs[0][0]}")


def _of_dataset(place: Path | str, part: Part, config: str | None) -> Iterator[PublishedRecord]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{place}: reading it takes the datasets library. Install it: pip install "
            "-e '.[datasets]'."
        ) from None
    try:
        if isinstance(place, Path):
            splits: Any = datasets.load_from_disk(str(place))
        else:
            splits = datasets.load_dataset(place, config)
    except (
        OSError,
        ValueError,
        ConnectionError,
    ) as error:  # nothing there, no connection, no such config
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{place}: neither a folder nor a data set that the Hub gives out ({reason})."
        ) from None
    if not isinstance(splits, Mapping):
        raise DataError(
            f"{place}: is a single split, want a dictionary of splits. Save a DatasetDict."
        )
    names = [name for name in splits if any(mark in name for mark in _MARKS[part])]
    if not names:
        raise DataError(
            f"{place}: has the splits {', '.join(splits)}, want one called "
            f"{' or '.join(_MARKS[part])}."
        )
    for number, values in enumerate(splits[names[0]]):
        yield PublishedRecord(values, f"{place}, {names[0]}[{number}]")
