"""Files and folders that are never half written, and what to tell when a disk refuses. Imports no
torch.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, StorageError

FULL = "Free some space, or save elsewhere with --savedir_base."
ADVICE = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: "Raise the quota, or save elsewhere with --savedir_base.",
    errno.EROFS: "The file system is read-only: save elsewhere with --savedir_base.",
    errno.EACCES: "Grant this user write access, or save elsewhere with --savedir_base.",
    errno.EEXIST: "Another process is saving here: run an experiment once at a time.",
}


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Turn every OSError of a block into a StorageError that names the file (or `path`) and what to
    do.
    """
    try:
        yield
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "Check that the folder exists and can be written.")
        where = error.filename or path
        raise StorageError(f"{where}: {error.strerror or error}. {advice}") from error


def replace_file(path: Path, content: bytes, *, is_durable: bool = True) -> None:
    """Make `content` the whole of `path`: written aside, fsynced, renamed. StorageError when the
    disk refuses.

    is_durable: False leaves the fsync out, for what can be made again after a power cut.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with refusals(path):
        with temporary.open("wb") as file:
            file.write(content)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)


def write_json(path: Path, value: Any, *, is_durable: bool = True) -> None:
    """Make `value` the whole of `path`, as indented JSON. StorageError when the disk refuses."""
    replace_file(path, (json.dumps(value, indent=2) + "\n").encode(), is_durable=is_durable)


def refuse_existing(out: Path) -> None:
    """ConfigError when --out is there already."""
    if out.exists() or out.is_symlink():
        raise ConfigError(
            f"--out {out}: exists already, and nothing is overwritten. Give the name of a new "
            "folder."
        )


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` when the block ends well, and disappears when it
    does not.

    StorageError when the disk refuses.
    """
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.rename(temporary, out)
    except (OSError, StorageError) as error:
        reason = (
            error.__cause__ or error
        )  # the disk's own words: the advice of StorageError is for runs
        raise StorageError(
            f"{out}: cannot be written ({reason}). Free space there, or write elsewhere."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
