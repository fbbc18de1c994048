"""The queue of one machine: a folder of jobs, and the one process that starts them as devices become free.

    <queue>/runner.lock       held (flock) by the runner while it lives
    <queue>/runner.log
    <queue>/jobs/<token>/     made by one rename: a token enters the queue once, for ever
        entry.json            what to run and what it needs
        started.json          written by the job's own process before it becomes the wrapper: never started twice
        ended.json            code and reason
        cancel                somebody asked for its end
        wrapper.log

The runner outlives whoever submitted; killed, it is started again by the next submission, and adopts what still runs.
Standard library only. LATHE_QUEUE names another folder than $XDG_STATE_HOME/lathe/queue.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.layout import read_json
from jobs.node import gpus as gpu_lines
from trainer.errors import EXIT_OK

POLL_S = 0.1
LOOK_S = 1.0  # between two looks at what was asked of waiting jobs
LOCK_TRIES = 20
IDLE_S = 1.0  # the runner leaves when there has been nothing to do for so long
KILL_AFTER_S = 30.0  # beyond the job's own grace: a wrapper that does not end by itself
CANCELLED = 143  # 128 + SIGTERM, as a shell reports it

log = logging.getLogger(__name__)


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's queue on this machine lies."""
    if own := environ.get("LATHE_QUEUE"):
        return Path(own).absolute()
    state = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "lathe" / "queue"


@dataclass(frozen=True)
class Entry:
    """One job of the queue."""

    folder: Path

    @property
    def token(self) -> str:
        return self.folder.name

    def read(self) -> dict[str, Any]:
        """What was submitted: wrapper, workdir, id, gpus, cpus, grace_s, group, max_parallel, after, at."""
        value = read_json(self.folder / "entry.json")
        assert value is not None, "an entry comes into the queue whole"
        return value

    def started(self) -> dict[str, Any] | None:
        """{"pid", "birth", "gpus"}, or None when it has not started."""
        return read_json(self.folder / "started.json")

    def ended(self) -> dict[str, Any] | None:
        """{"code", "reason"}, or None when it has not ended."""
        return read_json(self.folder / "ended.json")

    def is_cancelled(self) -> bool:
        """Whether somebody asked for its end."""
        return (self.folder / "cancel").exists()

    def end(self, code: int, reason: str | None) -> None:
        """Record its end; the first one counts."""
        with contextlib.suppress(FileExistsError):
            _write_once(self.folder / "ended.json", {"code": code, "reason": reason})


@dataclass(frozen=True)
class Queue:
    """The folder, for those who submit and look."""

    folder: Path

    def entry(self, token: str) -> Entry:
        return Entry(self.folder / "jobs" / token)

    def add(self, token: str, content: str) -> None:
        """Put a job into the queue; once it is there, adding it again does nothing."""
        target = self.entry(token).folder
        if target.exists():
            return
        aside = self.folder / f".{token}.{os.getpid()}"
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside.mkdir(exist_ok=True)
        with (aside / "entry.json").open("w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
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
        """Whether a runner holds the queue now."""
        with _lock(self.folder) as is_mine:
            return not is_mine

    def wake(self) -> None:
        """Start a runner unless there is one. It lives on when this process ends."""
        if self.has_runner():
            return
        home = Path(__file__).resolve().parent.parent
        with (self.folder / "runner.log").open("ab") as output:
            subprocess.Popen(
                [sys.executable, "-m", "jobs.queue", str(self.folder)],
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


@dataclass(frozen=True)
class Capacity:
    """What the jobs of one machine share."""

    cpus: int
    gpus: tuple[str, ...]

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Capacity:
        """Cores and GPUs of this machine, as LATHE_QUEUE_CPUS and CUDA_VISIBLE_DEVICES limit them."""
        cpus = int(environ.get("LATHE_QUEUE_CPUS") or os.cpu_count() or 1)
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return cls(cpus, tuple(name for name in visible.split(",") if name not in ("", "-1")))
        return cls(cpus, tuple(str(number) for number in range(len(gpu_lines()))))

    def refusal(self, *, cpus: int, gpus: int) -> str | None:
        """Why a job could never run here, or None."""
        if gpus > len(self.gpus):
            return f"it needs {gpus} GPUs, this machine has {len(self.gpus)}"
        if cpus > self.cpus:
            return f"it needs {cpus} cores, this machine has {self.cpus}"
        return None


@dataclass
class Live:
    """A job that runs: as this runner's child, or adopted from a runner that was killed."""

    entry: Entry
    facts: dict[str, Any]  # entry.json
    pid: int
    birth: str
    gpus: tuple[str, ...]
    child: subprocess.Popen[bytes] | None = None
    asked_at: float | None = None

    def code(self) -> int | None:
        """The exit code when it has ended; an adopted job's is not known: -1."""
        if self.child is not None:
            return self.child.poll()
        return None if birth(self.pid) == self.birth else -1


@dataclass
class Runner:
    """The one process that starts jobs, as long as it holds the lock."""

    queue: Queue
    capacity: Capacity
    waiting: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    live: dict[str, Live] = field(default_factory=dict[str, Live])
    known: set[str] = field(default_factory=set[str])
    looked_at: float = -float("inf")

    def turn(self) -> None:
        """Look once: who is new, who has ended, who is to be stopped, who can start."""
        self.welcome()
        for token in [token for token, live in self.live.items() if live.code() is not None]:
            live = self.live.pop(token)
            code = live.code()
            live.entry.end(-1 if code is None else code, None if live.child else "its runner was killed before it")
        for live in self.live.values():
            self._stop_if_asked(live)
        if time.monotonic() - self.looked_at > LOOK_S:
            self._end_what_cannot_start()
        self._start_what_fits()

    def is_idle(self) -> bool:
        return not self.live and not self.waiting

    def welcome(self) -> None:
        """Take in new entries, and adopt those that a killed runner had started."""
        try:
            names = {entry.name for entry in os.scandir(self.queue.folder / "jobs")} - self.known
        except FileNotFoundError:
            return
        for token in names:
            self.known.add(token)
            entry = self.queue.entry(token)
            if entry.ended() is not None:
                continue
            started = entry.started()
            if started is None:
                self.waiting[token] = entry.read()
            else:
                self.live[token] = Live(entry, entry.read(), started["pid"], started["birth"], tuple(started["gpus"]))

    def _stop_if_asked(self, live: Live) -> None:
        if not live.entry.is_cancelled():
            return
        moment = time.monotonic()
        if live.asked_at is None:
            live.asked_at = moment
            _signal(live, signal.SIGTERM)
        elif moment - live.asked_at > live.facts["grace_s"] + KILL_AFTER_S:
            _signal(live, signal.SIGKILL)

    def _end_what_cannot_start(self) -> None:
        self.looked_at = time.monotonic()
        for token, facts in list(self.waiting.items()):
            self._end_if_unwanted(token, facts)

    def _end_if_unwanted(self, token: str, facts: dict[str, Any]) -> bool:
        """End a waiting job that was cancelled, or whose predecessor did not succeed; returns whether it was ended."""
        entry = self.queue.entry(token)
        before = [ended for other in facts["after"] if (ended := self.queue.entry(other).ended()) is not None]
        if entry.is_cancelled():
            entry.end(CANCELLED, "cancelled before it started")
        elif any(ended["code"] != EXIT_OK for ended in before):
            entry.end(CANCELLED, f"it was to run after {', '.join(facts['after'])}, which did not succeed")
        else:
            return False
        del self.waiting[token]
        return True

    def _start_what_fits(self) -> None:
        """First come, first served: a job that waits for devices is not overtaken, so that it cannot starve."""
        for token in sorted(self.waiting, key=lambda token: (self.waiting[token]["at"], token)):
            facts, gpus = self.waiting[token], self._free_gpus()
            cpus = self.capacity.cpus - sum(live.facts["cpus"] for live in self.live.values())
            if len(gpus) < facts["gpus"] or cpus < facts["cpus"]:
                return
            peers = sum(live.facts["group"] == facts["group"] for live in self.live.values())
            is_many = facts["max_parallel"] is not None and peers >= facts["max_parallel"]
            if is_many or any(self.queue.entry(other).ended() is None for other in facts["after"]):
                continue
            if not self._end_if_unwanted(token, facts):
                del self.waiting[token]
                self.live[token] = _start(self.queue.entry(token), facts, gpus[: facts["gpus"]])

    def _free_gpus(self) -> tuple[str, ...]:
        taken = {name for live in self.live.values() for name in live.gpus}
        return tuple(name for name in self.capacity.gpus if name not in taken)


def _start(entry: Entry, facts: dict[str, Any], gpus: tuple[str, ...]) -> Live:
    path = entry.folder / "started.json"

    def announce() -> None:  # in the child, before it becomes the wrapper: a killed runner must not start it again
        _write_once(path, {"pid": os.getpid(), "birth": birth(os.getpid()), "gpus": gpus})

    environment = {**os.environ, "LATHE_JOB_ID": facts["id"], "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    with (entry.folder / "wrapper.log").open("ab") as output:
        try:
            child = subprocess.Popen(
                facts["wrapper"],
                cwd=facts["workdir"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=announce,
            )
        except (OSError, subprocess.SubprocessError) as error:
            entry.end(1, f"cannot start {facts['wrapper'][0]}: {error}")
            return Live(entry, facts, -1, "", gpus)
    return Live(entry, facts, child.pid, birth(child.pid) or "", gpus, child)


def _signal(live: Live, number: signal.Signals) -> None:
    if live.child is None and birth(live.pid) != live.birth:
        return
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if number == signal.SIGKILL else os.kill)(live.pid, number)


def birth(pid: int) -> str | None:
    """When a process began, in clock ticks since boot, with the boot's id; None when it does not live.

    Together with the pid it names one process for ever; a zombie counts as dead.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else f"{boot}:{fields[19]}"


def _write_once(path: Path, value: Mapping[str, Any]) -> None:
    """Make `path` with this content, whole or not at all; FileExistsError when it is there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)
    finally:
        temporary.unlink()


@contextlib.contextmanager
def _lock(folder: Path) -> Generator[bool]:
    """Whether the runner's lock could be taken; it is held while the block lasts."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "runner.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def serve(queue: Queue) -> None:
    """Run the queue until it is empty, unless another process does."""
    tries = 0
    while tries < LOCK_TRIES:
        runner = None
        with _lock(queue.folder) as is_mine:
            if is_mine:
                runner = Runner(queue, Capacity.here())
                _work(runner)
        if runner is None:  # a runner has it, or somebody who looks whether there is one
            tries += 1
            time.sleep(POLL_S)
            continue
        runner.welcome()  # a job may have come after the last turn, while its submitter still saw a runner
        if runner.is_idle():
            return


def _work(runner: Runner) -> None:
    idle_since = time.monotonic()
    while time.monotonic() - idle_since < IDLE_S:
        runner.turn()
        if not runner.is_idle():
            idle_since = time.monotonic()
        time.sleep(POLL_S)


def main() -> int:
    """`python -m jobs.queue FOLDER`: be the runner."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    serve(Queue(Path(sys.argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
