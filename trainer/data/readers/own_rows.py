"""The rows of a split of a user's own data, with our names of columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.formats.layouts import Layout
from trainer.config.own_rows import OwnRows
from trainer.data.formats import picked
from trainer.data.formats.held_out import PLACES, place_of_row
from trainer.data.readers import row_files
from trainer.data.readers.data_sets import data_set, row_of_arrow
from trainer.data.readers.folders import (
    only_row_file,
    required_folder,
    split_file,
    split_names,
)
from trainer.data.usual.placed import Around
from trainer.data.usual.rows import in_our_form
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

_OF_DATASETS = {"train": "train", "valid": "validation", "test": "test"}
FILES = OwnRows()  # the default: files by their usual names


def own_rows(
    own: OwnRows,
    split: str,
    folder: Path | None,
    *,
    layout: Layout,
    suffixes: Sequence[str] = row_files.SUFFIXES,
    first: str | None = None,
    cache_dir: Path | None = None,
) -> Iterator[tuple[str, Row]]:
    """(place, row) of "train", "valid" or "test", in the order of the files, with the names of
    `layout`, whatever the format of the files.

    folder: --data_path. suffixes: of files that are searched by the name of the split. first: the
    suffix that is read if there are files of several kinds; the others are noted. cache_dir: where
    data sets of the Hub are cached. DataError and ConfigError name the place of the problem.
    """
    split_names(split)
    is_shared = bool(own.valid_share) and split in ("train", "valid")
    of_split = "train" if is_shared else split
    some = picked.current() if split == "train" else None
    if some is not None:
        what, rows = some.what, iter(some.rows)
    elif own.dataset is not None:
        name = getattr(own.splits, of_split) or _OF_DATASETS[of_split]
        picked.tell((own.dataset, name))
        raw_rows = data_set(
            own.dataset,
            name,
            subset=own.subset,
            revision=own.revision,
            folder=folder,
            cache_dir=cache_dir,
        )
        what = f"{own.dataset} ({name})"
        rows = (
            (f"{what}, row {number}", row_of_arrow(row))
            for number, row in enumerate(raw_rows, start=1)
        )
    else:
        path = _file(own, of_split, folder, suffixes, first)
        picked.tell(path)
        what, rows = path.name, row_files.placed_rows(path)
    rows = in_our_form(rows, own, layout, what=what, around=Around(folder))
    yield from _share(rows, own.valid_share, split, layout) if is_shared else rows


def _file(
    own: OwnRows, split: str, folder: Path | None, suffixes: Sequence[str], first: str | None
) -> Path:
    """The file, or folder of files, of a split."""
    name = getattr(own.files, split)
    if own.valid_share and split == "train" and name is None:
        return only_row_file(required_folder(folder, "a file of rows"), suffixes)
    return split_file(folder, split, suffixes, name=name, key="data.files", first=first)


def _share(
    rows: Iterator[tuple[str, Row]], share: float, split: str, layout: Layout
) -> Iterator[tuple[str, Row]]:
    """The rows of one side of data.valid_share (see formats/held_out.py)."""
    is_empty, per_mille = True, round(share * PLACES)
    for place, row in rows:
        # a plain copy, because what decides the side is not read by the task yet
        side = place_of_row(dict(row), layout)
        # the reader says what a row lacks that asks nothing
        if side is None or (side < per_mille) == (split == "valid"):
            is_empty = False
            yield place, row
    if is_empty:
        raise DataError(
            f"data.valid_share={share} leaves no row for the {split} split. Choose another share, "
            "or give it a file of its own."
        )
