"""Times as records and small files have them: UTC, ISO 8601. Standard library only."""

from __future__ import annotations

from datetime import datetime, timezone


def now() -> str:
    """The time now in UTC, ISO 8601 with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def seconds_since(at: str | None) -> float:
    """Seconds from an ISO time until now; infinite for None or what is no time."""
    try:
        return (datetime.now(timezone.utc) - datetime.fromisoformat(at or "")).total_seconds()
    except (ValueError, TypeError):
        return float("inf")
