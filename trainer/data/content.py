"""What a split consists of: a digest of its rows, read out of files or remembered."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.identity import canonical_json
from trainer.config.userfile import placed
from trainer.errors import DataError
from trainer.files.remembered import program, recall

if TYPE_CHECKING:
    from trainer.protocol.task import Row, Task

Content = tuple[str, int]  # of a split: the digest of its rows, and how many they are


def content_of(task: Task, split: str, cache_dir: Path) -> Content:
    """The digest of a split and how many rows it has.

    The rows of a task that says so (`rows_are_of_files`) are read only when a file has changed.
    """

    def rows() -> Iterable[Row]:
        return task.rows(split)

    if not getattr(task, "rows_are_of_files", False):
        return content_of_rows(rows, task.encoding_id(), split)
    configured: Any = task
    values = configured.cfg.model_dump(mode="json")
    for trains in ("train", "optim", "schedule", "deepspeed", "label"):
        values.pop(trains, None)
    settings = canonical_json({"experiment": values, "data_path": str(configured.places.data_path)})
    return content_of_rows(rows, task.encoding_id(), split, settings=settings, cache_dir=cache_dir)


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

    def read() -> Content:
        return _content(rows(), encoding_id, split)

    if not settings or cache_dir is None:
        return read()
    facts = {"rows": settings, "encoding": encoding_id, "split": split, "program": program()}
    facts["here"] = os.path.abspath(
        placed(os.curdir)
    )  # a dictionary may name files by a relative path
    digest, count = recall(cache_dir, canonical_json(facts), read)
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
