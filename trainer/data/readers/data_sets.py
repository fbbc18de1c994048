"""Data sets of Hugging Face `datasets`: on the Hub, in a folder of files, or saved to disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from trainer.config.userfile import placed
from trainer.data.formats.subset import split_name
from trainer.errors import ConfigError, DataError
from trainer.files.opened import unseen

_INSTALL = "Install it: pip install -e '.[datasets]'."
_SAVED = ("dataset_dict.json", "state.json")  # of save_to_disk


def data_set(
    name: str,
    split: str,
    *,
    subset: str | None = None,
    revision: str | None = None,
    folder: Path | None = None,
    cache_dir: Path | None = None,
) -> Any:
    """One split of a data set: a folder here or below `folder`, else a Hub id.

    ConfigError without the package; DataError for what it cannot load.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"data.dataset={name!r} needs the package datasets, which is not here. {_INSTALL}"
        ) from None
    unseen()  # Arrow maps its files without Python
    below = (folder or Path()) / name
    place = below if below.is_dir() else Path(placed(name))
    datasets.disable_progress_bars()
    try:
        if any((place / file).is_file() for file in _SAVED):
            saved = datasets.load_from_disk(str(place))
            of_split, part = split_name(split)
            saved = saved[of_split] if isinstance(saved, datasets.DatasetDict) else saved
            saved = saved if part is None else saved.select(part.rows(len(saved)))
            return saved.with_format(None)  # lists, where it was saved to give arrays
        source = str(place) if place.is_dir() else name
        cache = None if cache_dir is None else str(cache_dir / "datasets")
        return datasets.load_dataset(
            source, subset, split=split, revision=revision, cache_dir=cache
        )
    except KeyError:
        raise DataError(
            f"{place} has no split {split!r}. Name its splits in data.splits."
        ) from None
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: DatasetGenerationError
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise DataError(
            f"data.dataset={name!r}, split {split!r}: {reason}. Give a folder (here or below "
            "--data_path), or a Hub id that this machine can reach; data.subset and data.splits "
            "choose within it."
        ) from error


def row_of_arrow(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of Arrow (Parquet, data sets) as JSON lines would hold it. Arrow gives every object of
    a column the keys of all, null where it has none: without that a call of one tool would have the
    arguments of all tools.
    """
    return {name: _with_own_keys(value) for name, value in row.items()}


def _with_own_keys(value: Any) -> Any:
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return {name: _with_own_keys(one) for name, one in pairs if one is not None}
    if isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value):  # pyright: ignore[reportUnknownVariableType]
        return [_with_own_keys(one) for one in cast("list[Any]", value)]
    return value  # pyright: ignore[reportUnknownVariableType]
