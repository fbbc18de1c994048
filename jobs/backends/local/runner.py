"""The one process that starts the jobs of a machine's queue (jobs/backends/local/queue.py): `python
-m jobs.backends.local.runner FOLDER`.

It lives while it holds the queue's lock and there is something to do. First come, first served: a
job that waits for devices is not overtaken; one that waits for another job, for the model that it
begins with, or for its group, is.
LATHE_QUEUE_CPUS and CUDA_VISIBLE_DEVICES of whoever woke it bound what it shares out; a job that
can never fit into that ends at once. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from jobs.backends.local import queue as queue_folder
from jobs.backends.local.queue import Queue, QueuedJob, attempt_of, runner_lock
from jobs.errors import is_transient, reason_of
from jobs.node.host import gpus as gpu_lines
from jobs.record.bases import has_model
from jobs.record.state_table import EXIT_FAILED
from trainer.errors import EXIT_BAD_INPUT, EXIT_PREEMPTED, ConfigError, LatheError, StorageError
from trainer.files.atomic import create_json, write_json
from trainer.runtime import process

POLL_S = 0.1
LOOK_S = 1.0  # between two looks at what was asked of waiting jobs
LOCK_TRIES = 20  # each POLL_S: together longer than a runner stays idle
KILL_AFTER_S = 30.0  # beyond the job's own grace: a wrapper that does not end by itself
CANCELLED = 143  # 128 + SIGTERM, as a shell reports it
RESTARTED = "the machine, or its container, was restarted"

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capacity:
    """The cores and GPUs that the jobs of one machine share."""

    cpus: int
    gpus: tuple[str, ...]

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Capacity:
        """Cores and GPUs of this machine, as LATHE_QUEUE_CPUS and CUDA_VISIBLE_DEVICES limit them.

        ConfigError when LATHE_QUEUE_CPUS is no number of cores, or 0.
        """
        text = environ.get("LATHE_QUEUE_CPUS") or str(os.cpu_count() or 1)
        if not re.fullmatch("0*[1-9][0-9]{0,5}", text):
            raise ConfigError(
                f"LATHE_QUEUE_CPUS={text}: want the number of cores to share, 1 or more. Mend or "
                "unset it."
            )
        cpus, visible = int(text), environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return cls(
                cpus,
                tuple(
                    name for name in map(str.strip, visible.split(",")) if name not in ("", "-1")
                ),
            )
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
    """A running job: a child of this runner, or a job that a killed runner had started."""

    entry: QueuedJob
    facts: dict[str, Any]  # entry.json
    pid: int
    birth: str
    gpus: tuple[str, ...]
    child: subprocess.Popen[bytes] | None = None
    asked_at: float | None = None

    def code(self) -> int | None:
        """The exit code; None while the job runs, -1 for an adopted job, whose code is unknown."""
        if self.child is not None:
            return self.child.poll()
        return None if process.birth(self.pid) == self.birth else -1


@dataclass
class Runner:
    """The one process that starts jobs, as long as it holds the lock."""

    queue: Queue
    capacity: Capacity
    waiting: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    live: dict[str, Live] = field(default_factory=dict[str, Live])
    tokens: set[str] = field(default_factory=set[str])
    attempts: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    # of this turn
    verdicts: dict[str, bool | None] = field(default_factory=dict[str, "bool | None"])
    models: dict[str, bool] = field(default_factory=dict[str, bool])  # by run folder; of this turn
    free_on_disk: dict[str, Any] = field(default_factory=dict[str, Any])
    looked_at: float = -float("inf")
    troubles: dict[str, str] = field(default_factory=dict[str, str])  # by job: what it threw last
    again: set[str] = field(default_factory=set[str])  # jobs that are taken in at the next turn

    def work(self) -> None:
        """Take turns until there was nothing to do for IDLE_S. A job whose exit code only this
        process can learn is never left, however long this process was suspended.
        """
        idle_since = time.monotonic()
        while not self.is_idle() or time.monotonic() - idle_since < queue_folder.IDLE_S:
            self.turn()
            if not self.is_idle():
                idle_since = time.monotonic()
            time.sleep(POLL_S)

    def turn(self) -> None:
        """Read the queue once: add jobs, record ends, stop cancelled jobs, start those that fit."""
        self.verdicts.clear()
        self.models.clear()
        self.welcome()
        for token, live in list(self.live.items()):
            self._apart(token, partial(self._record_end, token, live), False)
        for token, live in self.live.items():
            self._apart(token, partial(self._stop_if_asked, live), None)
        if time.monotonic() - self.looked_at > LOOK_S:
            self.looked_at = time.monotonic()
            for token, facts in list(self.waiting.items()):
                self._apart(token, partial(self._end_if_unwanted, token, facts), False)
        self._start_what_fits()
        self._tell()

    def _apart(self, token: str, work: Callable[[], T], otherwise: T) -> T:
        """The result of one job's part of a turn. What it throws is logged once and is that job's:
        one that waits ends with it, unless it may pass; the others go on.
        """
        try:
            result = work()
        except Exception as error:  # of any kind: it must not keep the others waiting
            entry = self.queue.entry(token)
            reason = reason_of(error, entry.folder)
            if self.troubles.get(token) != reason:
                self.troubles[token] = reason
                text = f"{token}: {reason}"
                line = text.encode(errors="backslashreplace").decode()
                # a traceback would hold the bytes of a name that is no UTF-8
                log.warning("%s", line, exc_info=error if line == text else None)
            if token not in self.live and not is_transient(error):
                self.waiting.pop(token, None)
                with contextlib.suppress(OSError, LatheError):  # it says so in the log, then
                    entry.end(EXIT_FAILED, reason)
            return otherwise
        self.troubles.pop(token, None)
        return result

    def _record_end(self, token: str, live: Live) -> bool:
        """Record the end of a job that has ended, and let go of it; else do nothing."""
        code = live.code()
        if code is None:
            return False
        live.entry.end(code, None if live.child else "its runner was killed before it")
        del self.live[token]
        return True

    def is_idle(self) -> bool:
        """Whether no job runs, and each job that waits needs a model that no job of this queue will
        train. A new job, or a question about the state of one, starts the runner again.
        """
        return not self.live and all(map(self._awaits_base, self.waiting.values()))

    def _awaits_base(self, facts: Mapping[str, Any]) -> bool:
        base = facts.get("base")
        if base is None:
            return False
        if base not in self.models:
            self.models[base] = has_model(Path(base))
        return not self.models[base]

    def welcome(self) -> None:
        """Add new entries, and adopt the jobs that a killed runner had started."""
        # once more: a job that one of them waits for may be newer
        self.tokens -= self.again
        self.again.clear()
        while names := self.queue.tokens() - self.tokens:
            self.tokens |= names
            for token in names:
                self.attempts.setdefault(attempt_of(token)[0], set()).add(token)
                take_in = partial(self._take_in, self.queue.entry(token))
                self._apart(token, take_in, None)
                if token in self.troubles and not self.queue.entry(token).read_end():
                    self.again.add(token)  # what keeps it from being read may pass

    def _take_in(self, entry: QueuedJob) -> None:
        if entry.read_end() is not None:
            return
        started, facts = entry.read_start(), entry.read()
        if started is None:
            refusal = self.capacity.refusal(cpus=facts["cpus"], gpus=facts["gpus"])
            if refusal is None:
                self.waiting[entry.token] = facts
            else:  # it would stand in the way of all others for ever
                entry.end(
                    EXIT_BAD_INPUT,
                    f"{refusal}, as its queue was started. Ask for less, or send it elsewhere.",
                )
        elif (life := entry.life(started)) == "restarted":
            entry.end(EXIT_PREEMPTED, RESTARTED)
        elif life == "unseen":
            log.warning(
                "%s was started on %s, out of sight: left alone", entry.token, started.get("host")
            )
        else:
            self.live[entry.token] = Live(
                entry, facts, started["pid"], started["birth"], tuple(started["gpus"])
            )

    def _stop_if_asked(self, live: Live) -> None:
        if not live.entry.is_cancelled():
            return
        moment = time.monotonic()
        if live.asked_at is None:
            live.asked_at = moment
            _signal(live, signal.SIGTERM)
        elif moment - live.asked_at > live.facts["grace_s"] + KILL_AFTER_S:
            _signal(live, signal.SIGKILL)

    def _end_if_unwanted(self, token: str, facts: dict[str, Any]) -> bool:
        """End a waiting job that was cancelled, or whose predecessor did not succeed.

        Returns whether the job was ended.
        """
        entry = self.queue.entry(token)
        if entry.is_cancelled():
            entry.end(CANCELLED, "cancelled before it started")
        elif any(self._has_succeeded(other) is False for other in facts["after"]):
            entry.end(
                CANCELLED, f"it was to run after {', '.join(facts['after'])}, which did not succeed"
            )
        else:
            return False
        del self.waiting[token]
        return True

    def _has_succeeded(self, job_id: str) -> bool | None:
        """Whether this job's experiment has succeeded, in any attempt; None while it still may."""
        name = attempt_of(job_id.rpartition(":")[2])[0]
        if name not in self.verdicts:
            self.verdicts[name] = self.queue.has_succeeded(self.attempts.get(name, ()))
        return self.verdicts[name]

    def _start_what_fits(self) -> None:
        """Start waiting jobs in the order in which they came, until the next one does not fit.

        A job that waits for devices is not overtaken, so that it cannot starve.
        """
        for token in sorted(self.waiting, key=lambda token: (self.waiting[token]["at"], token)):
            facts, gpus = self.waiting[token], self._free_gpus()
            is_held = self._awaits_base(facts) or any(
                self._has_succeeded(other) is not True for other in facts["after"]
            )
            peers = sum(live.facts["group"] == facts["group"] for live in self.live.values())
            most = facts.get("max_parallel")
            if is_held or (most is not None and peers >= most):
                continue
            if len(gpus) < facts["gpus"] or self._free_cpus() < facts["cpus"]:
                return
            start = partial(self._start, token, facts, gpus[: facts["gpus"]])
            self._apart(token, start, None)

    def _start(self, token: str, facts: dict[str, Any], gpus: tuple[str, ...]) -> None:
        if self._end_if_unwanted(token, facts):
            return
        live = _start(self.queue.entry(token), facts, gpus)
        del self.waiting[token]
        if live is not None:
            self.live[token] = live
        else:
            self._take_in(self.queue.entry(token))

    def _tell(self) -> None:
        groups = Counter(live.facts["group"] for live in self.live.values())
        now = {"cpus": self._free_cpus(), "gpus": len(self._free_gpus()), "groups": dict(groups)}
        if now != self.free_on_disk:
            self.free_on_disk = now
            with contextlib.suppress(StorageError):  # it only explains
                write_json(self.queue.folder / "free.json", now, is_durable=False)

    def _free_cpus(self) -> int:
        return self.capacity.cpus - sum(live.facts["cpus"] for live in self.live.values())

    def _free_gpus(self) -> tuple[str, ...]:
        busy = {name for live in self.live.values() for name in live.gpus}
        return tuple(name for name in self.capacity.gpus if name not in busy)


def _start(entry: QueuedJob, facts: dict[str, Any], gpus: tuple[str, ...]) -> Live | None:
    """Start a job. None when it did not start, or another process had started it."""

    def announce() -> (
        None
    ):  # in the child, before it becomes the wrapper: a killed runner must not start it again
        own = {**process.facts(), "gpus": gpus}
        if not create_json(entry.folder / "started.json", own):
            # Popen turns it into a SubprocessError
            raise FileExistsError(f"{entry.folder}: started by another")

    environment = {
        **os.environ,
        **facts.get("environment", {}),
        "LATHE_JOB_ID": facts["id"],
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }
    with (entry.folder / "wrapper.log").open("ab") as output, entry.hold() as alive:
        try:
            child = subprocess.Popen(
                facts["wrapper"],
                cwd=facts["workdir"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(alive,),
                preexec_fn=announce,
            )
        except (OSError, subprocess.SubprocessError) as error:
            started = entry.read_start()
            # else it runs, started by another
            if started is None or process.life(started) == "gone":
                entry.end(1, f"cannot start {facts['wrapper'][0]}: {error}")
            return None
    return Live(entry, facts, child.pid, process.birth(child.pid) or "", gpus, child)


def _signal(live: Live, number: signal.Signals) -> None:
    if live.child is None and process.birth(live.pid) != live.birth:
        return
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if number == signal.SIGKILL else os.kill)(live.pid, number)


def serve(queue: Queue) -> None:
    """Run the queue until it is empty, unless another process does.

    ConfigError when LATHE_QUEUE_CPUS is no number of cores, or 0.
    """
    capacity, tries = Capacity.here(), 0
    while tries < LOCK_TRIES:
        runner = None
        with runner_lock(queue.folder, fcntl.LOCK_EX) as is_mine:
            if is_mine:
                runner = Runner(queue, capacity)
                runner.work()
        if runner is None:  # a runner has it, or somebody who looks whether there is one
            tries += 1
            time.sleep(POLL_S)
            continue
        tries = 0
        # a job may have come after the last turn, while its submitter still saw a runner
        runner.welcome()
        if runner.is_idle():
            return


def main() -> int:
    """`python -m jobs.backends.local.runner FOLDER`: be the runner."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    queue = Queue(Path(sys.argv[1]))
    try:
        if not queue.is_here:
            raise ConfigError(
                f"{queue.folder} belongs to {queue.identity['host']}: its jobs run there. Wake "
                "it there."
            )
        serve(queue)
    except LatheError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
