"""What can go wrong with a scheduler or a run folder. The rest of the tree, and ConfigError, is in
trainer/errors.py.

LatheError
├── UserError
│   └── Refused      2  the scheduler looked at the job and said no: nothing was started
├── NotYet          1  the scheduler takes no more jobs for now: nothing was started
├── Unreachable      4  the scheduler cannot be seen; whatever was asked may or may not have
                     happened
├── Busy             1  another process holds the lock of an experiment
├── Transient        1  what may be over at the next try: git is slow, files change at this moment
├── SomeFailed       3  some experiments of the group could not be submitted or ended badly
└── NothingMatched   5  no experiment is what the command asked for
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import subprocess
from pathlib import Path

from trainer.errors import LatheError, StorageError, UserError
from trainer.files.atomic import disk_error

EXIT_SOME_FAILED, EXIT_UNREACHABLE, EXIT_NOTHING_MATCHED = 3, 4, 5
# another copy of this attempt runs, or nobody waits for it any more: this one does nothing
EXIT_DUPLICATE = 76
# the folders of an absolute path
PLACE = re.compile(r"(?:(?<![\w.\-/:@])|(?<=file://))~?/(?:[\w.\-+@%=]+/)+")
HIDDEN = ".../"  # in place of folders that are none of a client's business
# A disk that refuses so refuses again until somebody changes something. What else an OSError tells
# (a full disk, too many open files, a file server that is away) may pass by itself.
PERMANENT = (
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.EEXIST,
    errno.ENXIO,
    errno.EFBIG,
    errno.EINVAL,
)


class Refused(UserError):
    """The scheduler refused a job, in its own words. The job did not start and never will."""


class NotYet(LatheError):
    """The scheduler takes no job now, because of a limit that passes by itself: a number of jobs.
    Nothing was started; the same job is taken later.
    """


class Unreachable(LatheError):
    """The scheduler cannot be seen. It says nothing about a job: a submission may have arrived."""

    exit_code = EXIT_UNREACHABLE


class Busy(LatheError):
    """Another process holds the lock of this experiment."""


class Transient(LatheError):
    """Something was too slow, or changed at this moment. The same action may succeed later."""


class SomeFailed(LatheError):
    """Some experiments of a group could not be submitted or ended badly; the others are fine."""

    exit_code = EXIT_SOME_FAILED


class NothingMatched(LatheError):
    """No experiment fits what was asked for."""

    exit_code = EXIT_NOTHING_MATCHED


def is_transient(error: BaseException) -> bool:
    """Whether the same action may succeed later although nobody changes anything: a full disk, a
    lock, a scheduler that does not answer. False for all that was never thought of.
    """
    if isinstance(error, StorageError) and isinstance(error.__cause__, Exception):
        return disk_error(error.__cause__) not in PERMANENT
    if isinstance(error, OSError):
        return error.errno not in PERMANENT
    is_of_process = isinstance(error, MemoryError) or "can't start new thread" in str(error)
    is_of_scheduler = isinstance(error, Unreachable | subprocess.TimeoutExpired)
    is_of_disk = isinstance(error, Busy | Transient | StorageError)
    return is_of_index(error) or is_of_process or is_of_scheduler or is_of_disk


def is_of_index(error: BaseException) -> bool:
    """Whether the index of the service cannot be read or written, which is no fault of a job."""
    return type(error) in (sqlite3.OperationalError, sqlite3.DatabaseError)


def reason_of(error: BaseException, place: Path) -> str:
    """What to tell a person of an error: it names the file, or else `place`."""
    if isinstance(error, LatheError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"{place}: {type(error).__name__}: {error}"


def kind_of(error: BaseException) -> str:
    """A text that is the same each time the same thing goes wrong: type, error number and folder of
    a refusal of the disk, and else the message without its numbers (of what is no error of ours,
    with its type). A message may name a temporary file, whose name is new each time.
    """
    disk = error.__cause__ if isinstance(error, StorageError) else error
    if isinstance(disk, OSError) and disk.filename is not None:
        folder = Path(os.fsdecode(disk.filename)).parent
        return f"{type(error).__name__} {disk.errno} {without_numbers(str(folder))}"
    text = without_numbers(str(error))
    return text if isinstance(error, LatheError) else f"{type(error).__name__} {text}"


def without_numbers(text: str) -> str:
    """A text in which every number, decimal or hexadecimal, is "#"."""
    return re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "#", text)


def reason_for_client(error: BaseException, place: Path, base: Path) -> str:
    """What to tell a client of the service of an error: the file, or else `place`, as it is below
    the savedir_base, no other path and no words of Python. The server's log has the whole
    (`reason_of`).
    """
    is_of_file = isinstance(error, OSError) and error.filename is not None
    if is_of_file or isinstance(error, LatheError):
        return for_client(reason_of(error, place), base)
    text = f"{place}: the server does not understand it. The server's log says why."
    return without_base(text, base)


def without_base(text: str, base: Path) -> str:
    """A text in which paths below `base` are relative to it."""
    for folder in {str(base), os.path.realpath(base)} - {"/"}:
        text = text.replace(f"{folder}/", "")
    return text


def without_places(text: str) -> str:
    """A text in which absolute paths are their last names: ".../llama" for "/models/llama"."""
    return PLACE.sub(HIDDEN, text)


def for_client(text: str, base: Path) -> str:
    """A text as clients of the service may read it: with paths below the savedir_base, and the last
    names of all others.
    """
    return without_places(without_base(text, base))
