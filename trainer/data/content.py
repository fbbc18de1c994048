"""What a split consists of: a digest of its rows, read out of files or remembered."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.config.identity import canonical_json
from trainer.config.userfile import placed
from trainer.data import left_out
from trainer.data.formats.normal_form import row_hash
from trainer.data.mixed.store import mixed_digest
from trainer.data.mixed.task import named
from trainer.errors import ConfigError, DataError
from trainer.files.remembered import program, recall
from trainer.protocol.abilities import Mixes

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore
    from trainer.protocol.task import Row, Task

log = logging.getLogger(__name__)

VALID = "valid"
Content = tuple[str, int]  # of a split: the digest of its rows, and how many they are


def valid_splits(cfg: Any) -> list[str]:
    """The splits that evaluations score: "valid", and "valid_NAME" for each of data.valid_sets."""
    sets: Iterable[str] = getattr(getattr(cfg, "data", None), "valid_sets", ())
    return [VALID, *(f"{VALID}_{name}" for name in sets)]


def reader_of(task: Any, split: str) -> tuple[Any, str]:
    """The task that reads "train", "valid", "test" or "valid_NAME", a set in data.valid_sets, and
    what it calls that split: a set is the validation split of a task without a mix.
    """
    if split not in valid_splits(getattr(task, "cfg", None))[1:]:
        return task, split
    plain: Any = task.unmixed if isinstance(task, Mixes) else task
    data = plain.cfg.data.of_set(split.removeprefix(f"{VALID}_"))
    return type(plain)(plain.cfg.model_copy(update={"data": data}), plain.places), VALID


def rows_of(task: Any, split: str) -> Callable[[], Iterable[Row]]:
    """A function that reads the raw rows of a split (reader_of)."""
    reader, own_split = reader_of(task, split)
    return lambda: reader.rows(own_split)


def content_of(task: Task, split: str, cache_dir: Path) -> Content:
    """The digest of a split and how many rows it has.

    The rows of a task that says so (`rows_are_of_files`) are read only when a file has changed.
    """
    reader, own_split = reader_of(task, split)
    if isinstance(reader, Mixes):
        digests: dict[str, str] = {}
        num_rows = 0
        for name, source in reader.sources(own_split).items():
            with named(name), left_out.gathering_of_source(own_split, name):
                digests[name], count = content_of(source, own_split, cache_dir)
            num_rows += count
        return mixed_digest(digests), num_rows
    rows = rows_of(task, split)
    if not getattr(task, "rows_are_of_files", False):
        return content_of_rows(rows, task.encoding_id(), split)
    settings = _settings(task)
    return content_of_rows(rows, task.encoding_id(), split, settings=settings, cache_dir=cache_dir)


def _settings(task: Any) -> str:
    """All that the rows of a task depend on besides the files that they are read out of."""
    values = task.cfg.model_dump(mode="json")
    for trains in ("train", "optim", "schedule", "deepspeed", "label", "metrics"):
        values.pop(trains, None)
    return canonical_json({"experiment": values, "data_path": str(task.places.data_path)})


def shared_test_rows(task: Task, train: TokenStore, cache_dir: Path) -> left_out.Notes:
    """The test rows that are training rows as well, up to the normal form. Only test splits in
    files of the user's are looked at, and read again only when a file has changed; none is opened
    where there is no test split, or one that cannot be read.
    """
    configured: Any = task
    hashes, data = train.raw_hashes(), getattr(task.cfg, "data", None)
    is_of_files = getattr(task, "rows_are_of_files", False) and configured.places.data_path
    is_of_hub = getattr(data, "dataset", None) or getattr(data, "source", None) == "hub"
    if hashes is None or not is_of_files or is_of_hub:
        return left_out.Notes()

    def read() -> dict[str, Any]:
        notes = left_out.Notes()
        trained = np.sort(hashes)
        for number, row in enumerate(task.rows("test"), start=1):
            name = np.uint64(row_hash(row))
            place = int(np.searchsorted(trained, name))
            if place < len(trained) and trained[place] == name:
                notes.add(left_out.Note(f"row {number}", left_out.IN_TRAIN))
        return notes.record()

    facts = {"shared": _settings(task), "train": train.digest, "program": program()}
    facts["here"] = os.path.abspath(placed(os.curdir))
    try:
        return left_out.Notes.of(recall(cache_dir, canonical_json(facts), read))
    except (ConfigError, DataError) as error:
        log.debug("the test split is not compared with the training split: %s", error)
        return left_out.Notes()


def content_of_rows(
    rows: Callable[[], Iterable[Row]],
    encoding_id: str,
    split: str,
    *,
    settings: str = "",
    cache_dir: Path | None = None,
) -> Content:
    """The digest of rows and how many there are.

    settings, cache_dir: all that the rows depend on besides the files that they are read out of; in
    `cache_dir` their digest is then remembered. "": they are read each time.
    """

    def read() -> list[Any]:
        with left_out.reading() as notes:
            digest, count = _content(rows(), encoding_id, split)
        return [digest, count, notes.record()]

    if not settings or cache_dir is None:
        return _gather(split, read())
    facts = {"rows": settings, "encoding": encoding_id, "split": split, "program": program()}
    facts["here"] = os.path.abspath(
        placed(os.curdir)
    )  # a dictionary may name files by a relative path
    return _gather(split, recall(cache_dir, canonical_json(facts), read))


def _gather(split: str, value: list[Any]) -> Content:
    """The content out of what was read or remembered; its notes are gathered."""
    digest, count, record = value
    left_out.gather(split, left_out.Notes.of(record))
    return digest, count


class RowHasher:
    """sha256 over an encoding id and rows in their order, whatever the order of a row's keys."""

    def __init__(self, encoding_id: str) -> None:
        self._sha = hashlib.sha256(f"{encoding_id}\n".encode())
        self.rows = 0

    def add(self, row: Row) -> None:
        self._sha.update(json.dumps(row, sort_keys=True).encode())
        self._sha.update(b"\n")
        self.rows += 1

    def pass_through(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The same rows, each of them added."""
        for row in rows:
            self.add(row)
            yield row

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


def _content(rows: Iterable[Row], encoding_id: str, split: str) -> Content:
    hasher = RowHasher(encoding_id)
    for row in rows:
        hasher.add(row)
    if hasher.rows == 0:
        raise DataError(f"the {split} split has no rows. Give it at least one.")
    return hasher.hexdigest(), hasher.rows
