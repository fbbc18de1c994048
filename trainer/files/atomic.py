"""Files and folders that are never half written, and the error when a disk refuses.

Imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from trainer.errors import ConfigError, LatheError, StorageError

BLOCK = 4 << 20  # bytes read at once
LARGEST = 64 << 20  # bytes of what is small: the list of 100,000 files of a snapshot is 20 MiB
ELSEWHERE = "save elsewhere (--savedir_base of a run, --out of other commands)"
FULL = f"Free some space, or {ELSEWHERE}."
ADVICE = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: f"Raise the quota, or {ELSEWHERE}.",
    errno.EROFS: f"The file system is read-only: {ELSEWHERE}.",
    errno.EACCES: f"Grant this user write access, or {ELSEWHERE}.",
    errno.EEXIST: "Another process is saving here: run an experiment once at a time.",
}


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Turn every OSError of a block, and what safetensors and tokenizers raise in its place, into a
    StorageError that names the file (or `path`) and what to do.
    """
    try:
        yield
    except LatheError:
        raise
    except (
        Exception
    ) as error:  # any error: libraries in Rust have no error of their own for the disk
        number = disk_error(error)
        if number is None:
            raise
        advice = ADVICE.get(number, "Check that the folder exists and can be written.")
        where = getattr(error, "filename", None) or path
        reason = getattr(error, "strerror", None) or (os.strerror(number) if number else error)
        raise StorageError(f"{where}: {reason}. {advice}") from error


def disk_error(error: Exception) -> int | None:
    """The errno with which a disk refused, 0 for one without a number; None for another error."""
    if isinstance(error, OSError):
        return error.errno or 0
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def sync(path: Path) -> None:
    """fsync a file, or a folder's names, so that they survive a power cut. OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        cannot_sync_folders = error.errno in (errno.EINVAL, errno.ENOTSUP)  # some network mounts
        if not (cannot_sync_folders and path.is_dir()):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def aside(path: Path, *, is_durable: bool = True) -> Iterator[Path]:
    """A free name beside `path` to write a file under; it is fsynced and becomes `path` when the
    block ends well.

    When the block does not end well, `path` stays as it was and the file is deleted. Several
    processes may write the same `path`: the last one counts. StorageError when the disk refuses.
    is_durable: False leaves the fsync out, for what can be made again after a power cut.
    """
    temporary = _free_name(path)
    try:
        with refusals(path):
            yield temporary
            if is_durable:
                sync(temporary)
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes, *, is_durable: bool = True) -> None:
    """Make `content` the whole of `path`, at once (`aside`). StorageError when the disk refuses."""
    with aside(path, is_durable=is_durable) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: Any, *, is_durable: bool = True) -> None:
    """Make `value` the whole of `path`, as indented JSON. StorageError when the disk refuses."""
    replace_file(path, _json(value), is_durable=is_durable)


def overwrite_json(path: Path, value: Any) -> None:
    """Overwrite a small file that exists with `value`, in place, for when a full disk refuses
    write_json. A reader may for a moment see half of it. StorageError when this is refused, too.
    """
    with refusals(path), path.open("r+b", buffering=0) as file:
        file.write(_json(value))
        file.truncate()


def create_json(path: Path, value: Any) -> bool:
    """Make `path` with this value, whole and durable; False, and nothing is done, when it is there
    already.

    Of several processes that call this at once only one gets True. StorageError when the disk
    refuses.
    """
    temporary = _free_name(path)
    with refusals(path):
        try:
            temporary.write_bytes(_json(value))
            sync(temporary)
            os.link(temporary, path)  # unlike a rename, it never replaces
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
    return True


def open_file(path: Path) -> BinaryIO:
    """A file for reading. OSError, and at once, also for what is none: a pipe or a device, at which
    a reader would wait for ever, or a folder.
    """
    descriptor, _ = _open(path)
    return open(path, "rb", opener=lambda *_: descriptor)  # its name is the path


def _open(path: Path) -> tuple[int, int]:
    """(descriptor, size) of a file that is opened for reading. OSError as `open_file`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    about = os.fstat(descriptor)
    if stat.S_ISREG(about.st_mode):
        return descriptor, about.st_size
    os.close(descriptor)
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "no file but a pipe, a socket or a device", str(path))


def read_small(path: Path) -> bytes:
    """The content of a file that is small by its nature. OSError as `open_file`, and for more than
    LARGEST bytes: a file of another kind, put there by mistake, does not fill the memory.

    It makes no file object, which a list of thousands of runs would make ten of for each run.
    """
    descriptor, size = _open(path)
    try:
        content = b""
        # the end is where nothing more comes: the file may have grown, and some have no size
        while len(content) <= LARGEST:
            most = min(max(size - len(content), 0) + 4096, LARGEST + 1 - len(content))
            block = os.read(descriptor, most)
            if not block:
                return content
            content += block
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)
    raise _too_large(path)


def bounded_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file. OSError for one of more than LARGEST bytes."""
    while line := file.readline(LARGEST + 1):
        if len(line) > LARGEST:
            raise _too_large(file.name)
        yield line


def _too_large(path: Path | str) -> OSError:
    return OSError(errno.EFBIG, f"more than {LARGEST >> 20} MiB", str(path))


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a small JSON file.

    None when it is absent or (its writer was killed) no whole object, or one that is nested too
    deeply to be read. OSError as `read_small`.
    """
    try:
        value: Any = json.loads(read_small(path).decode())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def refuse_link_out(folder: Path) -> None:
    """StorageError for a run folder that is a link out of its base: its lock stands in the base, so
    a run of another base could train in the same folder.
    """
    if folder.is_symlink() and not folder.resolve().is_relative_to(folder.parent.resolve()):
        raise StorageError(
            f"{folder}: it is a link to {folder.resolve()}, outside of --savedir_base. Move that "
            "folder here, or give the --savedir_base that holds it."
        )


def sha256_of(path: Path) -> str:
    """sha256 of a file's content, 64 hex characters. OSError."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _free_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def size_of(nbytes: int) -> str:
    """Bytes as a person reads them, in the unit that shows what there is: 1.50 GiB, 12.0 MiB,
    3.1 KiB.
    """
    for unit, size, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1)):
        if nbytes >= size:
            return f"{nbytes / size:.{digits}f} {unit}"
    return f"{nbytes / 2**10:.1f} KiB"


def check_output(out: Path) -> None:
    """ConfigError for a file that could not be written once the work is done: its folder is not
    there, or it is a folder itself. And for a name in .gz: nothing that we write is packed, and
    whoever read it would refuse it.
    """
    if out.is_dir():
        raise ConfigError(f"{out}: is a folder. Want the name of a file: add one.")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out}: its folder does not exist. Make it, or write elsewhere.")
    if out.suffix == ".gz":
        raise ConfigError(
            f"{out}: got a name in .gz, but what is written is not packed. Name it "
            f"{out.with_suffix('')}, and pack it afterwards."
        )


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
        # the disk's own words: the advice of StorageError is for runs
        reason = error.__cause__ or error
        raise StorageError(
            f"{out}: cannot be written ({reason}). Free space there, or write elsewhere."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
