"""An index of the raw rows of a training split: how many there are, and any of them by its number.

It is built once for files of the same names, sizes and times, and kept in the cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.config.identity import canonical_json
from trainer.config.userfile import placed
from trainer.data.formats import picked
from trainer.data.formats.picked import Picked, Placed, Sought
from trainer.data.formats.subset import split_name
from trainer.data.readers.row_files import files_in
from trainer.data.stream.files import RowFile, Stamp, index_file
from trainer.errors import ConfigError, DataError
from trainer.files.atomic import read_json
from trainer.files.build_once import build_once

if TYPE_CHECKING:
    from trainer.protocol.task import Task

log = logging.getLogger(__name__)

_FORMAT = 1
_META = "meta.json"
_FIRST = 100  # rows that tell the format; as many as readers look at
_SAVED = ("dataset_dict.json", "state.json")  # of save_to_disk


class RowIndex:
    """The raw rows of a split by their numbers, from 0."""

    def __init__(self, folder: Path, *, what: str, part: str) -> None:
        """what: the files, for messages. part: of the rows, as of_subset() reads it; "": all."""
        self.folder, self.what = folder, what
        self.meta: dict[str, Any] = json.loads((folder / _META).read_text(encoding="utf-8"))
        self._files = [RowFile(folder, facts) for facts in self.meta["files"]]
        self._ends = np.cumsum([len(file) for file in self._files])
        subset = split_name(part)[1]
        total = int(self._ends[-1])
        self._rows = range(total) if subset is None else subset.rows(total)
        if not self._rows:
            raise DataError(f"{what} has no row in {part}. Name rows that it has.")
        shas = [facts["sha256"] for facts in self.meta["files"]]
        self.digest = hashlib.sha256(canonical_json([shas, part]).encode()).hexdigest()
        self._learnt: dict[str, Any] = {}
        self.first = self.rows(range(min(_FIRST, len(self))))

    def __len__(self) -> int:
        return len(self._rows)

    def picked(self, number: int, rows: Sequence[Placed]) -> Picked:
        """Rows that follow one another, of which the first has this number, for readers."""
        return Picked(number, rows, self.first, self.what, self._learnt)

    def rows(self, numbers: Sequence[int]) -> list[Placed]:
        """(place, row) of each number, in their order. DataError names the place of a bad row."""
        positions = np.asarray(numbers, np.int64) + self._rows.start
        files = np.searchsorted(self._ends, positions, side="right")
        by_place: dict[int, Placed] = {}
        for number in np.unique(files):
            places = np.flatnonzero(files == number)
            file = self._files[number]
            local = positions[places] - (self._ends[number] - len(file))
            by_place.update(zip(places.tolist(), file.rows(local.tolist()), strict=True))
        return [by_place[place] for place in range(len(positions))]


def open_index(task: Task, cache_dir: Path) -> RowIndex:
    """The index of a task's training rows, from the cache or built; its seconds are told then.

    ConfigError for rows that are not in files of one row each.
    """
    files, part, what = _files_of(task)
    stamps = [asdict(Stamp.of(file)) for file in files]
    key = hashlib.sha256(canonical_json([_FORMAT, stamps]).encode()).hexdigest()

    def build(temporary: Path) -> None:
        began = time.monotonic()
        facts = [index_file(file, temporary, number) for number, file in enumerate(files)]
        text = json.dumps({"files": facts})
        (temporary / _META).write_text(text, encoding="utf-8")
        copies = [one["copy"] for one in facts if one["copy"] is not None]
        log.info(
            "index of %s: %s rows in %d file(s), %d of them copied to be read in any order; %.1f s",
            *(what, f"{sum(one['rows'] for one in facts):,}", len(facts), len(copies)),
            time.monotonic() - began,
        )

    folder = build_once(cache_dir / "rows" / key[:32], build, is_whole=_is_whole)
    return RowIndex(folder, what=what, part=part)


def _is_whole(folder: Path) -> bool:
    return read_json(folder / _META) is not None


def _files_of(task: Task) -> tuple[list[Path], str, str]:
    """The files of the training rows in their order, a part of the rows behind them ("[:100]" or
    ""), and what messages call them.
    """
    try:
        with picked.seeking():
            for _ in task.rows("train"):
                break
    except Sought as sought:
        source = sought.source
    else:
        raise ConfigError(
            f"data.stream: the training rows of this task ({task.cfg.task}, its data.source and "
            "format) are not read one by one from files. Leave stream out."
        )
    if isinstance(source, tuple):
        return _files_of_data_set(task, *source)
    name, subset = (source.name, None) if source.exists() else split_name(source.name)
    path = source.with_name(name)
    files = files_in(path) if path.is_dir() else [path]
    return files, "" if subset is None else subset.text, source.name


def _files_of_data_set(task: Any, name: str, split: str) -> tuple[list[Path], str, str]:
    below = (task.places.data_path or Path()) / name
    place = below if below.is_dir() else Path(placed(name))
    fetched = f"`hf download {name} --repo-type dataset --local-dir FOLDER`, then name FOLDER"
    if not place.is_dir():
        raise ConfigError(
            f"data.stream: data.dataset={name!r} is no folder here or below --data_path, and only "
            f"shards on this machine are streamed. Fetch it: {fetched}."
        )
    if any((place / file).is_file() for file in _SAVED):
        raise ConfigError(
            f"data.stream: {place} was written by save_to_disk. Write it as Parquet "
            "(Dataset.to_parquet) and name that folder, or leave stream out."
        )
    import datasets

    stem, subset = split_name(split)
    try:
        builder = datasets.load_dataset_builder(str(place), task.cfg.data.subset)
        data_files = dict(builder.config.data_files or {})
        files = [Path(str(file)) for file in data_files[stem]]
    except KeyError:
        raise DataError(f"{place} has no split {stem!r}. Name its splits in data.splits.") from None
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise DataError(f"data.dataset={name!r}, split {split!r}: {reason}.") from error
    return files, "" if subset is None else subset.text, f"{name} ({split})"
