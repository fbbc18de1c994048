"""How often each token occurs in the texts of a split, before any limit cuts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from trainer.protocol.abilities import Uncut

_SHOWN = 20  # the most frequent tokens
Decode = Callable[[Sequence[int]], str]


class Frequencies:
    """Counts the tokens of rows by field, then reports the most frequent ones."""

    def __init__(self) -> None:
        self._counts: dict[str, np.ndarray] = {}  # by field, (largest id + 1,) int64

    def add(self, fields: Mapping[str, Uncut]) -> None:
        """Count the tokens of one row."""
        for name, uncut in fields.items():
            counts = (np.bincount(np.asarray(ids, dtype=np.int64)) for ids in uncut.texts)
            self._counts[name] = _sum(self._counts.get(name), counts)

    def report(self, decode: Decode) -> dict[str, dict[str, Any]]:
        """By field: how many tokens there are, how many different ones, the share of these that
        occur once, and the most frequent as [text, count, share of all].
        """
        report: dict[str, dict[str, Any]] = {}
        for name, counts in self._counts.items():
            total, different = int(counts.sum()), int(np.count_nonzero(counts))
            if not different:
                continue
            order = np.argsort(-counts, kind="stable")[:_SHOWN]
            frequent = [(decode([int(one)]), int(counts[one])) for one in order if counts[one]]
            report[name] = {
                "tokens": total,
                "different": different,
                "occur_once": int(np.count_nonzero(counts == 1)) / different,
                "frequent": [[text, count, count / total] for text, count in frequent],
            }
        return report


def _sum(one: np.ndarray | None, others: Iterable[np.ndarray]) -> np.ndarray:
    """The sum of counts of different lengths."""
    total = np.zeros(0, dtype=np.int64) if one is None else one
    for other in others:
        if len(other) > len(total):
            total = np.concatenate([total, np.zeros(len(other) - len(total), dtype=np.int64)])
        total[: len(other)] += other
    return total
