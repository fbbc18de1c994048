"""The recoveries of a run with `--survive`: a line of survival.jsonl for each, and the summary that
status.json and the pages of runs show. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer.files.atomic import read_small

FILE = "survival.jsonl"  # of a run folder
KEY = "recoveries"  # of status.json


def add(folder: Path, event: Mapping[str, Any]) -> None:
    """Write down one recovery. OSError when the disk refuses."""
    with Path(folder, FILE).open("a") as file:
        file.write(json.dumps(event) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """Every recovery of a run, oldest first; a line that is torn is none."""
    try:
        lines = read_small(Path(folder, FILE)).decode(errors="replace").splitlines()
    except OSError:
        return []
    events: list[dict[str, Any]] = []
    for line in lines:
        try:
            event = json.loads(line)
            is_whole = bool(recovery_sentence(event) and datetime.fromisoformat(event["at"]))
            is_whole &= isinstance(event["steps_lost"], int)
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        events += [event] if is_whole else []
    return events


def recovery_sentence(event: Mapping[str, Any]) -> str:
    """One recovery as a sentence."""
    lost = ", ".join(f"rank {one['rank']} {one['why']}" for one in event["lost"])
    return (
        f"{lost}, at step {event['reached']}: on from step {event['from']} ({event['source']}) "
        f"with {event['world']} rank(s) after {event['recovery_s']:.1f} s"
    )


def summary(folder: Path) -> dict[str, Any] | None:
    """How many recoveries, steps done again and seconds, how many ranks go on, and the last one
    told; None for a run that has lost no rank.
    """
    events = read(folder)
    if not events:
        return None
    return {
        "count": len(events),
        "steps_lost": sum(event["steps_lost"] for event in events),
        "seconds": round(math.fsum(event["recovery_s"] for event in events), 3),
        "ranks": events[-1]["world"],
        "last": recovery_sentence(events[-1]),
    }
