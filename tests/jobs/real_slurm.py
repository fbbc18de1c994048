"""A real Slurm for tests: munged, slurmctld and two slurmd as child processes on loopback, up in a
second or two.

    with real_slurm(folder) as cluster:               # SLURM_CONF is set inside the block
        ...                                           # sbatch, squeue, ... and the backend talk to
        it

cluster.conf, cluster.env     slurm.conf, and {"SLURM_CONF": ...} for other processes
cluster.nodes                 ("n1", "n2"): two virtual nodes of 2 CPUs, 4 GiB and 2 (pretended)
                              GPUs each, and 3,600 of a gres `nvme`
partitions                    `low` (the default; requeued when `high` needs the node), `high`, and
                              `off` (down)
cluster.kill_controller()     SIGKILL to slurmctld; cluster.start_controller() starts it again with
                              its saved state
cluster.restart_controller()  both
cluster.has_saved(name)       whether a running job of this name would survive that: the controller
                              saves up to 5 s late
cluster.wait_saved(*names)    return once all of them would
cluster.processes(job_id)     what runs of this job, or of all jobs, by process id
cluster.wait_gone(job_id)     return once nothing of this job runs any more; it fails the test when
                              something does
cluster.start_now(job_id)     let a requeued job start at once instead of some 6 s later
cluster.command(*argv)        what a client prints; it fails the test when the client fails
cluster.logs()                the last lines of every daemon, for the message of a failing test

When the block ends all jobs are cancelled and every process that this module started is stopped, by
its id. A process of a job that lives on all the same is killed, and fails the test. Works as root
and as anybody else; needs munge and slurm-wlm (Debian: apt-get install slurm-wlm munge), no
network.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jobs.node.host import die_with_parent

BINARIES = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "squeue",
    "scontrol",
    "scancel",
    "sinfo",
    "srun",
)
DAEMON_PATH = os.pathsep.join(
    (os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/sbin")
)
NODES = ("n1", "n2")
CPUS, MEMORY_MIB, GPUS = 2, 4096, 2
UP_S, DOWN_S = 120.0, 60.0
NUDGE_S = 6.0  # the controller saves up to 5 s late by itself

# cred_expire: a requeued job otherwise waits 120 s for its old credential to expire; 5 is the least
# that works. MessageTimeout: clients of a dead controller give up after 3 s instead of 9 (some try
# twice). NoCtldInAddrAny, NoInAddrAny: listen on 127.0.0.1 alone. config_overrides: believe the
# nodes' pretended sizes.
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=64
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0,{scheduler}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MessageTimeout=4
KillWait={kill_wait_s}
MinJobAge={min_job_age_s}
MaxArraySize=101
GresTypes=gpu,nvme
{accounting}
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{node_port}-{last_node_port}] CPUs={cpus} \
RealMemory={memory} Gres=gpu:{gpus},nvme:3600
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF
PartitionName=off Nodes=n[1-2] State=DOWN
"""


def missing() -> list[str]:
    """Programs of Slurm and munge that this machine lacks."""
    return [name for name in BINARIES if shutil.which(name, path=DAEMON_PATH) is None]


def need_slurm() -> None:
    """Skip the test where Slurm is not installed; fail it where LATHE_REQUIRE_SLURM=1 says that it
    must be.
    """
    if lacking := missing():
        text = f"this machine has no {', '.join(lacking)}: apt-get install slurm-wlm munge"
        (pytest.fail if os.environ.get("LATHE_REQUIRE_SLURM") == "1" else pytest.skip)(text)


def wait_for(claim: Callable[[], object], *, within_s: float, what: str) -> None:
    """Return once `claim()` is true; AssertionError naming `what` when it is not within the
    time.
    """
    end = time.monotonic() + within_s
    while not claim():
        assert time.monotonic() < end, f"not within {within_s:.0f} s: {what}"
        time.sleep(0.03)


@dataclass
class RealSlurm:
    """A running cluster; see the module's text."""

    folder: Path
    nodes: tuple[str, ...] = NODES
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to talk to this cluster."""
        return {"SLURM_CONF": str(self.conf)}

    def command(self, *argv: str) -> str:
        """What a client prints; AssertionError with the daemons' logs when it fails."""
        done = subprocess.run(
            argv,
            env={**os.environ, **self.env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, f"{argv}: {done.stderr}{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        """The last lines of every daemon."""
        tails = [
            f"\n== {path.name}\n{path.read_text()[-1500:]}"
            for path in sorted(self.folder.glob("*.log"))
        ]
        return "".join(tails)

    def start_controller(self, *, is_first: bool = False) -> None:
        """Start slurmctld; returns when it answers, some seconds before the nodes have reported to
        it again.
        """
        self._start("slurmctld", "-D", *(["-i"] if is_first else []), "-f", str(self.conf))
        self.wait_for(self._is_answering, within_s=UP_S, what="slurmctld answers")

    def kill_controller(self) -> None:
        """SIGKILL; jobs go on, and what was not saved is forgotten."""
        daemon = self.daemons.pop("slurmctld")
        daemon.kill()
        daemon.wait()

    def restart_controller(self) -> None:
        """Kill it and start it again with what it had saved."""
        self.kill_controller()
        self.start_controller()

    def has_saved(self, name: str, *, is_waiting: bool = False) -> bool:
        """Whether the controller's saved state says that a job of this name runs (or: that it still
        waits).

        A job that it lacks is lost with a kill -9; one that it takes for waiting is killed and
        started once more.
        """
        saved = self.folder / "state" / "job_state"
        if not saved.exists():
            return False
        # Slurm 22.05 packs nodes, partition and name one after the other, each behind its length of
        # four bytes.
        nodes = rb"\0{4}" if is_waiting else rb"n[12]\0"
        record = nodes + rb".{4}[a-z]+\0.{4}" + re.escape(name.encode()) + rb"\0"
        return re.search(record, saved.read_bytes(), re.DOTALL) is not None

    def wait_saved(self, *names: str, is_waiting: bool = False) -> None:
        """Return once `has_saved` holds of jobs of these names.

        Slurm 22.05 can lose the wake-up of the thread that saves: it was seen to sleep for more
        than three minutes after two jobs had begun. Each change of a job wakes it, so the jobs get
        a comment, which nobody reads, until their state is saved.
        """

        def are_saved() -> bool:
            if all(self.has_saved(name, is_waiting=is_waiting) for name in names):
                return True
            if time.monotonic() - asked[-1] > NUDGE_S:
                asked.append(time.monotonic())
                for job_id in self.command("squeue", "-h", "-o", "%A").split():
                    self.command("scontrol", "update", f"JobId={job_id}", f"Comment={len(asked)}")
            return False

        asked = [time.monotonic()]
        self.wait_for(are_saved, within_s=UP_S, what=f"the state of {', '.join(names)} is saved")

    def start_now(self, job_id: str) -> None:
        """Let a requeued job start within a second or two, instead of after cred_expire."""
        # A node refuses what was signed in the second in which it killed the job: the job would end
        # with code 1.
        time.sleep(1.1)
        self.command("scontrol", "update", f"JobId={job_id}", "StartTime=now")

    def start(self) -> None:
        """Start all; returns when both nodes are idle."""
        socket_file = self.folder / "munge.sock"
        files = {
            "socket": socket_file,
            "pid-file": self.folder / "munge.pid",
            "log-file": self.folder / "munge.log",
        }
        files |= {"key-file": self.folder / "munge.key", "seed-file": self.folder / "munge.seed"}
        self._start(
            "munged",
            "--foreground",
            "--force",
            *[f"--{name}={path}" for name, path in files.items()],
        )
        self.wait_for(socket_file.exists, within_s=UP_S, what="munged listens")
        for node in self.nodes:
            self._start("slurmd", "-D", "-f", str(self.conf), "-N", node, name=node)
        self.start_controller(is_first=True)
        self.wait_for(self._is_idle, within_s=UP_S, what="both nodes are idle")

    def wait_for(self, claim: Callable[[], object], *, within_s: float, what: str) -> None:
        """As the function of this name, with the daemons' logs in the failure."""
        try:
            wait_for(claim, within_s=within_s, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}{self.logs()}") from None

    def processes(self, job_id: str = "") -> dict[int, str]:
        """Command lines of this job's processes ("": of all jobs), slurmstepd with them, by process
        id.
        """
        alive: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended, or belongs to somebody else
                variables = (folder / "environ").read_bytes().split(b"\0")
                command = (
                    (folder / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
                if f"SLURM_CONF={self.conf}".encode() in variables and _is_of(
                    job_id, variables, command
                ):
                    alive[int(folder.name)] = command
        return alive

    def wait_gone(self, job_id: str = "") -> None:
        """Return once nothing of this job ("": of any job) runs; AssertionError that names what
        still does.
        """
        try:
            wait_for(
                lambda: not self.processes(job_id),
                within_s=DOWN_S,
                what="all processes of its jobs are gone",
            )
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.processes(job_id)}{self.logs()}") from None

    def stop(self) -> None:
        """Cancel all jobs and stop all daemons; what outlives that is killed, and AssertionError
        names it.
        """
        try:
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                self._end_jobs()
            self.wait_gone()
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for name in reversed(list(self.daemons)):
                self._stop(self.daemons.pop(name))

    def _start(self, program: str, *arguments: str, name: str | None = None) -> None:
        path = shutil.which(program, path=DAEMON_PATH)
        assert path is not None, program
        with (self.folder / f"{name or program}.out.log").open("ab") as output:
            daemon = subprocess.Popen(
                [path, *arguments],
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.daemons[name or program] = daemon

    def _end_jobs(self) -> None:
        if self.daemons.get("slurmctld") is None or self.daemons["slurmctld"].poll() is not None:
            # a test killed it; jobs outlive the daemons unless they are cancelled first
            self.start_controller()
        jobs = self.command("squeue", "-h", "-o", "%A").split()
        if jobs:
            self.command("scancel", "--signal=KILL", "--full", *jobs)
            self.command("scancel", *jobs)
        self.wait_for(
            lambda: not self.command("squeue", "-h"), within_s=DOWN_S, what="all jobs have ended"
        )

    @staticmethod
    def _stop(daemon: subprocess.Popen[bytes]) -> None:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(DOWN_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def _is_answering(self) -> bool:
        assert self.daemons["slurmctld"].poll() is None, f"slurmctld ended{self.logs()}"
        asked = ["scontrol", "ping"]
        done = subprocess.run(
            asked, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=30
        )
        return done.returncode == 0 and "is UP" in done.stdout

    def _is_idle(self) -> bool:
        return self.command("sinfo", "-h", "-N", "-p", "low", "-o", "%t").split() == ["idle"] * len(
            self.nodes
        )


def _is_of(job_id: str, variables: list[bytes], command: str) -> bool:
    """Whether a process of the cluster belongs to this job ("": to any), and not to its daemons."""
    if command.startswith("slurmstepd: ["):
        return command.startswith(f"slurmstepd: [{job_id}." if job_id else "slurmstepd: [")
    name = b"SLURM_JOB_ID="
    own = [word.removeprefix(name) for word in variables if word.startswith(name)]
    return bool(own) and job_id in ("", own[0].decode())


def _free_ports(count: int) -> int:
    """The first of `count` neighbouring ports of 127.0.0.1 that nobody listens on."""
    for _ in range(100):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, OverflowError):
            first = 0
            for offset in range(count):
                listener = held.enter_context(socket.socket())
                listener.bind(("127.0.0.1", first + offset if first else 0))
                first = first or listener.getsockname()[1]
            return first
    raise AssertionError(f"no {count} neighbouring free ports")


@contextlib.contextmanager
def real_slurm(
    *, kill_wait_s: int = 3, min_job_age_s: int = 300, scheduler: str = "", accounting: str = ""
) -> Iterator[RealSlurm]:
    """A cluster of two nodes on loopback, with SLURM_CONF set in this process for as long as it
    lives.

    kill_wait_s: between TERM and KILL (30 for tests that save a checkpoint). min_job_age_s: how
    long ended jobs are remembered. scheduler, accounting: further SchedulerParameters, and further
    lines of slurm.conf.
    """
    # short: a path of a socket has at most 108 bytes
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    port = _free_ports(1 + len(NODES))
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    ports = {"ctld_port": port, "node_port": port + 1, "last_node_port": port + len(NODES)}
    values = {**ports, "host": socket.gethostname().split(".")[0], "user": getpass.getuser()}
    values |= {"folder": folder, "scheduler": scheduler, "accounting": accounting}
    values |= {"cpus": CPUS, "memory": MEMORY_MIB, "gpus": GPUS}
    values |= {"kill_wait_s": kill_wait_s, "min_job_age_s": min_job_age_s}
    cluster = RealSlurm(folder)
    cluster.conf.write_text(CONF.format(**values))
    for number in range(GPUS):
        (folder / f"gpu{number}").touch()  # a GPU is a file to Slurm: any file will do
    (folder / "gres.conf").write_text(
        f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n"
        "NodeName=n[1-2] Name=nvme Count=3600\n"
    )
    before = os.environ.get("SLURM_CONF")
    os.environ.update(cluster.env)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        os.environ.pop("SLURM_CONF")
        if before is not None:
            os.environ["SLURM_CONF"] = before
        shutil.rmtree(folder, ignore_errors=True)
