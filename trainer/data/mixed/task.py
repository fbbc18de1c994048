"""A task whose rows have several sources (data.mix). Each source is read and encoded by the same
kind of task, for which the source's own block is the whole of `data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.formats.subset import split_name
from trainer.data.readers.folders import first_split_file
from trainer.data.readers.row_files import SUFFIXES
from trainer.errors import DataError, UserError

if TYPE_CHECKING:
    from trainer.protocol.task import Encoded, Places, Row, Task


class _SourceRow(dict[str, Any]):
    """A raw row that knows the task of its source."""

    def __init__(self, row: Row, task: Task) -> None:
        super().__init__(row)
        self.task = task


class _MixedRows:
    """Reads and encodes the rows of every source by a task of its own."""

    cfg: Any
    places: Places

    def __init__(self, cfg: Any, places: Places) -> None:
        super().__init__(cfg, places)  # pyright: ignore[reportCallIssue] (of the task's class)

    def of_source(self, cfg: Any, places: Places) -> Task:
        """The task of one source."""
        kind: Any = type(self).__mro__[2]  # behind the mixed class and this one
        task = kind(cfg, places)
        if hasattr(task, "read_for"):
            task.read_for(self)
        return task

    @cached_property
    def _of_sources(self) -> dict[str, Task]:
        """By its name, the task of each source."""
        tasks: dict[str, Task] = {}
        for name in sorted(self.cfg.data.mix):  # as Mix has them
            with named(name):
                data, places = placed_part(self.cfg.data, name, self.places)
                task: Any = self.of_source(self.cfg.model_copy(update={"data": data}), self.places)
                task.places = places  # now: a tokenizer may lie below --data_path
                tasks[name] = task
        return tasks

    @cached_property
    def unmixed(self) -> Task:
        """The task that reads the split that no source has, and each of data.valid_sets."""
        unmixed = {"mix": {}, "mixing": type(self.cfg.data.mixing)()}
        data = self.cfg.data.model_copy(update=unmixed)
        return self.of_source(self.cfg.model_copy(update={"data": data}), self.places)

    def sources(self, split: str) -> Mapping[str, Task]:
        """By the name of the source, the tasks that read the rows of a split. All sources train.
        Those that have rows of another split of their own give it; where none has, or data.files
        names it, the usual file of --data_path does, which has the name of the split.
        """
        if split == "train":
            return self._of_sources
        own = {
            name: task
            for name, task in self._of_sources.items()
            if _has_rows(task, split, self.places)
        }
        is_named = getattr(self.cfg.data.files, split, None) is not None
        return own if own and not is_named else {**own, split: self.unmixed}

    def rows(self, split: str) -> Iterator[Row]:
        return chain.from_iterable(self.rows_by_source(split))

    def rows_by_source(self, split: str) -> Iterator[Iterator[Row]]:
        """The rows of each source of a split, in the order of sources()."""
        return (_rows_of(name, task, split) for name, task in self.sources(split).items())

    def encode(self, row: Row) -> Encoded:
        if isinstance(row, _SourceRow):
            return row.task.encode(row)
        return super().encode(row)  # pyright: ignore (of the task's class; a row of no source)

    def earlier_encoding_ids(self) -> Sequence[str]:
        return ()  # a mix is new


def _rows_of(name: str, task: Task, split: str) -> Iterator[Row]:
    with named(name):
        for row in task.rows(split):
            yield _SourceRow(row, task)


def _uncut_fields(self: Any, row: Row) -> Any:
    if isinstance(row, _SourceRow):
        task: Any = row.task
        return task.uncut_fields(row)
    of_kind: Any = super(type(self), self)
    return of_kind.uncut_fields(row)


def _encode_rows(self: Any, rows: Sequence[Row]) -> list[Encoded]:
    of_kind: Any = super(type(self), self)
    return [
        row.task.encode(row) if isinstance(row, _SourceRow) else of_kind.encode_rows([row])[0]
        for row in rows
    ]


# Methods of abilities that only some tasks have.
_OF_ABILITIES: dict[str, Callable[..., Any]] = {
    "encode_rows": _encode_rows,
    "uncut_fields": _uncut_fields,
}


@lru_cache
def mixed(kind: type[Any]) -> type[Any]:
    """The class of a task that reads a mix, with the abilities of `kind`."""
    more = {name: method for name, method in _OF_ABILITIES.items() if hasattr(kind, name)}
    return type(f"Mixed{kind.__name__}", (_MixedRows, kind), more)


def placed_part(data: Any, name: str, places: Places) -> tuple[Any, Places]:
    """The block of a source, and where it reads. A folder is a --data_path of its own if it holds a
    file named after the training split, or if its source or format has files with names of their
    own.
    """
    part, folder = data.part(name), places.data_path
    if part.files.train != name or folder is None:
        return part, places
    below = folder / name
    if not below.is_dir() or not (part.names() is None or _holds(below, "train")):
        return part, places
    own_files = part.files.model_copy(update={"train": None})
    return part.model_copy(update={"files": own_files}), replace(places, data_path=below)


def _holds(folder: Path, split: str) -> bool:
    return any(first_split_file(folder, split, suffix) is not None for suffix in SUFFIXES)


def _has_rows(task: Any, split: str, places: Places) -> bool:
    data, folder = task.cfg.data, task.places.data_path
    if data.has_own_rows(split):
        return True
    if folder is None or folder == places.data_path:
        return False
    return data.names() is None or _holds(folder, split)


@contextmanager
def named(source: str) -> Iterator[None]:
    """Inside, an error of bad input says which source it is of."""
    try:
        yield
    except UserError as error:
        text = str(error)
        if text.startswith("data.mix"):
            raise
        message = f"data.mix[{source!r}]: {text}"
        if isinstance(error, DataError):
            raise DataError(message, place=error.place, field=error.field) from error
        raise type(error)(message) from error


def refuse_missing(data: Any, folder: Path | None) -> None:
    """One DataError for all sources whose file or folder is not there."""
    missing: list[str] = []
    for name in getattr(data, "mix", {}):
        file = data.part(name).files.train
        if file is None:
            continue
        if folder is None:
            missing.append(f"{name!r}: no --data_path was given")
            continue
        stem, _ = split_name(file)
        packed = (folder / f"{stem}.gz").is_file()
        if stem and not (folder / stem).exists() and not packed:
            missing.append(f"{name!r}: there is no {folder / stem}")
    if missing:
        raise DataError(
            f"data.mix: {'; '.join(missing)}. Names are those of files or folders below "
            "--data_path; a data set of the Hub has a block with `dataset`."
        )
