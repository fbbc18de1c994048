"""Where the recordings of the references are: in this clone, and in $LATHE_PARITY besides."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor

from tests.parity.packing import unpacked_folder

PROJECT = Path(__file__).resolve().parents[2]
OUTSIDE = PROJECT / os.environ.get("LATHE_PARITY", "../shared/parity")
DATA = PROJECT / os.environ.get("LATHE_DATA", "../shared/data")
# Stands for a number that a recording of this clone leaves out. No result is as low.
LEFT_OUT = torch.finfo(torch.float32).min

T = TypeVar("T")


def folders(system: str) -> list[Path]:
    """The folders that hold recordings of a system: that of this clone first."""
    places = [unpacked_folder() / system, OUTSIDE / system]
    return [place for place in places if place.is_dir()]


def files(system: str, name: str) -> list[Path]:
    """The files of this name, the first of those that are equal byte for byte."""
    places = [folder / name for folder in folders(system)]
    by_digest = {digest(place): place for place in reversed(places) if place.is_file()}
    return list(reversed(by_digest.values()))


def statements_folder(task: str) -> Path | None:
    """A publisher's own files of one set of statements; the whole set outside goes first."""
    places = [DATA / "statements" / task, unpacked_folder() / "statements" / task]
    return next((place for place in places if place.is_dir()), None)


def is_of_this_clone(path: Path) -> bool:
    return path.is_relative_to(unpacked_folder())


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A case and its name in the ids of tests."""

    case: T
    name: str
    folder: Path  # where its files are
    digest: str  # of all that it is made of


def once(entries: Iterable[Entry[T]]) -> list[Entry[T]]:
    """The entries without those that are equal byte for byte to one before.

    One from outside that shares no more than its name with one of this clone is called
    NAME-outside.
    """
    found: dict[tuple[str, str], Entry[T]] = {}
    for entry in entries:
        found.setdefault((entry.name, entry.digest), entry)
    of_clone = {entry.name for entry in found.values() if is_of_this_clone(entry.folder)}
    return [
        Entry(entry.case, f"{entry.name}-outside", entry.folder, entry.digest)
        if entry.name in of_clone and not is_of_this_clone(entry.folder)
        else entry
        for entry in found.values()
    ]


def params(entries: Sequence[Entry[T]], what: str, system: str) -> list[Any]:
    """Parameters for pytest: the cases, or one that skips and says what is absent."""
    if entries:
        return [pytest.param(entry.case, id=entry.name) for entry in entries]
    reason = f"no {what} in tests/parity/recorded/{system} or $LATHE_PARITY/{system}"
    return [pytest.param(None, id="absent", marks=pytest.mark.skip(reason=reason))]


def file_params(system: str, name: str) -> list[Any]:
    """Parameters for pytest: every file of this name that differs from those before."""
    found = [Entry(path, name, path, digest(path)) for path in files(system, name)]
    return params(once(found), name, system)


def digest(*contents: Path | Any) -> str:
    """Of files, which may be absent, and of what JSON can write."""
    found = hashlib.sha256()
    for content in contents:
        found.update(_of_file(content) if isinstance(content, Path) else _of_value(content))
    return found.hexdigest()


@cache
def _of_file(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"absent"


def _of_value(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def known(got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """Both without the elements that the recording leaves out."""
    assert got.shape == want.shape, f"got shape {tuple(got.shape)}, want {tuple(want.shape)}"
    is_there = want != LEFT_OUT
    return (got, want) if is_there.all() else (got[is_there], want[is_there])
