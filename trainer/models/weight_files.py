"""The weight files of a base that is a folder or a Hub id: safetensors or pickles of tensors, one
or sharded; memory-mapped, so that the ranks of a machine share what they read.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Set
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = ("model.safetensors", "pytorch_model.bin")  # the first that is there is read


def find_file(source: str, name: str) -> Path | None:
    """The file `name` of a folder or Hub id; None when it has none, or cannot be reached."""
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file

    path = cached_file(
        source,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else Path(path)


def of(source: str) -> list[Path]:
    """The files that hold a base's weights; none when it has none, or cannot be reached.

    ConfigError when an index lists a file that is not there.
    """
    for kind in _KINDS:
        single, index = find_file(source, kind), find_file(source, f"{kind}.index.json")
        if single is not None:
            return [single]
        if index is not None:
            return _shards(source, index)
    return []


def _shards(source: str, index: Path) -> list[Path]:
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    shards = [find_file(source, name) for name in names]
    missing = [name for name, path in zip(names, shards, strict=True) if path is None]
    if missing:
        raise ConfigError(
            f"base={source!r}: {', '.join(missing)} missing, which {index.name} lists. Copy it "
            "again."
        )
    return [path for path in shards if path is not None]


def tensors(source: str, names: Set[str]) -> dict[str, Tensor]:
    """Those of a base's weights that are called so in its files."""
    kept: dict[str, Tensor] = {}
    for path in of(source):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt", device="cpu") as file:
                kept |= {name: file.get_tensor(name) for name in names & set(file.keys())}
        else:
            kept |= {name: tensor for name, tensor in read_pickle(path).items() if name in names}
    return kept


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a pytorch_model.bin; ConfigError when it holds anything else, and no code of
    it is run.
    """
    try:
        return torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except UnpicklingError as error:
        raise ConfigError(
            f"{path}: a pickle of more than tensors, which could run code. Use safetensors."
        ) from error
