"""The code of a job: a copy of the project as it was submitted, stored once for each content.

<savedir_base>/_jobs/code/<digest>/
    tree/          the files, read-only; jobs run here
    code.tar.gz    the same files: sorted, no times, no owners
    dirty.patch    git diff of what was not committed, when there was such
    code.json      commit, branch, digest, sizes, every file; written last: a snapshot without it
                   does not count

The digest is the sha256 over mode, sha256 and path of all files, so the same content is the same
snapshot, whatever its commit is called and whoever submits. Taken are the files of the project's
whole git repository as they are in the working tree: tracked ones, and untracked ones that
.gitignore does not exclude. Of an installed version (a wheel) they are the files that were
installed, and its version stands in code.json in the commit's place. Left out, tracked or not:

- .git, the savedir_base, and untracked litter (caches, virtual environments, results/, wandb/);
- files that are called like a secret (`secret_keys.is_secret_file`);
- checkpoints and weights (.safetensors, .pt, .pth, .bin, .ckpt, .gguf, .pkl) of more than 4 MiB;
- links that are absolute or lead out of the project.

A file whose content holds a key is an error and not left out: without it the code might not run,
and a key in a source file wants a person's attention. So is a file over 20 MiB, or more than 200
MiB together.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import tarfile
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jobs import secret_keys
from jobs.code.repository import (
    MAX_FILE,
    MIB,
    Selection,
    SourceFiles,
    patch,
    printable_path,
    read_source,
    select,
    why_dirty,
)
from jobs.errors import Transient
from jobs.record.times import now
from trainer.errors import ConfigError, StorageError
from trainer.files.atomic import read_json, refusals, replace_file, sha256_of, sync

if TYPE_CHECKING:
    from jobs.record.paths import BaseFolder, RunFolder

MANIFEST, ARCHIVE, PATCH, TREE = "code.json", "code.tar.gz", "dirty.patch", "tree"
# a snapshot that is being written; `jobs.code.gc` collects what a killed one left
STAGING = ".tmp-"
SYNCS_AT_ONCE = 8  # 150 files on a local disk: 0.45 s one by one, 0.08 s so
TRIES = 5  # an editor may save a file while it is copied
DIGEST = re.compile(r"[0-9a-f]{64}\Z")
EXECUTABLE, REGULAR, LINK = "100755", "100644", "120000"  # git's modes


@dataclass(frozen=True)
class Snapshot:
    """The stored code of a project.

    commit, is_dirty: of the project now; the content may have been stored before.
    """

    digest: str
    tree: Path
    # the project's folder in the tree: the tree itself, unless the repository holds more
    workdir: Path
    commit: str | None
    is_dirty: bool
    files: int
    bytes: int
    name: str = ""  # the commit, or the installed version


@dataclass(frozen=True)
class SnapshotEntry:
    """One file or link of a snapshot."""

    path: str
    mode: str
    size: int
    sha256: str


class _Changed(Exception):
    """A file has changed since it was hashed."""


def take(project: Path, base: BaseFolder, *, allow_dirty: bool) -> Snapshot:
    """Store the code of a project below a savedir_base, unless this content lies there already.

    project: the folder of trainval.py. ConfigError for uncommitted changes or a project without git
    (unless allow_dirty), for keys in files and for files that are too big; StorageError when the
    disk refuses; Transient when files change all the while. May be killed at any
    moment and run by many at once: a snapshot is written aside and renamed when it is whole.
    """
    source = read_source(project)
    selection = select(source, base.path)
    if selection.dirty and not allow_dirty:
        raise ConfigError(why_dirty(source, selection.dirty))
    for _ in range(TRIES):
        entries = _entries(source.top, selection.paths)
        digest = _digest(entries)
        try:
            if not _reuse(base.snapshots / digest):
                with _staging(base, digest) as folder:
                    _write(folder, digest, source, selection, entries)
                    _publish(folder, base.snapshots / digest)
        except _Changed:
            continue
        tree = base.snapshot(digest)
        size = sum(entry.size for entry in entries)
        return Snapshot(
            digest,
            tree,
            tree / source.project,
            source.commit,
            bool(selection.dirty),
            len(entries),
            size,
            source.name,
        )
    raise Transient(
        f"{source.top}: files change while they are copied. Stop what writes there, and submit "
        "again."
    )


def link(folder: RunFolder, snapshot: Snapshot) -> None:
    """Make <exp_id>/code a relative link to the snapshot's tree, at once; StorageError when
    something else is there.
    """
    with refusals(folder.code):
        folder.path.mkdir(parents=True, exist_ok=True)
        target = os.path.relpath(os.path.realpath(snapshot.tree), os.path.realpath(folder.path))
        if folder.code.is_symlink() and os.readlink(folder.code) == target:
            return
        if folder.code.is_dir() and not folder.code.is_symlink():
            raise StorageError(
                f"{folder.code} is a folder, want a link to {target}. Move the folder away."
            )
        temporary = folder.path / f".code.{secrets.token_hex(4)}.tmp"
        os.symlink(target, temporary)
        os.replace(temporary, folder.code)


def verify(base: BaseFolder, digest: str) -> list[str]:
    """Names of the files of a stored snapshot that are altered, absent or added since; empty when
    it is whole.

    code.json and code.tar.gz are among the names. __pycache__ is no alteration: jobs run in the
    tree.
    """
    if not DIGEST.match(digest):
        raise ConfigError(
            f"snapshot {printable_path(digest)}: want 64 hexadecimal digits. See {base.snapshots}."
        )
    folder = base.snapshots / digest
    manifest = read_json(folder / MANIFEST) or {}
    try:
        entries = [SnapshotEntry(**entry) for entry in manifest["files"]]
    except (KeyError, TypeError):
        return [MANIFEST]
    wrong: set[str] = {MANIFEST} if _digest(entries) != digest else set()
    archive = folder / ARCHIVE
    if not archive.exists() or sha256_of(archive) != manifest.get("archive_sha256"):
        wrong.add(ARCHIVE)
    tree, paths = folder / TREE, list[str]()
    for place, folders, files in os.walk(tree):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        folders[:] = [name for name in folders if name not in links and name != "__pycache__"]
        paths += [os.path.relpath(os.path.join(place, name), tree) for name in (*files, *links)]
    actual = {path: _facts(tree, path) for path in paths}
    expected = {entry.path: (entry.mode, entry.sha256) for entry in entries}
    return sorted(
        wrong | {path for path in {*actual, *expected} if actual.get(path) != expected.get(path)}
    )


# Reading


def _entries(top: Path, paths: Iterable[str]) -> list[SnapshotEntry]:
    """Hash every file. ConfigError names all files that hold a key."""
    secrets = secret_keys.secrets_in(os.environ)
    entries: list[SnapshotEntry] = []
    spread: list[str] = []
    for path in paths:
        file = _read(top, path)
        if file is None:
            continue  # deleted since it was listed
        mode, content = file
        entries.append(SnapshotEntry(path, mode, len(content), hashlib.sha256(content).hexdigest()))
        if (what := secret_keys.secret_in(content, secrets)) is not None:
            spread.append(f"{printable_path(path)}, {what}")
    if spread:
        raise ConfigError(
            f"{top}: a code snapshot is read by every job, and would hold a secret: "
            f"{'; '.join(spread)}. Move it to a file of mode 0600 outside of the project "
            "(wandb_key_file), and replace it: it may be known."
        )
    return entries


def _read(top: Path, path: str) -> tuple[str, bytes] | None:
    """Mode and content of a file (of a link: its target); None when the file is gone."""
    try:
        if os.path.islink(top / path):
            return LINK, os.fsencode(os.readlink(top / path))
        # follows no link that has just replaced a file, and waits for no pipe's other end
        safely = os.O_NOFOLLOW | os.O_NONBLOCK
        with open(
            top / path, "rb", opener=lambda name, flags: os.open(name, flags | safely)
        ) as file:
            status = os.fstat(file.fileno())
            content = file.read(MAX_FILE + 1) if stat.S_ISREG(status.st_mode) else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(
            f"{top / printable_path(path)}: {error.strerror}. Make it readable for this user, or "
            "exclude it by .gitignore."
        ) from None
    if content is None:
        return None
    return (EXECUTABLE if status.st_mode & stat.S_IXUSR else REGULAR), content


def _facts(top: Path, path: str) -> tuple[str, str] | None:
    file = _read(top, path)
    return (file[0], hashlib.sha256(file[1]).hexdigest()) if file else None


def _digest(entries: Iterable[SnapshotEntry]) -> str:
    total = hashlib.sha256()
    for entry in sorted(entries, key=lambda entry: os.fsencode(entry.path)):
        total.update(f"{entry.mode} {entry.sha256} ".encode() + os.fsencode(entry.path) + b"\0")
    return total.hexdigest()


# Writing


def _reuse(folder: Path) -> bool:
    """Whether a complete snapshot exists. Its time is set to now, so that `jobs.code.gc` keeps it
    for this submission.
    """
    with suppress(OSError):  # of another user of a shared savedir_base, or not there
        os.utime(folder)
    with refusals(folder):
        return _is_whole(folder)


def _is_whole(folder: Path) -> bool:
    manifest = read_json(folder / MANIFEST)
    return (
        manifest is not None and manifest.get("digest") == folder.name and (folder / TREE).is_dir()
    )


@contextmanager
def _staging(base: BaseFolder, digest: str) -> Generator[Path]:
    """A new folder beside the snapshots, gone afterwards."""
    folder = base.snapshots / f"{STAGING}{digest[:12]}-{os.getpid()}-{secrets.token_hex(4)}"
    with refusals(folder):
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _write(
    folder: Path,
    digest: str,
    source: SourceFiles,
    selection: Selection,
    entries: list[SnapshotEntry],
) -> None:
    """Fill a staging folder. _Changed when a file of the project has changed since its hash."""
    _write_files(folder, source.top, entries)
    difference, why_no_patch = _patch(source, selection.dirty)
    if difference:
        (folder / PATCH).write_bytes(difference)
    manifest = {
        "digest": digest,
        "taken_at": now(),
        "commit": source.commit,
        "version": source.version,
        "branch": source.branch,
        "is_dirty": bool(selection.dirty),
        "dirty": selection.dirty,
        "patch": PATCH if difference else None,
        "why_no_patch": why_no_patch,
        "archive": ARCHIVE,
        "archive_sha256": sha256_of(folder / ARCHIVE),
        "num_files": len(entries),
        "bytes": sum(entry.size for entry in entries),
        "left_out": selection.left_out,
        "files": [asdict(entry) for entry in entries],
    }
    _sync(folder)
    replace_file(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    sync(folder)


def _write_files(folder: Path, top: Path, entries: Iterable[SnapshotEntry]) -> None:
    tree = folder / TREE
    tree.mkdir()
    with (
        (folder / ARCHIVE).open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=6) as packed,
        tarfile.open(
            mode="w|", fileobj=packed, format=tarfile.GNU_FORMAT, errors="surrogateescape"
        ) as archive,
    ):
        for entry in entries:
            file = _read(top, entry.path)
            if file is None or (file[0], hashlib.sha256(file[1]).hexdigest()) != (
                entry.mode,
                entry.sha256,
            ):
                raise _Changed
            _write_file(tree / entry.path, *file)
            _add(archive, entry, file[1])


def _write_file(path: Path, mode: str, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if mode == LINK:
        os.symlink(os.fsdecode(content), path)
        return
    with path.open("xb") as file:
        file.write(content)
        os.fchmod(file.fileno(), 0o555 if mode == EXECUTABLE else 0o444)


def _add(archive: tarfile.TarFile, entry: SnapshotEntry, content: bytes) -> None:
    """The same bytes for the same entry: TarInfo's defaults are time 0, user 0 and no names."""
    member = tarfile.TarInfo(entry.path)
    if entry.mode == LINK:
        member.type, member.linkname, member.mode = tarfile.SYMTYPE, os.fsdecode(content), 0o777
        archive.addfile(member)
        return
    member.mode, member.size = (0o755 if entry.mode == EXECUTABLE else 0o644), entry.size
    archive.addfile(member, io.BytesIO(content))


def _patch(source: SourceFiles, dirty: Mapping[str, str]) -> tuple[bytes, str | None]:
    """The patch from the commit to the tracked files, for `git apply`; or b"" and the reason why
    there is none.
    """
    changed = [path for path, letters in dirty.items() if letters != "??"]
    if source.commit is None or not changed:
        return b"", None
    difference = patch(source, changed)
    if len(difference) > MAX_FILE:
        return b"", f"over {MAX_FILE // MIB} MiB"
    # a removed line is in no file any more
    why = secret_keys.secret_in(difference, secret_keys.secrets_in(os.environ))
    return (b"", f"holds a secret in {why}") if why else (difference, None)


def _sync(folder: Path) -> None:
    """Bring everything below a folder to the disk.

    Many files at once, so that the disk may join their writes.
    """
    paths: list[Path] = []
    for place, _, files in os.walk(folder):
        paths += [
            Path(place),
            *(path for name in files if not (path := Path(place, name)).is_symlink()),
        ]
    with ThreadPoolExecutor(SYNCS_AT_ONCE) as pool:
        list(pool.map(sync, paths))


def _publish(staging: Path, folder: Path) -> None:
    """Rename a complete snapshot to its digest. One that another process has published stays."""
    for _ in range(TRIES):
        try:
            os.rename(staging, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if _reuse(folder):
                return
            # torn by somebody's hand; not deleted, for a job may run in it
            with suppress(FileNotFoundError):
                os.rename(folder, folder.with_name(f"{STAGING}torn-{secrets.token_hex(4)}"))
        else:
            sync(folder.parent)
            return
    raise Transient(
        f"{folder}: is made and torn again and again. Look for another process that writes there."
    )
