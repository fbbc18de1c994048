"""W&B's key: where a job finds it, and how its offline runs are sent later."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from jobs.config import JobConfig
    from jobs.record.paths import RunFolder

# 40 hexadecimal digits, or the newer and longer wandb_v1_...
KEY = re.compile(r"[A-Za-z0-9_-]{40,512}\Z")


@dataclass(frozen=True)
class KeySource:
    """Where the key of a job comes from. `text` is for status and doctor and holds no key."""

    kind: Literal["file", "environment", "platform", "none"]
    text: str
    # the file that the job must read into WANDB_API_KEY; None: nothing to read
    key_file: Path | None = None


def find_key_source(job: JobConfig, environ: Mapping[str, str]) -> KeySource:
    """Where a submitted job will find W&B's key: secret of the platform, key file, netrc file, or
    nowhere.

    A key in the submitter's environment is reported, and not handed on. ConfigError for a key file
    that is named in the job dictionary or as WANDB_API_KEY_FILE and will not do (`check_key_file`).
    """
    if job.wandb_key_secret is not None:
        return KeySource("platform", f"W&B key: secret {job.wandb_key_secret} of the platform")
    file_name = job.wandb_key_file or environ.get("WANDB_API_KEY_FILE")
    if file_name:
        path = Path(file_name).expanduser().absolute()
        check_key_file(path)
        return KeySource("file", f"W&B key: {path}, read by the job itself", path)
    host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(environ.get("NETRC") or Path(environ.get("HOME", "~")).expanduser() / ".netrc")
    try:
        has_key = netrc(path).authenticators(host) is not None
    except (OSError, NetrcParseError, UnicodeDecodeError):
        has_key = False
    if has_key:
        return KeySource(
            "file", f"W&B key: {path}, read by wandb itself where this home folder is mounted"
        )
    if environ.get("WANDB_API_KEY"):
        return KeySource(
            "environment",
            "W&B key: only WANDB_API_KEY of this shell, which no submitted job gets: its wandb "
            "runs offline. Write the key to a file of mode 0600 and name that as wandb_key_file",
        )
    return KeySource(
        "none", "W&B key: none found, so wandb runs offline; `wandb sync` sends the runs later"
    )


def check_key_file(path: Path) -> None:
    """Return when a file may serve as the key file of jobs; ConfigError names everything that is
    wrong with it.

    It must be a regular file (or a link to one) of this user, of mode 0600 exactly, that holds one
    line which looks like a key: 40 or more of A-Z, a-z, 0-9, _ and -. The error never shows what
    the file holds.
    """
    try:
        # a FIFO must not hang the submission
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"wandb_key_file {path}: {error.strerror}. Write the key to it, and: chmod 600 "
            f"{shlex.quote(str(path))}"
        ) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(
                f"wandb_key_file {path}: not a regular file. Name the file that holds the key."
            )
        content = os.read(descriptor, 2048)
    finally:
        os.close(descriptor)
    problems: list[str] = []
    if status.st_uid != os.geteuid():
        problems.append(
            f"owned by user {status.st_uid}, want {os.geteuid()}: use a copy of your own"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode != 0o600:
        problems.append(f"mode {mode:04o}, want 0600: chmod 600 {shlex.quote(str(path))}")
    lines = content.decode("ascii", "replace").splitlines()
    if len(lines) != 1 or not KEY.match(lines[0].strip()):
        length = f"a first line of {len(lines[0].strip())} characters" if lines else "nothing"
        problems.append(
            f"{len(lines)} lines with {length}, want one line with 40 or more of A-Z, a-z, 0-9, _ "
            "and -"
        )
    if problems:
        raise ConfigError(f"wandb_key_file {path}: " + "; ".join(problems))


def sync_hint(folder: RunFolder) -> str | None:
    """The command that sends the offline wandb runs of an experiment, oldest first; None when all
    were sent.

    A run of several files, of which some were sent, still waits. Cheap where there are none: status
    asks for each row. Source: wandb 0.31 leaves run-<id>.wandb.synced beside a file that it has
    sent.
    """
    try:
        names = sorted(os.listdir(folder.path / "wandb"))
    except OSError:  # none, or not ours to read
        return None
    runs = [folder.path / "wandb" / name for name in names if name.startswith("offline-run-")]
    waiting = [
        str(run)
        for run in runs
        if any(not file.with_suffix(".wandb.synced").exists() for file in run.glob("*.wandb"))
    ]
    return shlex.join(["wandb", "sync", *waiting]) if waiting else None
