"""The queue of one machine: a folder of jobs, which jobs/backends/local/runner.py starts as devices
become free.

    <queue>/identity.json     a random id and the host it belongs to: no other host submits here or
                              runs its jobs
    <queue>/runner.lock       held (flock) by the runner while it lives
    <queue>/runner.log
    <queue>/free.json         what is free, and how many of each group run: why a job waits
    <queue>/jobs/<token>/     made by one rename: a token enters the queue once, for ever
        entry.json            what to run and what it needs
        started.json          written by the job's own process before it becomes the wrapper: never
                              started twice
        ended.json            code and reason
        cancel                somebody asked for its end
        alive             locked (flock) by the wrapper while it lives, whatever container sees it
        wrapper.log

The runner outlives whoever submitted; killed, it is started again by whoever submits or looks next,
and adopts what still runs. A process is only judged where it can be seen: its host and pid
namespace are in started.json, and in its birth the boot of the machine. What another container
started and still runs is left alone (and its devices are not counted); what ran before the machine
or its container was restarted ends with code 75, to be run again.

Standard library only. The folder is $XDG_STATE_HOME/lathe/queue/<host>, for a home may be shared;
LATHE_QUEUE names another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jobs.record.state_table import EXIT_FAILED
from trainer.errors import EXIT_OK, EXIT_PREEMPTED, ConfigError, LatheError, StorageError
from trainer.files.atomic import create_json, read_json, sync
from trainer.runtime.process import Life, life

IDLE_S = 1.0  # the runner leaves when there has been nothing to do for so long
ATTEMPT = re.compile(r"(ft_[0-9a-z]+_[0-9a-z]+)_([0-9]+)\Z")
_waking = threading.Lock()
_woken: dict[Path, tuple[float, subprocess.Popen[bytes]]] = {}


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's queue on this machine lies."""
    if own := environ.get("LATHE_QUEUE"):
        return Path(own).absolute()
    state = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "lathe" / "queue" / socket.gethostname()


# What the runner cannot do without.
KEYS: dict[str, type | tuple[type, ...]] = {
    "wrapper": list,
    "workdir": str,
    "id": str,
    "gpus": int,
    "cpus": int,
    "grace_s": (int, float),
    "group": str,
    "after": list,
    "at": (int, float),
}
OPTIONAL: dict[str, type | tuple[type, ...]] = {
    "max_parallel": (int, type(None)),
    "base": (str, type(None)),
    "environment": dict,
}


@dataclass(frozen=True)
class QueuedJob:
    """One job of the queue."""

    folder: Path

    @property
    def token(self) -> str:
        return self.folder.name

    def read(self) -> dict[str, Any]:
        """What was submitted.

        Its keys: wrapper, workdir, id, gpus, cpus, grace_s, group, max_parallel, after (ids), base
        (the run folder whose model it begins with, or null), environment (of the wrapper), at.
        LatheError when somebody else has written it.
        """
        path = self.folder / "entry.json"
        value = read_json(path)
        if value is None:
            raise LatheError(
                f"{path}: absent, or no whole JSON object: no queue writes such a job."
            )
        wrong = [name for name, kind in KEYS.items() if not isinstance(value.get(name), kind)]
        optional = value.keys() & OPTIONAL.keys()
        wrong += [name for name in optional if not isinstance(value[name], OPTIONAL[name])]
        if wrong or not all(isinstance(job_id, str) for job_id in value["after"]):
            wrong = wrong or ["after"]
            raise LatheError(f"{path}: {', '.join(wrong)}: not what the queue writes there.")
        return value

    def read_start(self) -> dict[str, Any] | None:
        """{"pid", "birth", "gpus", "host", "namespace"}, or None when it has not started."""
        return read_json(self.folder / "started.json")

    def read_end(self) -> dict[str, Any] | None:
        """{"code", "reason"}, or None when it has not ended. A file that this queue cannot have
        written says that the job failed.
        """
        path = self.folder / "ended.json"
        try:
            end = read_json(path) or {}
        except (OSError, RecursionError):
            end = {}
        if isinstance(end.get("code"), int):
            reason = end.get("reason")
            return {"code": end["code"], "reason": None if reason is None else str(reason)}
        if not os.path.lexists(path):
            return None
        text = f"{path} is not what the queue writes there, so nobody knows how this job ended"
        return {"code": EXIT_FAILED, "reason": text}

    @contextlib.contextmanager
    def hold(self) -> Generator[int]:
        """A descriptor of the file `alive`, locked: a process that inherits it holds the lock until
        it ends. Not locked where another process holds it already.
        """
        descriptor = os.open(self.folder / "alive", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield descriptor
        finally:
            os.close(descriptor)

    def life(self, started: Mapping[str, Any]) -> Life:
        """As `life` of the facts in started.json; "restarted" also when another container of this
        machine started the job, and has ended: its processes cannot be seen, and nobody holds the
        lock.
        """
        state = life(started)
        if state != "unseen" or started.get("host") != socket.gethostname():
            return state
        with contextlib.suppress(OSError), (self.folder / "alive").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return "restarted"
        return "unseen"

    def is_cancelled(self) -> bool:
        """Whether a person or a command asked for the end of the job."""
        return (self.folder / "cancel").exists()

    def end(self, code: int, reason: str | None) -> None:
        """Record how the job ended. The first record counts."""
        create_json(self.folder / "ended.json", {"code": code, "reason": reason})


@dataclass(frozen=True)
class Queue:
    """The folder of a queue. environment: of a runner that this process starts; None: its own."""

    folder: Path
    environment: Mapping[str, str] | None = None

    @cached_property
    def identity(self) -> dict[str, str]:
        """{"id", "host"} of this queue, given at its first use and kept for ever.

        StorageError when it cannot be written, ConfigError when it is damaged.
        """
        path = self.folder / "identity.json"
        try:
            identity = read_json(path)
            if identity is None:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                create_json(path, {"id": secrets.token_hex(4), "host": socket.gethostname()})
                identity = read_json(path)
        except (OSError, StorageError) as error:
            # the disk's own words: the advice of StorageError is for runs
            reason = error.__cause__ or error
            raise StorageError(
                f"{path}: {reason}. Name a folder of this machine as LATHE_QUEUE."
            ) from error
        if identity is None or not {"id", "host"} <= identity.keys():
            raise ConfigError(
                f"{path}: somebody has altered it, want an id and a host. Name another LATHE_QUEUE."
            )
        return identity

    @property
    def is_here(self) -> bool:
        """Whether this is the host that the queue belongs to."""
        return self.identity["host"] == socket.gethostname()

    def id_of(self, token: str) -> str:
        """The id of a job of this queue."""
        return f"{self.identity['host']}:{self.identity['id']}:{token}"

    def tokens(self) -> set[str]:
        """All jobs that ever entered the queue."""
        try:
            return {entry.name for entry in os.scandir(self.folder / "jobs")}
        except FileNotFoundError:
            return set()

    def has_succeeded(self, tokens: Iterable[str]) -> bool | None:
        """Whether one of these attempts (at one experiment) has succeeded.

        None while one of them, or a next, still may.
        """
        ended = [
            (entry, entry.read_end()) for entry in map(self.entry, sorted(tokens, key=attempt_of))
        ]
        if any(end is not None and end["code"] == EXIT_OK for _, end in ended):
            return True
        if not ended or any(end is None for _, end in ended):
            return None
        entry, end = ended[-1]
        will_rerun = end is not None and end["code"] == EXIT_PREEMPTED and not entry.is_cancelled()
        return None if will_rerun else False

    def entry(self, token: str) -> QueuedJob:
        return QueuedJob(self.folder / "jobs" / token)

    def add(self, token: str, content: str) -> None:
        """Put a job into the queue; once it is there, adding it again does nothing."""
        target = self.entry(token).folder
        if target.exists():
            return
        aside = self.folder / f".{token}.{os.getpid()}"
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside.mkdir(exist_ok=True)
        (aside / "entry.json").write_text(content)
        sync(aside / "entry.json")
        try:
            os.rename(aside, target)
        except OSError:  # somebody else was faster: a folder that is not empty cannot be replaced
            shutil.rmtree(aside, ignore_errors=True)
            if not target.exists():
                raise

    def cancel(self, token: str) -> None:
        """Ask for the end of a job."""
        with contextlib.suppress(FileNotFoundError):  # not in this queue: nothing runs
            (self.entry(token).folder / "cancel").touch()

    def has_runner(self) -> bool:
        """Whether a runner holds the queue now. Several processes may ask at the same time."""
        with runner_lock(self.folder, fcntl.LOCK_SH) as is_free:
            return not is_free

    def wake(self) -> None:
        """Start a runner unless there is one. It lives on when this process ends.

        On another host than the queue's, this does nothing.
        """
        if not self.is_here:
            return
        with _waking:
            if self.folder in _woken:
                # the runner of this process looks for jobs, or waits for its turn, IDLE_S seconds
                woken_at, runner = _woken[self.folder]
                code = runner.poll()
                # > 0: the next would fail as well
                if time.monotonic() - woken_at < IDLE_S and (code is None or code > 0):
                    return
            if not self.has_runner():
                _woken[self.folder] = (time.monotonic(), self._spawn())

    def _spawn(self) -> subprocess.Popen[bytes]:
        with (self.folder / "runner.log").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "jobs.backends.local.runner", str(self.folder)],
                cwd=Path(__file__).resolve().parent.parent.parent.parent,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


def attempt_of(token: str) -> tuple[str, int]:
    """(the part of the token that all attempts at this experiment share, the attempt's number)."""
    match = ATTEMPT.match(token)
    return (match[1], int(match[2])) if match else (token, 0)


@contextlib.contextmanager
def runner_lock(folder: Path, kind: int) -> Generator[bool]:
    """Whether the runner's lock could be taken; it is held while the block lasts.

    kind: LOCK_EX to be the runner, LOCK_SH to look whether there is one.
    """
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "runner.lock").open("ab") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
