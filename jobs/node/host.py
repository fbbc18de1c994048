"""The machine that a job finds itself on: its scheduler's variables, its processes, its
environments. Standard library.

What the wrapper (jobs/node/wrapper.py) needs to know of Slurm, the toolkit, Ray and Kubernetes is
here and nowhere else.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def job_id() -> str | None:
    """The id of this job at its scheduler, the same at every restart; None without a scheduler."""
    # set by backends whose own variable changes with each restart
    if own := os.environ.get("LATHE_JOB_ID"):
        return own
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return next(
        (os.environ[name] for name in ("SLURM_JOB_ID", "EAI_JOB_ID") if os.environ.get(name)), None
    )


def restarts() -> int:
    """How often the scheduler has started this job before."""
    count = os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("EAI_RUN_INDEX") or "0"
    return int(count) if count.isdigit() else 0


def is_leader() -> bool:
    """Whether this is the first node of the job.

    It is the only one, except where Kubernetes runs a pod for each of several nodes.
    """
    return os.environ.get("LATHE_NODE_RANK", "0") == "0"


def on_each_node(argv: Sequence[str], spec: Mapping[str, Any]) -> list[str]:
    """The launcher `argv`; under Slurm behind srun, which starts one on each node of the job."""
    nodes = spec["job"].get("nodes", 1)
    if nodes > 1 and os.environ.get("SLURM_JOB_ID"):
        srun = [
            "srun",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            "--ntasks-per-node=1",
            "--kill-on-bad-exit=1",
        ]
        return [*srun, "--export=ALL", *argv]
    return list(argv)


def activation_variables(environment: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that activating a virtual or conda environment changes. FileNotFoundError when
    there is none.

    environment: its folder, its bin/activate, or the name of a conda environment. No shell runs:
    PATH, VIRTUAL_ENV and CONDA_PREFIX are set; scripts in conda's activate.d are not run.
    """
    tried = _candidates(environment, inherited)
    for folder in tried:
        if (folder / "bin").is_dir():
            path = f"{folder / 'bin'}{os.pathsep}{inherited.get('PATH', os.defpath)}"
            kind = "CONDA_PREFIX" if (folder / "conda-meta").is_dir() else "VIRTUAL_ENV"
            return {"PATH": path, kind: str(folder)}
    raise FileNotFoundError(
        f"environment {environment!r} to activate: looked at {', '.join(map(str, tried))}. Give "
        "its folder."
    )


def _candidates(environment: str, inherited: Mapping[str, str]) -> list[Path]:
    path = Path(environment).expanduser()
    if path.name == "activate":
        path = path.parent.parent
    if "/" in environment or environment.startswith(("~", ".")):
        return [path]
    homes = [Path(text) for text in inherited.get("CONDA_ENVS_PATH", "").split(os.pathsep) if text]
    if conda := inherited.get("CONDA_EXE") or shutil.which("conda", path=inherited.get("PATH")):
        homes.append(Path(conda).parent.parent / "envs")
    home = Path(inherited.get("HOME", "~")).expanduser()
    homes += [
        home / name / "envs"
        for name in (".conda", "miniconda3", "anaconda3", "miniforge3", "mambaforge")
    ]
    return [folder / environment for folder in homes]


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies, so that no training
    outlives its wrapper (Linux only).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that each can be killed
    (Linux only).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def signal_all(leader: int, number: signal.Signals) -> None:
    """Send a signal to the process group of `leader` and to all its descendants.

    torchrun starts its ranks in sessions of their own, and the deepspeed launcher leaves its ranks
    alone on SIGTERM.
    """
    own = os.getpgrp()
    for pid in (leader, *descendants(leader)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(leader) == leader != own:  # a training with our terminal leads no group
            os.killpg(leader, number)


def kill_descendants() -> None:
    """Kill every process that this one has started, directly or not."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Ids of all living children of `pid`, and theirs, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # the name before ")" may hold anything
            fields = entry.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":  # a dead one that nobody has waited for
                children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    pids: list[int] = []
    pending = list(children.get(pid, []))
    while pending:
        pids.append(pending.pop())
        pending += children.get(pids[-1], [])
    return pids


def oom_kills() -> int:
    """How many processes of this control group the kernel has killed because memory was full.

    0 where the kernel does not say.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        group = Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":", 2)[2].lstrip("/")
        lines = (Path("/sys/fs/cgroup") / group / "memory.events").read_text().split("\n")
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


def facts() -> dict[str, Any]:
    """What this node runs: host, kernel, Python, packages, GPUs and driver."""
    packages: dict[str | None, str | None] = {}
    for package in importlib.metadata.distributions():
        # Only name and version are read: parsing all headers would cost every job 0.3 s, most of it
        # for descriptions.
        files = ("METADATA", "PKG-INFO", "")  # wheels; eggs, as a folder and as a file
        text = next(filter(None, map(package.read_text, files)), "")
        lines = text.partition("\n\n")[0].splitlines()
        headers = dict(
            line.split(": ", 1) for line in lines if line.startswith(("Name: ", "Version: "))
        )
        packages[headers.get("Name")] = headers.get("Version")
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "cpus": os.cpu_count(),
        "gpus": gpus(),
        "packages": {name: packages[name] for name in sorted(packages, key=str)},
    }


def gpus() -> list[str]:
    """One line for each NVIDIA GPU that this process can see: name, memory, driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        process = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return process.stdout.strip().splitlines() if process.returncode == 0 else []
