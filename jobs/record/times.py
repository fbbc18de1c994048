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


def age_of(path: Path, at: str | None) -> float:
    """Seconds since a file was written that says `at`: by that date or by the file's own time, of
    which the older counts, for the writer's clock may be ahead. Infinite for what is no time.
    """
    by_disk_s = seconds_since_change(path)
    return max(seconds_since(at), by_disk_s if math.isfinite(by_disk_s) else 0.0, 0.0)


def seconds_since_change(path: Path) -> float:
    """Seconds since a file was written, by the clock of its disk; infinite when it is absent."""
    try:
        return time.time() - os.stat(path).st_mtime
    except OSError:
        return float("inf")
