"""Rows as the model gets them, decoded into text, with the tokens in the loss marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore
    from trainer.protocol.task import Batch, Task, Text

_PLACES = (0.1, 0.5, 1.0)  # quantiles of the length: a short row, the median, the longest
_MOST_TOKENS = 400  # tokens of a text in the report, half of them from its beginning

Segment = dict[str, Any]  # {"text": ..., "in_loss": ...}
Decode = Callable[[Sequence[int]], str]


def examples(task: Task, store: TokenStore, *, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Three rows, a short one, the median and the longest: {"id", "length", "texts": {name:
    segments}}.

    The texts are those of `task.describe`. "in_loss" of a segment is true or false; None if the
    loss is not over tokens.
    """
    order = np.argsort(store.lengths, kind="stable")
    places = dict.fromkeys(int(order[round(share * (len(order) - 1))]) for share in _PLACES)
    return [
        {
            "id": ids[row] if row < len(ids) else str(row),
            "length": int(store.lengths[row]),
            "texts": texts(task, task.collate([store[row]])),
        }
        for row in places
    ]


def texts(task: Task, batch: Batch) -> dict[str, list[Segment]]:
    """The texts of a batch of one row without padding, as segments by the name of the text."""
    return {name: _segments(text, task.decode) for name, text in task.describe(batch).items()}


def _segments(text: Text, decode: Decode) -> list[Segment]:
    """Runs of tokens that are all in the loss, or all not in it."""
    is_real = (
        torch.ones_like(text.ids, dtype=torch.bool) if text.is_real is None else text.is_real.bool()
    )
    tokens = text.ids[is_real].tolist()
    marks: list[bool | None] = [None] * len(tokens)
    if text.in_loss is not None:
        marks = text.in_loss[is_real].tolist()
    segments: list[Segment] = []
    start = 0
    for stop in range(1, len(tokens) + 1):
        if stop < len(tokens) and marks[stop] == marks[start]:
            continue
        run, half = tokens[start:stop], _MOST_TOKENS // 2
        if len(run) <= _MOST_TOKENS:
            content = decode(run)
        else:
            num_hidden = len(run) - 2 * half
            content = f"{decode(run[:half])} [... {num_hidden} tokens ...] {decode(run[-half:])}"
        segments.append({"text": content, "in_loss": marks[start]})
        start = stop
    return segments
