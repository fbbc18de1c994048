"""Calls Slurm's clients and reads their answers: the columns of squeue and sacct, and the state
that they mean for a job.

Source of the states and reasons: squeue(1), and the behaviour of Slurm 22.05.8.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jobs.errors import NotYet, Refused, Unreachable
from jobs.job_state import ACTIVE, JobState, Observed
from jobs.time_limits import run_program

ASK_S = 60.0
log = logging.getLogger(__name__)
ID = re.compile(r"\d+(_\d+)?\Z")
# elements of an array that never started stand in one row of sacct: "7_[0,4-9:2%3]"
WAITING_ELEMENTS = re.compile(r"(\d+)_\[([0-9,:-]+)(?:%\d+)?\]\Z")
ELEMENTS = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?\Z")
LAST_SIGNAL = 64

# What a client says when it did not reach the controller, or did not get its answer: then nothing
# is known. From the errors 1000-1999 and 5000-5099 of slurm_errno.h, libc's words, and munge's.
UNSEEN = re.compile(
    r"unable to contact|socket timed out|timed out|zero bytes were transmitted|connection "
    r"(refused|reset|failure)"
    r"|message (send|receive) failure|unexpected message received|protocol authentication "
    r"error|insane message length"
    r"|munge (encode|decode) failed|munged is up|configuration source|temporarily un|try "
    r"again|standby mode"
    r"|no route to host|network is (unreachable|down)|host is (down|unreachable)|broken "
    r"pipe|unspecified error"
    r"|name or service not known|not responding|transport endpoint|header lengths|slurmdbd: .*fail",
    re.IGNORECASE,
)
# Limits on how many jobs stand in the queue: one passes when a job ends. The words are in sbatch's
# error, before the sentence of POLICY, which speaks of limits of size and time as well.
FULL = re.compile(r"(Assoc|QOS)(Max|Grp)Submit\w*Limit|MaxJobCount", re.IGNORECASE)
LIMIT = re.compile(r"\b(Assoc|QOS)\w+Limit", re.IGNORECASE)
POLICY = re.compile(r"accounting/QOS policy \(job submit limit", re.IGNORECASE)
UNKNOWN_ID = re.compile(r"invalid job id specified", re.IGNORECASE)
ENDED = re.compile(
    r"invalid job id|already completing or completed|already finished|has finished", re.IGNORECASE
)

# What a client may see of our own environment. `sbatch --export=ALL` hands exactly this on to the
# job, and so no login shell runs on the node: in 22.05 every other value of --export (NONE, a list
# of names, and NIL, which it takes for a name) makes it run one, about 1 s here and up to 2 minutes
# where a profile hangs, and what it sets differs by site. No SLURM_* of a job that we may stand in
# ourselves, and of the user's defaults only those that name a place.
HANDED_ON = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "SLURM_CONF")
DEFAULTS = (
    "SBATCH_ACCOUNT",
    "SBATCH_PARTITION",
    "SBATCH_QOS",
    "SBATCH_RESERVATION",
    "SBATCH_CONSTRAINT",
)

STATES: dict[str, JobState] = {
    "PENDING": "queued",
    "CONFIGURING": "queued",
    "REQUEUED": "queued",
    "REQUEUE_FED": "queued",
    "REQUEUE_HOLD": "held",
    "SPECIAL_EXIT": "held",
    "RUNNING": "running",
    "COMPLETING": "running",
    "STAGE_OUT": "running",
    "SIGNALING": "running",
    "RESIZING": "running",
    "SUSPENDED": "running",
    "STOPPED": "running",
    "COMPLETED": "succeeded",
    "FAILED": "failed",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "oom",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "preempted",
    "BOOT_FAIL": "preempted",
}
# Reasons for which a pending job waits until a person does something, and what that is.
RELEASE = "`scontrol release {id}` lets it start"
HOPELESS = "it never fits as it is: cancel it, change the job dictionary, and submit again"
CURES = {
    "JobHeldUser": RELEASE,
    "JobHeldAdmin": f"{RELEASE}, for an administrator",
    "launch failed requeued held": f"its start failed; {RELEASE} again",
    "launch_failed_requeued_held": f"its start failed; {RELEASE} again",
    "job requeued in held state": RELEASE,
    "DependencyNeverSatisfied": "a job that it depends on failed: cancel it, and submit again "
    "after that one",
    "BadConstraints": HOPELESS,
    "PartitionNodeLimit": HOPELESS,
    "PartitionTimeLimit": HOPELESS,
    "InvalidAccount": HOPELESS,
    "InvalidQOS": HOPELESS,
}
NO_NODES = ("ReqNodeNotAvail", "Nodes required for job are DOWN")
OUT_OF_USE = re.compile(r"down|drain|fail|inval|.*\*")  # as sinfo has them; "*" does not answer


class QueueLine(NamedTuple):
    """One job, as squeue or sacct shows it; `status` as wait(2) has it."""

    id: str
    state: str
    status: int = 0
    restarts: str = ""
    host: str = ""
    nodes: str = "1"
    partition: str = ""
    required: str = ""  # nodes that the job itself names
    reason: str = ""


class Node(NamedTuple):
    """One node of one partition, as sinfo shows it."""

    name: str
    partition: str
    state: str
    reason: str


# The reason comes last: it is the one column whose text is free.
COLUMNS = (
    "JobArrayID:48|,State:24|,exit_code:16|,RestartCnt:12|,BatchHost:128|,NumNodes:24|,Partition:256|"
    ",ReqNodes:2048|,Reason:1024"
)
HISTORY = "JobID,State,ExitCode,NodeList"  # its Reason is why the job once waited, not why it ended


@dataclass(frozen=True)
class Reply:
    """The exit code and the output of a client."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Its error output, or else its output, on one line."""
        return "; ".join(
            line.strip() for line in (self.err or self.out).splitlines() if line.strip()
        )


def call(argv: Sequence[str], *, text: str = "", timeout_s: float) -> Reply:
    """Run a client to its end. Unreachable when it cannot start or does not end in time."""
    env = {
        name: value
        for name in (*HANDED_ON, *DEFAULTS)
        if (value := os.environ.get(name)) is not None
    }
    try:
        content = text.encode(errors="surrogateescape")
        process = run_program(argv, content=content, env=env, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{argv[0]} did not answer within {timeout_s:.0f} s") from None
    except OSError as error:
        raise Unreachable(f"{argv[0]} cannot be run: {error.strerror or error}") from None
    return Reply(
        process.returncode,
        process.stdout.decode(errors="replace"),
        process.stderr.decode(errors="replace"),
    )


def ask(*argv: str) -> list[str]:
    """The lines of a client's output. Unreachable for any failure."""
    reply = call(argv, timeout_s=ASK_S)
    if reply.code != 0:
        raise Unreachable(f"{argv[0]}: {reply.words}")
    return reply.out.splitlines()


def rejection(reply: Reply, what: str) -> Refused | Unreachable | NotYet:
    """Refused when Slurm has clearly said no, NotYet when it says so of the number of jobs; else
    Unreachable: a lost answer says nothing.
    """
    text = f"{what}: {reply.words or f'ended with code {reply.code}'}"
    if reply.code < 0 or not reply.words or UNSEEN.search(reply.words):
        return Unreachable(text)
    # the sentence alone may mean a limit of size, which never passes: then the queue tells
    is_named = LIMIT.search(reply.words)
    if FULL.search(reply.words) or (POLICY.search(reply.words) and not is_named and _has_jobs()):
        return NotYet(text)
    return Refused(text)


def _has_jobs() -> bool:
    """Whether jobs of this user stand in the queue, so that a limit on their number may pass."""
    try:
        return bool(ask("squeue", "--me", "--noheader", "--format=%A"))
    except Unreachable:
        return True


def list_lines(ids: Sequence[str], columns: str) -> list[str]:
    """Lines of squeue for these jobs, ended ones included; none for unknown ids. Unreachable."""
    reply = call(
        ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(ids)}", columns],
        timeout_s=ASK_S,
    )
    # it says so of a single id; of several it leaves them out
    if reply.code != 0 and not UNKNOWN_ID.search(reply.err):
        raise Unreachable(f"squeue: {reply.words}")
    return reply.out.splitlines()


def queue_lines(ids: Sequence[str]) -> Iterator[QueueLine]:
    """Rows of the jobs that the controller still knows."""
    for line in list_lines(ids, f"--Format={COLUMNS}"):
        fields = [field.strip() for field in line.split("|", 8)]
        if len(fields) == 9:
            yield QueueLine(
                fields[0], fields[1], int(fields[2]) if fields[2].isdigit() else 0, *fields[3:]
            )


def past(ids: Sequence[str]) -> Iterator[QueueLine]:
    """Rows of ended jobs from accounting. A job that accounting calls alive is left out, because
    the controller would know it.
    """
    lines = history(f"--jobs={','.join(ids)}", f"--format={HISTORY}")
    for fields in (line.split("|") for line in lines):
        if len(fields) == 4 and STATES.get(fields[1].partition(" ")[0], "running") not in ACTIVE:
            code, _, number = fields[2].partition(":")
            status = (int(code) << 8 | int(number)) if code.isdigit() and number.isdigit() else 0
            host = "" if fields[3].startswith("None") else fields[3]
            for job_id in _ids_of_row(fields[0], ids):
                yield QueueLine(job_id, fields[1], status, host=host)


def _ids_of_row(job_id: str, ids: Sequence[str]) -> list[str]:
    """The ids of `ids` that a row of sacct speaks of: "7_[0,4-9:2%3]" means 7_0, 7_4, 7_6, 7_8."""
    match = WAITING_ELEMENTS.match(job_id)
    if match is None:
        return [job_id]
    parts = [part for text in match[2].split(",") if (part := ELEMENTS.match(text))]
    ranges = [range(int(part[1]), int(part[2] or part[1]) + 1, int(part[3] or 1)) for part in parts]
    members: list[str] = []
    for name in ids:
        array, _, place = name.partition("_")
        if array == match[1] and any(int(place or -1) in each for each in ranges):
            members.append(name)
    return members


def arrays_in_queue(arrays: Sequence[str]) -> set[str]:
    """Those of these arrays of which the controller still knows some element."""
    return {row.id.partition("_")[0] for row in queue_lines(arrays)}


def history(*options: str) -> list[str]:
    """Lines of sacct, which only add to those of squeue; none without accounting."""
    try:
        reply = call(
            ["sacct", "--noheader", "--parsable2", "--allocations", *options], timeout_s=ASK_S
        )
    except Unreachable as error:
        reply = Reply(1, "", str(error))
    if reply.code != 0 and "accounting storage is disabled" not in reply.words:
        log.warning("jobs that ended long ago cannot be seen now: %s", reply.words)
    return reply.out.splitlines() if reply.code == 0 else []


def observe(row: QueueLine, around: Sequence[Node]) -> Observed:
    """The state of a job, from its row. `around`: the cluster's nodes, needed when the row says
    that there are too few.

    exit_code is 128 + the signal, as in a shell, for a job that a signal ended; None for one that
    never ran.
    """
    word = row.state.partition(" ")[0]
    state = STATES.get(word)
    reason = None if row.reason in ("", "None", "(null)") else row.reason
    host = None if row.host in ("", "n/a", "(null)") else row.host
    restarts = int(row.restarts) if row.restarts.isdigit() else 0
    if state is None:  # a word of a later Slurm: it is not for us to call it an end
        return Observed("running", f"Slurm says {row.state}", host, restarts=restarts)
    if state in ACTIVE:
        state, reason = (
            _waiting(row, state, reason, around) if word == "PENDING" else (state, reason)
        )
        return Observed(
            state, reason, host, restarts=restarts, will_rerun=state == "queued" and restarts > 0
        )
    number = row.status & 0x7F
    # it never ran on a node, or Slurm's own mark (53, 125) is no signal
    if host is None or number > LAST_SIGNAL:
        number, code = 0, None
    else:
        code = 128 + number if number else row.status >> 8
    if reason == "NonZeroExitCode":  # of the wrapper: what it printed is in Slurm's own file
        reason = f"NonZeroExitCode: `logs` shows slurm-{row.id}.txt, where its output is"
    if state != "succeeded":
        killed = f"signal {number}" if number and state != "cancelled" else None
        reason = ", ".join(part for part in (row.state, reason, killed) if part)
    never_ran = host is None and restarts == 0
    return Observed(state, reason, host, exit_code=code, restarts=restarts, never_ran=never_ran)


def _waiting(
    row: QueueLine, state: JobState, reason: str | None, around: Sequence[Node]
) -> tuple[JobState, str | None]:
    """The state of a pending job: queued if time alone starts it, else held until a person acts."""
    for start, cure in CURES.items():
        if row.reason.startswith(start):
            return "held", f"{row.reason}: {cure.format(id=row.id)}"
    if not row.reason.startswith(NO_NODES):
        return state, reason
    here = {node.name: node for node in around if node.partition in row.partition.split(",")}
    out = {name: node.reason for name, node in here.items() if OUT_OF_USE.match(node.state)}
    needed = int(row.nodes) if row.nodes.isdigit() else 1
    if not out:
        return state, reason
    required = row.required.split(",")
    if "[" in row.required:  # "n[1-2],m4"
        required = ask("scontrol", "show", "hostnames", row.required)
    if len(here) - len(out) >= needed and out.keys().isdisjoint(required):
        return state, reason
    drained = ", ".join(f"{name} ({why})" for name, why in sorted(out.items())[:4])
    cure = (
        f"`scontrol update NodeName={min(out)} State=RESUME`, by an administrator, takes a node "
        "back"
    )
    return "held", f"{row.reason}: out of use: {drained}; {cure}"


def nodes() -> list[Node]:
    """Every node, once for each of its partitions. Unreachable."""
    lines = ask("sinfo", "--noheader", "--Node", "--format=%N|%R|%T|%E")
    return [Node(*fields) for line in lines if len(fields := line.split("|", 3)) == 4]


def config() -> dict[str, str]:
    """The cluster's configuration by name, as `scontrol show config` prints it. Unreachable."""
    lines = ask("scontrol", "show", "config")
    pairs = [line.split("=", 1) for line in lines if "=" in line]
    return {key.strip(): value.strip() for key, value in pairs}
