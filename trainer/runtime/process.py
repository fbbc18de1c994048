"""Which process something belongs to, so that others can tell later whether it lives.

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
STUCK_S = 60.0  # how long torchrun may take to notice that a rank of its own has ended
PARENT = "LATHE_PARENT"  # facts of a process that replaces this one when it dies (--survive)


def facts() -> dict[str, Any]:
    """This process: "pid", "birth", "host", "namespace", for `life` to judge, here or elsewhere.

    Without /proc (no Linux) birth and namespace are None: then nobody can tell whether it lives.
    Of one that is replaced when it dies, its parent's.
    """
    if PARENT in os.environ:
        return json.loads(os.environ[PARENT])
    own: dict[str, Any] = {"pid": os.getpid(), "birth": None, "host": socket.gethostname()}
    own["namespace"] = None
    with suppress(OSError):
        own |= {"birth": birth(os.getpid()), "namespace": namespace()}
    return own


def life(process: Mapping[str, Any]) -> Life:
    """What can be said, from here, of a process by its `facts`; "unseen": nothing at all.

    restarted: its machine was started anew since.
    """
    if process.get("host") != socket.gethostname() or not process.get("birth"):
        return "unseen"
    if str(process["birth"]).partition(":")[0] != _boot():
        return "restarted"
    if process.get("namespace") != namespace():
        return "unseen"
    return "alive" if birth(process["pid"]) == process["birth"] else "gone"


def birth(pid: int) -> str | None:
    """When a process began, in clock ticks since boot, with the boot's id; None when it does not
    live.

    Together with the pid (and its namespace) it names one process for ever; a zombie counts as
    dead.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else f"{_boot()}:{fields[19]}"


def namespace() -> str:
    """The pid namespace of this process: a pid means something within it only."""
    return os.readlink("/proc/self/ns/pid")


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def end_launcher_if_stuck(stuck_s: float = STUCK_S) -> None:
    """Have torchrun killed if it is still there `stuck_s` after the end of this rank, its child.

    It asks the store of the first machine every tenth of a second; where that is gone, torch 2.13
    waits a minute for each of several answers, and sees neither its child's end nor SIGTERM
    meanwhile. One that starts its ranks again is left alone.
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
