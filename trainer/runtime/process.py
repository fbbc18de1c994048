"""Which process something belongs to, so that others can tell later whether it lives.

Standard library only; Linux.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

Life = Literal["alive", "gone", "restarted", "unseen"]
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
