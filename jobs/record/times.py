"""Times as records and small files have them: UTC, ISO 8601. Standard library only."""

from __future__ import annotations

import math
import os
import time
from datetime import datetime, timezone
from pathlib import Path


def now() -> str:
    """The time now in UTC, ISO 8601 with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def seconds_since(at: str | None) -> float:
    """Seconds from an ISO time until now; infinite for None or what is no time."""
    try:
        return (datetime.now(timezone.utc) - datetime.fromisoformat(at or "")).total_seconds()
    except (ValueError, TypeError):
        return float("inf")


CLOCKS_S = 900.0  # how far apart the clocks of two nodes may be


def age_of(path: Path, at: str | None) -> float:
    """Seconds since a file was written that says `at`, by the clock of its disk, since the writer's
    may be ahead or behind. A date that is older than any difference between two clocks counts
    instead: the file is then a copy. Infinite for what is no time.
    """
    by_date_s, by_disk_s = seconds_since(at), seconds_since_change(path)
    if math.isinf(by_disk_s) or by_date_s > by_disk_s + CLOCKS_S:
        return max(by_date_s, 0.0)
    return max(by_disk_s, 0.0)


def seconds_since_change(path: Path) -> float:
    """Seconds since a file was written, by the clock of its disk; infinite when it is absent."""
    try:
        return time.time() - os.stat(path).st_mtime
    except OSError:
        return float("inf")
