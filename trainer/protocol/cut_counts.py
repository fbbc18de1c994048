"""How many texts limits cut, and how many of their tokens, added up over rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.protocol.task import Cut

CutCounts = dict[str, dict[str, Any]]


def add(counts: CutCounts, cuts: Mapping[str, Cut]) -> None:
    """Add one row to the counts: by what its texts are called, setting, limit, texts, texts_cut,
    tokens and tokens_cut.
    """
    for name, cut in cuts.items():
        start = {"setting": cut.setting, "limit": cut.limit}
        start |= dict.fromkeys(("texts", "texts_cut", "tokens", "tokens_cut"), 0)
        of_name = counts.setdefault(name, start)
        of_name["texts"] += len(cut.lengths)
        of_name["texts_cut"] += sum(lost > 0 for lost in cut.lost)
        of_name["tokens"] += sum(cut.lengths)
        of_name["tokens_cut"] += sum(cut.lost)
