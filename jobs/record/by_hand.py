"""Whether a training that no scheduler knows runs now, read from its status.json."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from jobs.job_state import JobState
from jobs.record.events import HEARTBEAT_LOST_S
from jobs.record.paths import RunFolder
from jobs.record.times import age_of
from trainer.files.atomic import read_json
from trainer.runtime.process import life


def still_running(status: Mapping[str, Any], age_s: float) -> tuple[JobState, str | None]:
    """The state of a training whose status.json says "running", and the reason. age_s: the age of
    that file.

    On its own machine its process is looked up. Elsewhere the reason names the file's age.
    """
    process = _process(status)
    name = f"its process, {process.get('pid')} on {process.get('host')},"
    silence = (
        f"no sign of life for {age_s / 60:.0f} min"
        if math.isfinite(age_s)
        else "never gave a sign of life"
    )
    process_life = life(process)
    if process_life == "gone":
        return "lost", f"{name} is gone, and it left no outcome. Run the same command again"
    if process_life == "restarted":
        return "lost", f"{process['host']} was started anew since. Run the same command again"
    if age_s <= HEARTBEAT_LOST_S:
        return "running", None
    return "running", f"{name} lives; {silence}" if process_life == "alive" else silence


def training_now(folder: RunFolder, *, was_sent: bool) -> str | None:
    """A sentence with the evidence that a training of this experiment runs now; None without any.

    was_sent: it was submitted, and its scheduler and wrapper say that it has ended. Then only a
    process that can be seen counts, because a job that was killed leaves a recent status.json too.
    """
    holder = _holder_of(folder.path.with_name(f".{folder.path.name}.lock"))
    if holder is not None:  # also where its folder was moved away: the lock stands beside it
        return f"its training runs here: process {holder}. Wait for it, or stop it"
    status = read_json(folder.status) or {}
    if status.get("state") != "running":
        return None
    process = _process(status)
    age_s = age_of(folder.status, status.get("updated_at"))
    where = f"started by hand on {status.get('host')}" if not was_sent else status.get("host")
    if life(process) == "alive":
        return f"its training runs, {where}: process {process['pid']}. Wait for it, or stop it"
    if was_sent or life(process) != "unseen" or age_s > HEARTBEAT_LOST_S:
        return None
    return f"its training runs, {where}: it gave a sign of life {age_s:.0f} s ago"


def _holder_of(lock: Path) -> int | None:
    """The process of this machine that has locked a file (flock); None when there is none, or it
    cannot be told. The lock is only looked at: to take it would keep a training out that starts.
    """
    try:
        file = lock.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:  # "1: FLOCK  ADVISORY  WRITE 4711 08:01:123456 0 EOF"
        words = line.split()
        is_of_file = words[1] == "FLOCK" and words[5].endswith(f":{file.st_ino}")
        if is_of_file and _has_open(int(words[4]), file):
            return int(words[4])
    return None


def _has_open(pid: int, file: os.stat_result) -> bool:
    """Whether a process has a file open; True too where nobody may see that."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as descriptors:
            for descriptor in descriptors:
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(descriptor.path), file):
                        return True
    except PermissionError:
        return True
    except OSError:  # it has just ended
        return False
    return False


def _process(status: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of the training's process; {} when status.json has none."""
    process = status.get("process")
    return cast("dict[str, Any]", process) if isinstance(process, dict) else {}
