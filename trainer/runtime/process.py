"""Names a process so that other processes can find out later whether it is still alive.

Standard library only; Linux.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

Life = Literal["alive", "gone", "restarted", "unseen"]
STUCK_S = 60.0  # how long torchrun may take to notice that one of its ranks has ended
PARENT = "LATHE_PARENT"  # facts of a process that replaces this one when it dies (--survive)


def facts() -> dict[str, Any]:
    """The facts of this process that `life` needs: "pid", "birth", "host", "namespace".

    Without /proc (not on Linux) birth and namespace are None, and `life` cannot tell. A process
    that is replaced when it dies (--survive) has the facts of its parent.
    """
    if PARENT in os.environ:
        return json.loads(os.environ[PARENT])
    own: dict[str, Any] = {"pid": os.getpid(), "birth": None, "host": socket.gethostname()}
    own["namespace"] = None
    with suppress(OSError):
        own |= {"birth": birth(os.getpid()), "namespace": namespace()}
    return own


def life(process: Mapping[str, Any]) -> Life:
    """Whether the process with these `facts` is alive; "unseen": this process cannot tell.

    restarted: the machine has been restarted since.
    """
    if process.get("host") != socket.gethostname() or not process.get("birth"):
        return "unseen"
    if str(process["birth"]).partition(":")[0] != _boot():
        return "restarted"
    if process.get("namespace") != namespace():
        return "unseen"
    return "alive" if birth(process["pid"]) == process["birth"] else "gone"


def birth(pid: int) -> str | None:
    """When a process started, in clock ticks since boot, with the id of the boot; None when it is
    not alive.

    Together with the pid (and its namespace) it identifies a process for ever; a zombie is not
    alive.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else f"{_boot()}:{fields[19]}"


def namespace() -> str:
    """The pid namespace of this process: a pid has a meaning only inside it."""
    return os.readlink("/proc/self/ns/pid")


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def end_launcher_if_stuck(stuck_s: float = STUCK_S) -> None:
    """Start a process that kills torchrun if it still runs `stuck_s` after its child, this rank.

    torchrun asks the store of the first machine every tenth of a second. If that machine is gone,
    torch 2.13 waits a minute for each of several answers, and notices neither the end of its child
    nor SIGTERM meanwhile. A torchrun that will restart its ranks is not killed.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    restarts, most = (
        int(os.environ.get(f"TORCHELASTIC_{name}", "0"))
        for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    rank, launcher = os.getpid(), os.getppid()
    names = [rank, birth(rank), launcher, birth(launcher), restarts >= most, stuck_s]
    code = "import sys; sys.path.insert(0, {!r}); from {} import _end_if_stuck; _end_if_stuck(*{})"
    root = str(Path(__file__).parents[2])
    subprocess.Popen(
        [sys.executable, "-S", "-c", code.format(root, __name__, names)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end_if_stuck(
    rank: int, rank_birth: str, launcher: int, launcher_birth: str, is_last: bool, stuck_s: float
) -> None:
    while birth(rank) == rank_birth:
        time.sleep(0.2)
    until = time.monotonic() + stuck_s
    while birth(launcher) == launcher_birth:
        has_seen_its_end = not Path(f"/proc/{rank}").exists()  # until then it is a zombie
        if has_seen_its_end and not is_last:
            return
        if time.monotonic() > until:
            os.kill(launcher, signal.SIGKILL)
            return
        time.sleep(0.2)
