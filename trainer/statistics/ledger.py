"""The truncation ledger: how much the limits cut off the rows of a split, and which limit would
cut off little.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.errors import DataError
from trainer.metrics.mergeable import normalise

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore
    from trainer.protocol.abilities import Uncut

LITTLE = 0.01  # the share that a recommended limit loses less than
_EXAMPLES = 5  # rows that lose most, by id

Decode = Callable[[Sequence[int]], str]


@dataclass
class _Losses:
    """The tokens and answers that one field lost, over the rows so far."""

    first: Uncut
    lengths: list[int] = field(default_factory=list)  # of every text, before the cut
    labels_from: list[int] = field(default_factory=list)
    rows_cut: int = 0
    worst: list[tuple[int, str]] = field(default_factory=list)  # a heap of (tokens lost, id)
    answers: int = 0  # rows whose texts before the cut hold an answer
    # for each of these rows that loses its answers: the least limit that would keep one
    needed: list[int] = field(default_factory=list)


class Ledger:
    """Counts rows, then reports how much the limits cut off.

    decode: turns token ids into text, in which answers are searched.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._fields: dict[str, _Losses] = {}

    def add(
        self, identity: str, fields: Mapping[str, Uncut], *, answers: Sequence[str] = ()
    ) -> None:
        """Count one row, from its fields before the cut."""
        for name, uncut in fields.items():
            losses = self._fields.setdefault(name, _Losses(uncut))
            lengths = [len(text) for text in uncut.texts]
            losses.lengths += lengths
            losses.labels_from += [
                length if uncut.labels_from is None else uncut.labels_from for length in lengths
            ]
            lost = (
                sum(max(0, length - uncut.limit) for length in lengths)
                if uncut.limit is not None
                else 0
            )
            if lost:
                losses.rows_cut += 1
                heapq.heappush(losses.worst, (lost, identity))
                losses.worst = heapq.nlargest(_EXAMPLES, losses.worst)
            if uncut.holds_answers and answers:
                self._look_for(answers, uncut, losses, is_cut=bool(lost))

    def _look_for(
        self, answers: Sequence[str], uncut: Uncut, losses: _Losses, *, is_cut: bool
    ) -> None:
        texts = [text for answer in answers if (text := normalise(answer))]

        def holds(limit: int | None) -> bool:
            return any(_holds(self._decode(text[:limit]), texts) for text in uncut.texts)

        if not holds(None):
            return
        losses.answers += 1
        if is_cut and not holds(uncut.limit):
            losses.needed.append(
                _least(holds, above=uncut.limit or 0, most=max(map(len, uncut.texts)))
            )

    def lengths(self) -> dict[str, np.ndarray]:
        """By field, the (texts,) lengths of all texts before the cut."""
        return {
            name: np.asarray(losses.lengths, dtype=np.int64)
            for name, losses in self._fields.items()
        }

    def limits(self) -> dict[str, int | None]:
        return {name: losses.first.limit for name, losses in self._fields.items()}

    def report(self) -> dict[str, dict[str, Any]]:
        """By field: the tokens, labels and answers that the limit loses, their totals, and the
        limits that would lose less than 1 %.

        None: the field has no labels, or no answers.
        """
        return {name: _report(losses) for name, losses in self._fields.items()}


def _report(losses: _Losses) -> dict[str, Any]:
    lengths, starts = np.asarray(losses.lengths), np.asarray(losses.labels_from)
    limit = losses.first.limit
    has_labels = losses.first.labels_from is not None
    report: dict[str, Any] = {
        "setting": losses.first.setting,
        "limit": limit,
        "rows_cut": losses.rows_cut,
        "tokens": {**_lost(lengths, np.zeros_like(lengths), limit)},
        "labels": _lost(lengths, starts, limit) if has_labels else None,
        "answers": None,
        "worst_rows": [{"id": identity, "tokens_lost": lost} for lost, identity in losses.worst],
    }
    if losses.first.holds_answers and losses.answers:
        short, most = sorted(losses.needed, reverse=True), LITTLE * losses.answers
        too_many = [needed for count, needed in enumerate(short, start=1) if count < most]
        enough = short[len(too_many)] if len(too_many) < len(short) else limit
        report["answers"] = {
            "lost": len(short),
            "of": losses.answers,
            "share": len(short) / losses.answers,
            "limit_below_1_percent": enough,
        }
    return report


def _lost(lengths: np.ndarray, starts: np.ndarray, limit: int | None) -> dict[str, Any]:
    """How many of the tokens after `starts` the limit cuts off, and the least limit that loses
    less than 1 %.
    """

    def lost(at: int) -> int:
        return int(np.maximum(0, lengths - np.maximum(at, starts)).sum())

    total = lost(0)
    now = 0 if limit is None else lost(limit)
    enough = _least(
        lambda at: lost(at) < LITTLE * total or lost(at) == 0,
        above=0,
        most=int(lengths.max(initial=1)),
    )
    return {"lost": now, "of": total, "share": now / max(1, total), "limit_below_1_percent": enough}


def _least(is_enough: Callable[[int], bool], *, above: int, most: int) -> int:
    """The least number in above + 1 .. most that is enough; assumes that `most` is enough."""
    low, high = above, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _holds(text: str, answers: Sequence[str]) -> bool:
    words = f" {normalise(text)} "
    return any(f" {answer} " in words for answer in answers)


def refuse_lost_labels(store: TokenStore, *, most: float) -> None:
    """DataError when limits cut off more than `most` (a share) of the label tokens of a split."""
    lost, of = store.lost_labels()
    if of == 0 or lost <= most * of:
        return
    split = store.meta["split"]
    raise DataError(
        f"the limits of this experiment cut {lost:,} of the {of:,} label tokens off the {split} "
        f"split ({lost / of:.1%}), more than train.max_lost_labels={most}: it would learn texts "
        "without their ends.\n"
        "`python -m trainer stats` names the rows, and the limit that loses less than 1 %. Raise "
        "the limit, or train.max_lost_labels."
    )
