"""The wrapper inside a job: `python -m jobs.node.wrapper FOLDER ATTEMPT`, or `--array FILE` for one
element of an array.

It runs one attempt at most once at a time, tees what the training prints, beats its heart, hands
signals on, and writes exit.json: the one file that says how the attempt ended. Standard library
only: on the node this may be another interpreter than the training's.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from jobs.errors import EXIT_DUPLICATE
from jobs.node import host as node
from jobs.node import rendezvous
from jobs.node.pulse import Pulse
from jobs.record.paths import Attempt, RunFolder
from jobs.record.state_table import ENDS, EXIT_FAILED, EXIT_FILES, End, Symptoms, first_rule
from jobs.record.times import now
from trainer.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_PREEMPTED, LatheError
from trainer.files.atomic import create_json, read_json, write_json
from trainer.metrics.test_record import lacks_test

HEARTBEAT_S = 30.0
POLL_S = 0.1
KEY_BYTES = 2048
PATIENCE_S = 120.0  # how long to wait for an earlier start's last sign of life to grow old
SILENT = (
    "it ended with code 0, but no training told its outcome: does the launch line run trainval.py?"
)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ending:
    """How one start of an attempt ended."""

    end: End
    reason: str | None = None

    @property
    def code(self) -> int:
        return EXIT_FILES[self.end][0]

    @property
    def kind(self) -> str:
        return EXIT_FILES[self.end][1]


class Unfit(Exception):
    """The job cannot run as it was sent; a person must change something. Ends with code 2."""


@dataclass
class Stop:
    """Whether the platform has asked this job to end; by which signal, and when."""

    name: str | None = None
    at: float = field(default=float("inf"))

    def ask(self, number: int, frame: Any = None) -> None:
        if self.name is None:
            self.name, self.at = signal.Signals(number).name, time.monotonic()


def run(folder: Path, number: int, *, has_terminal: bool = False) -> int:
    """Run attempt `number` of the experiment in `folder`; returns the exit code, which is also in
    exit.json.

    has_terminal: the training gets this process's own stdin, stdout and stderr (to debug), and no
    log is kept.
    """
    attempt = RunFolder(folder).attempt(number)
    spec = read_json(attempt.spec)
    if spec is None:
        log.error("%s: absent or not whole. Submit the experiment again.", attempt.spec)
        return EXIT_BAD_INPUT
    stop = Stop()
    before = {number: signal.signal(number, stop.ask) for number in STOP_SIGNALS}
    try:
        if not node.is_leader():  # the files are the first node's to write
            return _train(attempt, spec, stop, has_terminal=has_terminal).code
        return _lead(attempt, spec, stop, has_terminal=has_terminal)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _lead(attempt: Attempt, spec: dict[str, Any], stop: Stop, *, has_terminal: bool) -> int:
    """Claim the attempt, run it, and write how it ended. Nothing is done when another has it."""
    ended = read_json(attempt.exit)
    if ended is not None and ended["code"] != EXIT_PREEMPTED:
        log.error("%s has ended with code %d: it does not run again", attempt.folder, ended["code"])
        return int(ended["code"])
    try:
        if _waits_in_vain(attempt, ended, stop):
            return EXIT_DUPLICATE
        start = _claim(attempt)
        if start is None:
            return EXIT_DUPLICATE
        if ended is not None:
            os.replace(attempt.exit, attempt.folder / f"exit-{start - 1}.json")
        write_json(attempt.env, node.facts())
        ending = _other_attempts(attempt, spec, stop) or _train(
            attempt, spec, stop, has_terminal=has_terminal
        )
    except Unfit as error:
        start, ending = len(attempt.starts()), Ending("bad input", str(error))
    except (OSError, LatheError) as error:  # the disk, or a program that does not exist
        start = len(attempt.starts())
        ending = Ending("failed", f"{type(error).__name__}: {error}")
    _conclude(attempt, ending, start)
    return ending.code


def _waits_in_vain(attempt: Attempt, ended: dict[str, Any] | None, stop: Stop) -> bool:
    """Wait until the start before this one is certainly dead. True when it stays alive.

    A scheduler that loses sight of a node starts the job on another one, while the first may still
    be writing.
    """
    deadline, pulse = time.monotonic() + PATIENCE_S, Pulse(attempt)
    while ended is None and pulse.may_live():
        if time.monotonic() > deadline or stop.name is not None:
            log.error("%s: an earlier start of it is alive; this one does nothing", attempt.folder)
            return True
        time.sleep(1)
    return False


def _claim(attempt: Attempt) -> int | None:
    """Write the next started-<k>.json and return k; None when this attempt is another's, or was
    given up.

    A scheduler that starts a job again uses the same id; another id is a second copy of the same
    submission.
    """
    own, starts = node.job_id(), attempt.starts()
    first = read_json(starts[0]) if starts else None
    if first is not None and own is not None and first.get("id") not in (None, own):
        log.error(
            "%s has started as job %s; this is a second copy, %s", attempt.folder, first["id"], own
        )
        return None
    start = len(starts) + 1
    facts = {
        "at": now(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "id": own,
        "restarts": node.restarts(),
    }
    if not create_json(attempt.start_file(start), facts):
        log.error("%s: start %d was taken by another process at this moment", attempt.folder, start)
        return None
    # looked at after the start is on the disk: whoever gives up looks for that
    if attempt.give_up_file.exists():
        log.error("%s was given up: another attempt runs in its place", attempt.folder)
        return None
    return start


def _other_attempts(attempt: Attempt, spec: dict[str, Any], stop: Stop) -> Ending | None:
    """The end of this attempt when another is alive, or has succeeded and left nothing to do; else
    None: it may train.
    """
    has_work = lacks_test(attempt.folder.parents[1], spec["program"])
    for folder in sorted(attempt.folder.parent.iterdir()):
        other = Attempt(folder)
        if not folder.name.isdigit() or other.number == attempt.number:
            continue
        if (read_json(other.exit) or {}).get("code") == EXIT_OK and not has_work:
            return Ending("succeeded", f"attempt {other.number} had reached the end")
        if _lives(other, stop):
            return Ending("preempted", f"attempt {other.number} is alive")
    return None


def _lives(attempt: Attempt, stop: Stop) -> bool:
    """Whether another attempt runs. It takes up to ALIVE_S to learn that of another host."""
    pulse = Pulse(attempt)
    while pulse.may_live():
        if pulse.is_seen or stop.name is not None:
            return True
        time.sleep(POLL_S)
    return False


def _train(attempt: Attempt, spec: dict[str, Any], stop: Stop, *, has_terminal: bool) -> Ending:
    environment = environment_of(spec, attempt, os.environ)
    launcher = rendezvous.fill_in(spec["launcher"], spec)
    argv = [*node.on_each_node(launcher, spec), *spec["program"]]
    attempt.outcome.unlink(missing_ok=True)
    pipe = None if has_terminal else subprocess.PIPE
    oom_before = node.oom_kills()
    if not has_terminal:
        node.adopt_orphans()
    child = subprocess.Popen(
        argv,
        cwd=spec["workdir"],
        env=environment,
        stdin=None if has_terminal else subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        start_new_session=not has_terminal,
        preexec_fn=node.die_with_parent,
    )
    tees = (
        []
        if has_terminal
        else [_tee(child.stdout, attempt.logs, 1), _tee(child.stderr, attempt.err, 2)]
    )
    timed_out = _watch(child, attempt, spec, stop)
    if not has_terminal:
        node.kill_descendants()  # ranks that a launcher left behind
    for tee in tees:
        tee.join(timeout=5)  # a grandchild that outlives the training may hold the pipe for ever
    return _ending(attempt, child.returncode, stop, timed_out, node.oom_kills() > oom_before)


def _watch(
    child: subprocess.Popen[bytes], attempt: Attempt, spec: dict[str, Any], stop: Stop
) -> bool:
    """Wait until the training ends; while it saves, also without its launcher. Meanwhile write the
    heartbeat and pass on a request to stop.

    Returns whether it ran out of time.
    """
    job, began, beat_at = spec["job"], time.monotonic(), -float("inf")
    limit_s, was_asked, timed_out = job.get("max_run_time") or float("inf"), False, False
    while child.poll() is None or _saves_on(attempt, stop):
        moment = time.monotonic()
        if moment - began > limit_s and stop.name is None:
            timed_out = True
            stop.ask(signal.SIGTERM)
        if stop.name is not None and not was_asked:
            was_asked = True
            log.warning("%s: asking the training to save and stop", stop.name)
            # torchrun knows no SIGUSR1: it would die of it
            node.signal_all(child.pid, signal.SIGTERM)
        if moment - stop.at > job["grace_s"]:
            node.signal_all(child.pid, signal.SIGKILL)
            if child.poll() is not None:
                break
        if moment - beat_at > HEARTBEAT_S and node.is_leader():
            beat_at = moment
            step = (read_json(_run_folder(attempt).status) or {}).get("step")
            try:
                write_json(attempt.heartbeat, {"at": now(), "step": step})
            except LatheError as error:  # a full disk: the training itself will say more
                log.warning("no heartbeat: %s", error)
            # its scheduler may have lost sight of it, and sends no signal then
            if attempt.cancel_file.exists():
                stop.ask(signal.SIGTERM)
        time.sleep(POLL_S)
    return timed_out


def _saves_on(attempt: Attempt, stop: Stop) -> bool:
    """Whether a training that was asked to stop goes on although its launcher has ended: the
    program of a container may die of the signal that lets the training save.
    """
    return (
        stop.name is not None
        and not attempt.outcome.exists()
        and bool(node.descendants(os.getpid()))
    )


def _ending(attempt: Attempt, code: int, stop: Stop, timed_out: bool, was_oom: bool) -> Ending:
    """How an attempt ended, by the table ENDS.

    The outcome that the training itself has written counts more than the exit code of its
    launcher, which is 1 for nearly everything.
    """
    outcome = read_json(attempt.outcome) or {}
    outcome_code, error = outcome.get("code"), outcome.get("error")
    if outcome_code is None and code == 0:
        has_succeeded = (read_json(_run_folder(attempt).status) or {}).get("state") == "succeeded"
        outcome_code, error = (EXIT_OK, None) if has_succeeded else (EXIT_FAILED, SILENT)
    final = code if outcome_code is None else outcome_code
    rule = first_rule(
        ENDS,
        Symptoms(
            code=final,
            has_outcome=outcome_code is not None,
            has_timed_out=timed_out,
            is_out_of_memory=was_oom or "OutOfMemoryError" in (error or ""),
            was_stopped=stop.name is not None,
        ),
    )
    exit_text = f"killed by {signal.Signals(-final).name}" if final < 0 else f"exit code {final}"
    reason = None
    if rule.reason is not None:
        reason = rule.reason.format(stop=stop.name or "its own request", exit=exit_text)
    return Ending(rule.end, reason if rule.has_own_reason else error or reason)


def environment_of(
    spec: Mapping[str, Any], attempt: Attempt, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The training's environment: the scheduler's variables, replaced by the job's own, and the key
    of W&B.

    The key is stored nowhere else.
    """
    environment = {
        # how long torchrun lets ranks save: 30 s by itself (torch 2.13, --shutdown_timeout)
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(spec["job"]["grace_s"]),
        **inherited,
        **spec["environment"],
        "PYTHONUNBUFFERED": "1",
        "LATHE_OUTCOME": str(attempt.outcome),
    }
    if spec.get("activate"):
        environment = {**environment, **node.activation_variables(spec["activate"], environment)}
    key_file = spec["job"].get("wandb_key_file")
    if key_file:
        environment["WANDB_API_KEY"] = read_key(Path(key_file).expanduser())
    return environment


def read_key(path: Path) -> str:
    """The key in a file that only its owner can read.

    Unfit when it is absent, open to others, or no single word.
    """
    try:
        # a pipe of that name must not hang the job
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise Unfit(
            f"wandb_key_file {path}: {error.strerror}. Write the key there, mode 0600."
        ) from None
    with open(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_mode & 0o077 or facts.st_uid != os.geteuid():
            mode = oct(stat.S_IMODE(facts.st_mode))
            raise Unfit(
                f"wandb_key_file {path}: mode {mode}, want 0o600 and owned by this user. chmod "
                f"600 {path}"
            )
        text = file.read(KEY_BYTES).decode(errors="replace").strip()
    if not text or any(letter.isspace() for letter in text):
        raise Unfit(f"wandb_key_file {path}: want one word, the key, and nothing else.")
    return text


def _tee(source: IO[bytes] | None, path: Path, number: int) -> threading.Thread:
    """Copy a pipe to a file (appended) and to this process's stream `number`, until it ends."""

    def copy() -> None:
        assert source is not None, "a tee is made of a pipe"
        with path.open("ab", buffering=0) as file:
            while block := os.read(source.fileno(), 65536):
                _write_all(file.fileno(), block)
                _write_all(number, block)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def _write_all(descriptor: int, block: bytes) -> None:
    """Write a whole block. An error is logged only: it must not block the training's own pipe."""
    try:
        while block:
            block = block[os.write(descriptor, block) :]
    except OSError as error:
        log.debug("cannot write %d bytes: %s", len(block), error)


def _run_folder(attempt: Attempt) -> RunFolder:
    return RunFolder(attempt.folder.parent.parent)


def _conclude(attempt: Attempt, ending: Ending, start: int) -> None:
    step = (read_json(_run_folder(attempt).status) or {}).get("step")
    facts = {
        "code": ending.code,
        "kind": ending.kind,
        "reason": ending.reason,
        "step": step,
        "start": start,
    }
    write_json(
        attempt.exit, {"at": now(), **facts, "host": socket.gethostname(), "id": node.job_id()}
    )
    log.info("%s: %s", ending.kind, ending.reason or "done")


def main(arguments: Sequence[str]) -> int:
    """The command: exit code of the training, 2 for wrong arguments."""
    logging.basicConfig(
        level=logging.INFO, format="jobs.node.wrapper: %(message)s", stream=sys.stderr
    )
    if len(arguments) == 2 and arguments[0] == "--array":
        index = os.environ.get("SLURM_ARRAY_TASK_ID", "")
        table = read_json(Path(arguments[1])) or {}
        if index not in table:
            log.error("%s has no entry %r (SLURM_ARRAY_TASK_ID)", arguments[1], index)
            return EXIT_BAD_INPUT
        folder, number = table[index]
        return run(Path(folder), int(number))
    if len(arguments) == 2 and arguments[1].isdigit():
        return run(Path(arguments[0]), int(arguments[1]))
    log.error("got %s, want FOLDER ATTEMPT or --array FILE", list(arguments))
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
