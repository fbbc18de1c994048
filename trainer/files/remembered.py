"""Caches values that were read from files, as long as none of the files changes (opened.py)."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.errors import StorageError
from trainer.files.atomic import read_json, sha256_of, write_json
from trainer.files.opened import is_same, reading

FOLDER = "remembered"  # in the cache


def recall(cache: Path, key: str, compute: Callable[[], Any], *, with_folders: bool = True) -> Any:
    """The JSON value of `compute`: the cached one of this key if the files that `compute` read
    have not changed, else a new one.

    with_folders: False if a new file could not change the value.
    """
    place = cache / FOLDER / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    record = read_json(place)
    # a record that another program wrote may have any form
    with suppress(OSError, KeyError, TypeError, ValueError, AttributeError, IndexError):
        if record is not None and "value" in record and is_same(record):
            return record["value"]
    # a cache on a read-only disk returns its values, and stores no new ones
    # The folder is made before reading(), because the cache may be in a folder of the data.
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
    with reading() as noted:
        value = compute()
    facts = noted.record(with_folders=with_folders)
    if facts is not None:
        with suppress(StorageError):
            write_json(place, {"value": value, **facts}, is_durable=False)
    return value


def cached_sha256(path: Path, cache: Path) -> str:
    """sha256 of a file's content, 64 hex characters; read only when the file has changed."""
    resolved = path.resolve()
    return recall(
        cache,
        f"sha256 {resolved}",
        lambda: sha256_of(resolved),
        with_folders=False,
    )


@functools.cache
def program() -> str:
    """A digest of the sources of this program, because the code that reads changes, too."""
    digest = hashlib.sha256(sys.version.encode())
    root = Path(__file__).resolve().parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
