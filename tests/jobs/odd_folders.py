"""Run folders that nobody wrote on purpose: each holds one thing that cannot be read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs.record.paths import RunFolder

DEEP = "[" * 100_000 + "]" * 100_000
NOBODY = 65534

Poison = Callable[[RunFolder], None]


def folder_at(name: str) -> Poison:
    """A folder stands where a file is wanted."""

    def put(run: RunFolder) -> None:
        path = _free(run.path / name)
        path.mkdir()
        (path / "inside").touch()

    return put


def pipe_at(name: str) -> Poison:
    """A named pipe to which nobody ever writes: whoever opens it to read waits for ever."""

    def put(run: RunFolder) -> None:
        os.mkfifo(_free(run.path / name))

    return put


def loop_at(name: str) -> Poison:
    """The file is a link to itself."""

    def put(run: RunFolder) -> None:
        path = _free(run.path / name)
        path.symlink_to(path.name)

    return put


def text_at(name: str, text: str) -> Poison:
    """The file holds this text."""

    def put(run: RunFolder) -> None:
        _free(run.path / name).write_text(text)

    return put


def huge_at(name: str) -> Poison:
    """The file has a terabyte of zeros, which take no room on the disk."""

    def put(run: RunFolder) -> None:
        path = _free(run.path / name)
        path.touch()
        os.truncate(path, 1 << 40)

    return put


def deep_at(name: str) -> Poison:
    """The file is JSON that is nested 100,000 deep."""
    return text_at(name, f'{{"a": {DEEP}}}\n')


def together(*poisons: Poison) -> Poison:
    """Several of them in one folder."""

    def put(run: RunFolder) -> None:
        for poison in poisons:
            poison(run)

    return put


def _free(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() or path.is_fifo():
        path.unlink()
    return path


def status_of(**changes: Any) -> str:
    """A status.json with these values."""
    at = "2026-11-23T07:00:00+00:00"
    return json.dumps({"state": "succeeded", "step": 1, "total": 1, "updated_at": at, **changes})


@contextmanager
def as_stranger(private: Path) -> Iterator[None]:
    """Inside, this process may not enter a folder: it is that of a colleague with umask 077."""
    is_root = os.geteuid() == 0
    private.chmod(0o700 if is_root else 0)
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        private.chmod(0o700)
