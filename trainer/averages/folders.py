"""Exported folders whose weights are to be averaged: whether they belong together."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import ConfigError
from trainer.exports import record
from trainer.exports.record import Record
from trainer.models import adapters

EXPORTS = ("best", "final")
_SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.safetensors$)")
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
# What may differ in two config.json of one architecture.
_FREE = {"transformers_version", "_name_or_path", "dtype", "torch_dtype"}
_OF_ADAPTERS = ("r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "alpha_pattern")
_OF_ADAPTERS += ("trainable_token_indices",)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        with safe_open(self.path, framework="pt", device="cpu") as file:
            return file.get_tensor(self.name)


@dataclass(frozen=True)
class Sources:
    """Exported folders with one architecture, and their records."""

    folders: list[Path]
    records: list[Record]
    are_adapters: bool

    @classmethod
    def of(cls, folders: Sequence[Path]) -> Sources:
        """Every difference between the folders is in one ConfigError, by name."""
        exports = [_export_in(folder) for folder in folders]
        records: list[Record] = []
        for folder in exports:
            entry = record.read(folder)
            if entry is None:
                raise ConfigError(
                    f"{folder} has no {record.NAME}, which says what was trained. Give best/ or "
                    "final/ of a run."
                )
            records.append(entry)
        problems = [
            problem
            for folder, entry in zip(exports[1:], records[1:], strict=True)
            for problem in _differences(exports[0], records[0], folder, entry)
        ]
        if problems:
            raise ConfigError(
                f"these folders have no average with {exports[0]}:\n"
                + "\n".join(f"  {problem}" for problem in problems)
                + "\nGive folders of one task, base and shape."
            )
        return cls(exports, records, adapters.are_in(exports[0]))


def _export_in(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder. Give best/ or final/ of a run, or a run.")
    export = next((folder / name for name in EXPORTS if (folder / name).is_dir()), folder)
    others = sorted(path.name for path in export.rglob("*") if path.suffix in _OTHER_WEIGHTS)
    if others:
        raise ConfigError(
            f"{export} holds {', '.join(others)}: only safetensors are averaged. Give best/ or "
            "final/ of a run."
        )
    return export


def tensors_of_folder(folder: Path) -> dict[tuple[str, str], StoredTensor]:
    """By (file, name) every tensor in a folder; the shards of a file count as one file.

    ConfigError for a file that cannot be read.
    """
    tensors: dict[tuple[str, str], StoredTensor] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        place = _SHARD.sub("", path.relative_to(folder).as_posix())
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    shape = tuple(file.get_slice(name).get_shape())
                    tensors[place, name] = StoredTensor(path, name, shape)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: {error}. Export the model again.") from None
    return tensors


def _differences(first: Path, one: Record, second: Path, other: Record) -> list[str]:
    """What keeps the second folder from being averaged with the first, a line for each."""
    problems: list[str] = []
    tasks = [each.experiment.get("task") for each in (one, other)]
    if tasks[0] != tasks[1]:
        problems.append(f"{second}: of task {tasks[1]!r}, want {tasks[0]!r}")
    if one.base_fingerprint != other.base_fingerprint:
        problems.append(
            f"{second}: trained beside the frozen base {other.base_fingerprint or 'none'}, want "
            f"{one.base_fingerprint or 'none'}"
        )
    for name, keys in ((adapters.ADAPTER, _OF_ADAPTERS), ("config.json", None)):
        contents = [_json(folder / name) for folder in (first, second)]
        for key in keys or sorted(set().union(*contents) - _FREE):
            values = [_plain(content.get(key)) for content in contents]
            if values[0] != values[1]:
                problems.append(f"{second / name}: {key} is {values[1]!r}, want {values[0]!r}")
    tensors, others = tensors_of_folder(first), tensors_of_folder(second)
    for key in sorted(tensors.keys() ^ others.keys())[:5]:
        where = "missing" if key in tensors else f"not in {first}"
        problems.append(f"{second / key[0]}: {key[1]} is {where}")
    shapes = [key for key in tensors if key in others and tensors[key].shape != others[key].shape]
    problems += [
        f"{second / key[0]}: {key[1]} has shape {others[key].shape}, want {tensors[key].shape}"
        for key in shapes[:5]
    ]
    return problems


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}. Export the model again.") from None
    return content if isinstance(content, dict) else {}


def _plain(value: Any) -> Any:
    return (
        sorted(value)
        if isinstance(value, list) and all(isinstance(x, str) for x in value)
        else value
    )
