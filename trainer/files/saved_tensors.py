"""Named tensors that several files hold together, whole or in pieces; only what is asked for is
read.

A piece is a run of elements of the flattened tensor, called `name@first/shape`: "w@12/4x8" are the
elements of w, a tensor of 4 times 8, from the thirteenth on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import CheckpointError

_PIECE = re.compile(r"(.*)@(\d+)/([\dx]*)", re.DOTALL)


def piece_name(name: str, start: int, shape: Sequence[int]) -> str:
    """The name in a file of the elements of a tensor from `start` on."""
    return f"{name}@{start}/{'x'.join(map(str, shape))}"


def part_of(tensors: Mapping[str, Tensor], name: str, start: int, count: int) -> Tensor:
    """(count,) elements of a flattened tensor, fewer at its end. From SavedTensors nothing else is
    read.
    """
    if isinstance(tensors, SavedTensors):
        return tensors.part(name, start, count)
    return tensors[name].flatten()[start : start + count]


@dataclass(frozen=True)
class _Place:
    start: int
    count: int
    file: Any  # safe_open's
    key: str

    def read(self) -> Tensor:
        return self.file.get_tensor(self.key).flatten()  # a view of the file


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of files by name; each is put together when it is asked for."""

    def __init__(self, paths: Sequence[Path], renamed: Callable[[str], str] = str) -> None:
        """CheckpointError when a file cannot be read, or an element is missing or there twice."""
        self._places: dict[str, list[_Place]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            with _unreadable(path):
                file: Any = safe_open(path, framework="pt", device="cpu")
                for key in file.keys():  # noqa: SIM118 (not a mapping)
                    self._add(renamed(key), file, key, path)
        for name, places in self._places.items():
            places.sort(key=lambda place: place.start)
            ends = [0, *(place.start + place.count for place in places)]
            starts = [*(place.start for place in places), prod(self._shapes[name])]
            if starts != ends:
                raise CheckpointError(
                    f"{paths[0].parent}: elements of {name!r} are missing or stand there twice. "
                    "Use another checkpoint."
                )

    def _add(self, name: str, file: Any, key: str, path: Path) -> None:
        size = tuple(file.get_slice(key).get_shape())
        match, start, shape = _PIECE.fullmatch(name), 0, size
        if match:
            name, start = match[1], int(match[2])
            shape = tuple(int(axis) for axis in match[3].split("x") if axis)
        places = self._places.setdefault(name, [])
        if places and (not match or self._shapes[name] != shape):
            raise CheckpointError(
                f"{path}: {name!r} is in an earlier shard as well. Use another checkpoint."
            )
        self._shapes[name] = shape
        places.append(_Place(start, prod(size), file, key))

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __getitem__(self, name: str) -> Tensor:
        return self.part(name, 0, prod(self._shapes[name])).reshape(self._shapes[name])

    def part(self, name: str, start: int, count: int) -> Tensor:
        """(count,) elements of a flattened tensor from `start` on, fewer at its end; a view of the
        file where one holds them all.
        """
        stop = start + count
        pieces = [
            place.read()[max(start - place.start, 0) : stop - place.start]
            for place in self._places[name]
            if place.start < stop and start < place.start + place.count
        ]
        if not pieces:
            return self._places[name][0].read()[:0]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class _unreadable:
    """Inside, an error of reading a file becomes a CheckpointError that names it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (OSError, SafetensorError)):
            raise CheckpointError(f"{self._path}: {error}. Use another checkpoint.") from error
