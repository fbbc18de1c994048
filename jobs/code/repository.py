"""The files of a project (those of its git repository, or of its installed version), and those of
them that a job gets.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import logging
import os
import stat
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from jobs import secret_keys
from jobs.errors import Transient
from jobs.time_limits import run_program
from trainer.errors import ConfigError

MIB = 1 << 20
MAX_FILE, MAX_TOTAL, MAX_WEIGHTS = (
    20 * MIB,
    200 * MIB,
    4 * MIB,  # the base of the demo is part of the project, and of this size
)  # bytes; code is small, and every file is hashed each time
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".gguf", ".pkl")
SHOWN = 5  # names in an error
GIT_S = 120.0  # a repository of 100,000 files on a cold network file system takes tens of seconds
PATHS_A_CALL = 200  # a command line holds 2 MiB, and a path at most 4 KiB
PACKAGE, PROGRAM = "lathe", "trainval.py"
# Never listed when git does not know them: names that no source folder has.
# fmt: off
LITTER = frozenset({
    ".git", ".hg", ".svn", ".venv", "venv", "__pycache__", "node_modules", "results", "wandb",
    ".mypy_cache",
    ".ruff_cache", ".pytest_cache", ".hypothesis", ".tox", ".nox", ".eggs", ".ipynb_checkpoints",
    ".cache",
    ".DS_Store",
})
# fmt: on
# A hook or an alias of git runs its commands with these set; they would answer for another
# repository.
# fmt: off
_ELSEWHERE = frozenset({
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_PREFIX", "GIT_EXTERNAL_DIFF", "GIT_DIFF_OPTS",
    "GIT_LITERAL_PATHSPECS",
    "GIT_GLOB_PATHSPECS", "GIT_NOGLOB_PATHSPECS", "GIT_ICASE_PATHSPECS", "GIT_TRACE",
    "GIT_CEILING_DIRECTORIES",
})
# fmt: on

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceFiles:
    """The files of a project. Paths are relative to `top`, with "/", as os.fsdecode gives them."""

    # resolved; the top of the working tree, or the project's folder where there is no git
    top: Path
    project: Path  # the project's folder, relative to top
    tracked: frozenset[str]
    untracked: frozenset[str]  # and not ignored
    # tracked path -> git's two letters: "M ", " D"
    changed: Mapping[str, str] = field(default_factory=dict[str, str])
    commit: str | None = None  # None: no git, or no commit yet
    branch: str | None = None
    is_git: bool = False
    version: str | None = None  # of an installed version: "lathe 0.1.0"

    @property
    def name(self) -> str:
        """What people call this state of the project."""
        return self.version or f"commit {self.commit}"


@dataclass(frozen=True)
class Selection:
    """The files of a project that a job gets."""

    paths: list[str]  # sorted
    left_out: dict[str, str]  # path -> why, for what somebody could miss
    dirty: dict[str, str]  # path -> git's two letters: where the paths differ from the commit


def read_source(project: Path) -> SourceFiles:
    """The files of a project's repository, or of its folder alone where git does not track it. Of
    an installed version (pip install): the files that were installed.

    ConfigError when the folder or git refuses; Transient when git does not answer in two minutes.
    """
    project = project.resolve()
    installed = _of_installation(project)
    if installed is not None:  # also inside of a repository, as in project/.venv
        return installed
    try:
        output = _git(project, "rev-parse", "--show-toplevel")
    except FileNotFoundError:
        return _walk(project)  # git is not installed
    except ConfigError as error:
        if "not a git repository" in str(error):
            return _walk(project)
        raise
    top = Path(os.fsdecode(output.removesuffix(b"\n"))).resolve()
    commit, branch, changed = _status(top)
    tracked, untracked = _listing(top)
    inside = project.relative_to(top)
    if inside.parts and not any(
        path.startswith(f"{inside.as_posix()}/") for path in (*tracked, *untracked)
    ):
        return _walk(project)  # the repository around it ignores it
    return SourceFiles(
        top, inside, frozenset(tracked), frozenset(untracked), changed, commit, branch, is_git=True
    )


def patch(source: SourceFiles, paths: Iterable[str]) -> bytes:
    """git diff of these changed tracked files against the commit, for `git apply`."""
    options = [
        "--binary",
        "--no-color",
        "--no-ext-diff",
        "--no-textconv",
        "--no-renames",
        "--full-index",
    ]
    options += ["--src-prefix=a/", "--dst-prefix=b/", "--submodule=short"]
    difference, rest = b"", iter(sorted(paths))
    while chunk := list(islice(rest, PATHS_A_CALL)):
        difference += _git(
            source.top, "--literal-pathspecs", "diff", "HEAD", *options, "--", *chunk
        )
    return difference


def _status(top: Path) -> tuple[str | None, str | None, dict[str, str]]:
    """Commit, branch, and tracked files that differ from the commit.

    Source: git-status, porcelain version 2.
    """
    answer = _git(
        top,
        "status",
        "--porcelain=v2",
        "--branch",
        "-z",
        "--untracked-files=no",
        "--no-renames",
        "--ignore-submodules=none",
    )
    commit = branch = None
    changed: dict[str, str] = {}
    for record in map(os.fsdecode, answer.split(b"\0")):
        if record.startswith("# branch.oid "):
            commit = record.split(" ", 2)[2]
        elif record.startswith("# branch.head "):
            branch = record.split(" ", 2)[2]
        elif record.startswith(("1 ", "u ")):
            # the path comes last and may hold spaces
            fields = record.split(" ", 8 if record[0] == "1" else 10)
            changed[fields[-1]] = fields[1].replace(".", " ")
    return (
        (None if commit == "(initial)" else commit),
        (None if branch == "(detached)" else branch),
        changed,
    )


def _listing(top: Path) -> tuple[set[str], set[str]]:
    """Tracked and untracked files, those of submodules and of repositories inside included."""
    tracked = _names(_git(top, "ls-files", "--cached", "-z"))
    untracked = _names(_git(top, "ls-files", "--others", "--exclude-standard", "-z"))
    for path in [path for path in (*tracked, *untracked) if (top / path / ".git").exists()]:
        into, beside = _listing(top / path)
        prefix = path.rstrip("/")
        untracked |= {f"{prefix}/{name}" for name in beside}
        (tracked if path in tracked else untracked).update(f"{prefix}/{name}" for name in into)
        tracked.discard(path)
        untracked.discard(path)
    return tracked, untracked


def _names(answer: bytes) -> set[str]:
    return {os.fsdecode(name) for name in answer.split(b"\0") if name}


def _of_installation(project: Path) -> SourceFiles | None:
    """The files that pip put into this folder; None when it did not install the project there (a
    clone, an editable installation).
    """
    for folder in project.glob(f"{PACKAGE}*-*.dist-info"):
        package = importlib.metadata.PathDistribution(folder)
        files = {
            file.as_posix(): file.hash
            for file in package.files or ()
            if not {"..", "__pycache__"} & set(file.parts)
            and not file.parts[0].endswith(".dist-info")
        }
        if PROGRAM in files:
            altered = {
                path: " M" for path, record in files.items() if _is_altered(project / path, record)
            }
            version = f"{PACKAGE} {package.version}"
            return SourceFiles(
                project, Path(), frozenset(files), frozenset(), altered, version=version
            )
    return None


def _is_altered(path: Path, record: importlib.metadata.FileHash | None) -> bool:
    """Whether a file differs from the digest that the installation has written down."""
    if record is None:
        return False
    try:
        digest = hashlib.new(record.mode, path.read_bytes()).digest()
    except FileNotFoundError:
        return True
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}. Make the installed version readable for this user."
        ) from None
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != record.value


def _walk(project: Path) -> SourceFiles:
    def refuse(error: OSError) -> None:
        raise ConfigError(
            f"{error.filename}: {error.strerror}. Make the project readable for this user."
        ) from None

    files_below: list[str] = []
    for folder, folders, files in os.walk(project, onerror=refuse):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = sorted(set(folders) - set(links) - LITTER)
        files_below += [
            os.path.relpath(os.path.join(folder, name), project) for name in (*files, *links)
        ]
    return SourceFiles(project, Path(), frozenset(), frozenset(files_below))


def _git(folder: Path, *arguments: str) -> bytes:
    """The output of git. ConfigError with git's words when it fails; Transient when it takes longer
    than GIT_S; FileNotFoundError where it is not installed.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    environment |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    # core.fsmonitor may name a program of the repository, which a submission has no reason to run
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder. Give the folder of the project.")
    try:
        process = run_program(command, env=environment, timeout_s=GIT_S)
    except subprocess.TimeoutExpired:
        raise Transient(
            f"git {arguments[0]} in {folder} took over {GIT_S:.0f} s. Try it by hand."
        ) from None
    if process.returncode != 0:
        words = process.stderr.decode(errors="replace").strip().removeprefix("fatal: ")
        raise ConfigError(f"{folder}: git {arguments[0]} says: {words}")
    return process.stdout


def printable_path(path: str) -> str:
    """A path for a message: on one line, and no terminal sequence, whatever its name is."""
    return path if path.isprintable() else ascii(path)[1:-1]


def select(source: SourceFiles, savedir_base: Path) -> Selection:
    """The files that a job gets: no secrets, no results, no weights, no litter.

    ConfigError for files that are too big and for a savedir_base that is the project itself. Files
    that are committed and left out are logged as a warning.
    """
    savedir = os.path.relpath(os.path.realpath(savedir_base), source.top)
    if savedir == ".":
        raise ConfigError(
            f"savedir_base {savedir_base} is the project's own folder. Give it a folder of its own."
        )
    sizes: dict[str, int] = {}
    left_out: dict[str, str] = {}
    for path in sorted(source.tracked | source.untracked | set(source.changed)):
        is_litter = not LITTER.isdisjoint(path.split("/")) or path.endswith(".pyc")
        if path in source.untracked and is_litter:
            continue
        try:
            status = os.lstat(source.top / path)
        except (FileNotFoundError, NotADirectoryError):
            status = None  # deleted
        except OSError as error:
            raise ConfigError(
                f"{source.top / path}: {error.strerror}. Make the project readable for this user."
            ) from None
        is_result = f"{path}/".startswith(f"{savedir}/")
        why = "below the savedir_base" if is_result else _why_not(source.top, path, status)
        if why is not None:
            left_out[path] = why
        elif status is not None and (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            sizes[path] = status.st_size
    _refuse_big(source.top, sizes)
    _warn(source, left_out)
    dirty = {path: letters for path, letters in source.changed.items() if path not in left_out}
    dirty |= {path: "??" for path in sizes if path in source.untracked}
    return Selection(list(sizes), left_out, dirty)


def _why_not(top: Path, path: str, status: os.stat_result | None) -> str | None:
    if secret_keys.is_secret_file(path):
        return "may hold a secret"
    if status is None:
        return None
    if stat.S_ISLNK(status.st_mode):
        # A link means the same in the copy if it is relative, and neither its text nor its target
        # leaves the project.
        target = os.readlink(top / path)
        lexical = os.path.normpath(os.path.join(os.path.dirname(path), target))
        is_outside = os.path.isabs(target) or lexical.split("/")[0] == ".."
        if is_outside or not Path(os.path.realpath(top / path)).is_relative_to(top):
            return "a link out of the project"
    if path.lower().endswith(WEIGHTS) and status.st_size > MAX_WEIGHTS:
        return "weights"
    return None


def _refuse_big(top: Path, sizes: Mapping[str, int]) -> None:
    if not sizes:
        raise ConfigError(
            f"{top}: no file to take. Is it the folder of trainval.py, and does .gitignore "
            "exclude it?"
        )
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    big = [(path, size) for path, size in largest if size > MAX_FILE]
    if big:
        raise ConfigError(
            f"{top}: {len(big)} file(s) too big for a code snapshot: {_sizes(big)}; want at most "
            f"{MAX_FILE // MIB} MiB "
            "each. Data belongs below --data_path: move it, or exclude it by .gitignore."
        )
    if (total := sum(sizes.values())) > MAX_TOTAL:
        raise ConfigError(
            f"{top}: a code snapshot of {total / MIB:.0f} MiB, want at most {MAX_TOTAL // MIB} "
            f"MiB. The largest: {_sizes(largest)}. Data belongs below --data_path: move it, or "
            "exclude it by .gitignore."
        )


def _sizes(files: list[tuple[str, int]]) -> str:
    texts = [f"{printable_path(path)} ({size / MIB:.1f} MiB)" for path, size in files[:SHOWN]]
    return ", ".join([*texts, *(["..."] if len(files) > SHOWN else [])])


def _warn(source: SourceFiles, left_out: Mapping[str, str]) -> None:
    committed = [
        f"{printable_path(path)} ({why})"
        for path, why in left_out.items()
        if path in source.tracked
    ]
    if committed:
        log.warning(
            "code snapshot: committed but left out, so no job sees them: %s", ", ".join(committed)
        )


def why_dirty(source: SourceFiles, dirty: Mapping[str, str]) -> str:
    """The text of the error for a project with uncommitted changes."""
    texts = [f"{letters.strip()} {printable_path(path)}" for path, letters in dirty.items()]
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    if source.version is not None:
        return (
            f"{source.top}: {len(texts)} file(s) differ from {source.version} as it was installed: "
            f"{', '.join(texts[:SHOWN])}{more}. Install it again, or submit with --allow-dirty."
        )
    if not source.is_git:
        return (
            f"{source.top}: not in a git repository (or git is not installed), so nobody can tell "
            "later which code ran. Commit it to one (git init), or submit with --allow-dirty."
        )
    commit = "the last commit (there is none yet)"
    if source.commit:
        commit = f"commit {source.commit[:12]}"
    return (
        f"{source.top}: {len(texts)} file(s) differ from {commit}: "
        f"{', '.join(texts[:SHOWN])}{more}. Commit them, or exclude them by .gitignore, or "
        "submit with --allow-dirty."
    )
