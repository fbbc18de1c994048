"""What becomes of the rows of an epoch whose steps are arranged, for the log and `stats`."""

from __future__ import annotations

import math
from typing import Any

from trainer.data.arranged.arrangement import Arrangement, arranged
from trainer.data.arranged.pool import Pools


def facts(epochs: Pools, by: Arrangement) -> dict[str, Any]:
    """rows of the first epoch; left_out, how many of them no step could take; repeated, how many
    stand twice for that; sharing, how many share a query or a positive with another row; topics;
    and mixed, how many stand in steps of several topics.
    """
    seen, counts = set[Any](), {"rows": 0, "left_out": 0, "mixed": 0}
    for step in range(max(1, math.floor(epochs.steps))):
        pool, _ = epochs.pool(step)
        if pool in seen:
            continue
        seen.add(pool)
        of_pool = arranged(epochs, pool, by)
        counts["rows"] += of_pool.rows_SB.size
        counts["left_out"] += of_pool.left_out
        counts["mixed"] += of_pool.mixed
    shared = None if by.shared is None else by.shared.num_rows
    topics = None if by.topics_N is None else int(by.topics_N.max()) + 1
    return {**counts, "sharing": shared, "topics": topics}


def line(told: dict[str, Any]) -> str:
    """The same as a sentence."""
    parts = [f"steps are made of {told['rows']:,} rows of an epoch"]
    if told["sharing"] is not None:
        parts.append(
            f"{told['sharing']:,} of all rows share a query or a positive with another one: "
            f"{told['left_out']:,} could not be placed, so that as many others stand twice"
        )
    if told["topics"] is not None:
        parts.append(
            f"{told['topics']:,} topics: {told['mixed']:,} rows fill no step of their own "
            "topic, and stand in steps of several topics"
        )
    return f"data.batches: {'; '.join(parts)}"
