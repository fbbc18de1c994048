"""Garbage of a savedir_base: `plan_gc` lists it, `collect` deletes it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jobs.code.snapshot import DIGEST, STAGING
from jobs.job_state import ACTIVE, ENDED_BADLY, JobState
from jobs.record.events import read
from jobs.record.paths import CODE, BaseFolder, RunFolder, is_exp_id
from trainer.errors import ConfigError, LatheError
from trainer.files.atomic import read_json, read_small, refusals

# a submission takes seconds from its snapshot to its link; a copy of 200 MiB takes minutes
UNTOUCHED_S = 3600.0
DAY_S = 86400.0
ASIDE = f"{STAGING}gc-"  # what `collect` is deleting
_DIGESTS = re.compile(rb"[0-9a-f]{64}")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Garbage:
    """One file or folder to delete. Bytes as `ls` counts them."""

    path: Path
    bytes: int
    why: str
    base: Path  # the savedir_base that it must lie in
    mtime_ns: int  # when it was planned: what was touched since is in use again

    @classmethod
    def at(cls, path: Path, why: str, base: BaseFolder) -> Garbage:
        """What lies at a path now, with its size."""
        size = path.lstat().st_size if not path.is_dir() else 0
        for place, _, files in os.walk(path):
            for name in files:
                with contextlib.suppress(FileNotFoundError):
                    size += os.lstat(os.path.join(place, name)).st_size
        return cls(path, size, why, base.path, path.lstat().st_mtime_ns)


def plan_gc(base: BaseFolder, *, older_than_days: float) -> list[Garbage]:
    """The garbage of a savedir_base, by path; deletes nothing.

    Code snapshots that no run folder uses (backups and deleted/ included) and leftovers of killed
    ones, both untouched for an hour; index files of arrays whose jobs have all ended; and what
    `reset` moved aside (deleted/<...>, <id>.bak-<...>) more than `older_than_days` ago. Nothing of
    an experiment whose job is active, or whose record cannot be read.
    """
    if not older_than_days >= 0:
        raise ConfigError(f"older_than_days={older_than_days}, want 0 or more.")
    with refusals(base.path):
        candidates = [*_snapshots(base), *_arrays(base), *_set_aside(base, older_than_days)]
        items = [
            Garbage.at(path, why, base) for path, why in candidates if _is_inside(base.path, path)
        ]
    return sorted(items, key=lambda garbage: garbage.path)


def collect(garbage: Iterable[Garbage]) -> int:
    """Delete this garbage, and return how many items were deleted. An item that was touched since
    it was listed stays.

    StorageError when the disk refuses. May be killed and run again.
    """
    deleted = 0
    for item in garbage:
        if not _is_inside(item.base, item.path):
            log.warning("%s leads out of %s now: kept", item.path, item.base)
            continue
        with refusals(item.path), contextlib.suppress(FileNotFoundError):
            deleted += _delete(item)
    return deleted


def _delete(item: Garbage) -> bool:
    if item.path.lstat().st_mtime_ns != item.mtime_ns:
        log.warning("%s was touched since it was planned: kept", item.path)
        return False
    if not item.path.is_dir():
        item.path.unlink()
        return True
    # Renamed first: a snapshot or a backup is there as a whole or not at all. A submission may have
    # taken a snapshot into use just before the rename.
    aside = item.path.with_name(f"{ASIDE}{secrets.token_hex(4)}")
    item.path.rename(aside)
    if aside.lstat().st_mtime_ns != item.mtime_ns:
        # not empty: the submission has stored the same code anew
        with contextlib.suppress(OSError):
            aside.rename(item.path)
            return False
    shutil.rmtree(aside)
    return True


def _is_inside(base: Path, path: Path) -> bool:
    """Whether a path is a true part of base: no link, and not the base itself."""
    whole = base.resolve()
    return (
        not path.is_symlink() and path.resolve() != whole and path.resolve().is_relative_to(whole)
    )


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _age_s(path: Path) -> float:
    """Seconds since something was written to it or since it was renamed."""
    status = path.lstat()
    return time.time() - max(status.st_mtime, status.st_ctime)


def _snapshots(base: BaseFolder) -> Iterator[tuple[Path, str]]:
    used: set[str] | None = None
    for path in _children(base.snapshots):
        is_leftover = path.name.startswith(STAGING)
        if (
            not (is_leftover or DIGEST.match(path.name))
            or time.time() - path.lstat().st_mtime < UNTOUCHED_S
        ):
            continue
        if is_leftover:
            yield path, "left by a submission that was killed"
            continue
        used = _digests_in_use(base) if used is None else used
        if path.name not in used:
            yield path, "no experiment uses this code"


def _digests_in_use(base: BaseFolder) -> set[str]:
    """Digests that a code link or a spec.json names, in any run folder, backup or deleted one."""
    used: set[str] = set()
    for folder in (*_children(base.path), *_children(base.deleted_folder)):
        if (folder / CODE).is_symlink():
            used |= set(os.readlink(folder / CODE).split("/"))
        for attempt in _children(folder / "attempts"):
            # searched, not parsed: a torn one counts too, and a digest too many does no harm
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                spec = read_small(attempt / "spec.json")
                used |= {digest.decode() for digest in _DIGESTS.findall(spec)}
    return used


def _arrays(base: BaseFolder) -> Iterator[tuple[Path, str]]:
    for path in _children(base.arrays):
        table = read_json(path) if path.is_file() else None
        if not table or time.time() - path.lstat().st_mtime < UNTOUCHED_S:
            continue
        try:
            folders = [Path(folder) for folder, _ in table.values()]
        except (TypeError, ValueError):
            continue  # not an index of ours
        final = (None, "succeeded", "paused", *ENDED_BADLY)  # no scheduler starts such a job again
        if all(_state(RunFolder(base.path / folder.name)) in final for folder in folders):
            yield path, "all jobs of this array have ended"


def _set_aside(base: BaseFolder, older_than_days: float) -> Iterator[tuple[Path, str]]:
    for path in (*_children(base.path), *_children(base.deleted_folder)):
        if path.name.startswith(ASIDE) and _age_s(path) >= UNTOUCHED_S:
            yield path, "left by a collection that was killed"
            continue
        is_old = _age_s(path) >= older_than_days * DAY_S
        is_aside = path.parent == base.deleted_folder or (
            is_exp_id(path.name[:32]) and path.name[32:].startswith(".bak-")
        )
        if not (is_aside and is_old) or _may_run(RunFolder(path)):
            continue
        if is_exp_id(path.name[:32]) and _may_run(base.run(path.name[:32])):
            continue
        yield path, f"set aside {_age_s(path) / DAY_S:.0f} days ago"


def _may_run(folder: RunFolder) -> bool:
    """Whether the job of a run folder is active, or its record does not tell."""
    state = _state(folder)
    return state is not None and (state == "unknown" or state in ACTIVE)


def _state(folder: RunFolder) -> JobState | Literal["unknown"] | None:
    """The recorded state; None where nothing was ever recorded."""
    try:
        job = read(folder)
    except (LatheError, ValueError, OSError) as error:
        log.warning("%s cannot be read (%s: %s): kept", folder.record, type(error).__name__, error)
        return "unknown"
    if job is None:
        return "unknown" if folder.record.exists() else None
    return job.state
