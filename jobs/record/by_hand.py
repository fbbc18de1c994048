"""Whether a training that no scheduler knows runs now, read from its status.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from jobs.job_state import JobState
from jobs.record.events import HEARTBEAT_LOST_S
from jobs.record.paths import RunFolder
from jobs.record.times import seconds_since
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
    status = read_json(folder.status) or {}
    if status.get("state") != "running":
        return None
    process = _process(status)
    age_s = seconds_since(status.get("updated_at"))
    where = f"started by hand on {status.get('host')}" if not was_sent else status.get("host")
    if life(process) == "alive":
        return f"its training runs, {where}: process {process['pid']}. Wait for it, or stop it"
    if was_sent or life(process) != "unseen" or age_s > HEARTBEAT_LOST_S:
        return None
    return f"its training runs, {where}: it gave a sign of life {age_s:.0f} s ago"


def _process(status: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of the training's process; {} when status.json has none."""
    process = status.get("process")
    return cast("dict[str, Any]", process) if isinstance(process, dict) else {}
