"""Rows as the model gets them, decoded into text, with the tokens in the loss marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore
    from trainer.protocol.task import Batch, Task

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
    decode, half = task.decode, _MOST_TOKENS // 2
    segments: dict[str, list[Segment]] = {}
    for name, text in task.describe(batch).items():
        is_real = torch.ones_like(text.ids) if text.is_real is None else text.is_real
        tokens = text.ids[is_real.bool()].tolist()
        marks: list[bool | None] = [None] * len(tokens)
        if text.in_loss is not None:
            marks = text.in_loss[is_real.bool()].tolist()
        segments[name] = []
        start = 0
        # a segment ends where the tokens that follow are no longer in the loss, or are in it again
        for stop in range(1, len(tokens) + 1):
            if stop < len(tokens) and marks[stop] == marks[start]:
                continue
            run = tokens[start:stop]
            content = decode(run) if len(run) <= _MOST_TOKENS else decode(run[:half])
            if len(run) > _MOST_TOKENS:
                content += f" [... {len(run) - 2 * half} tokens ...] {decode(run[-half:])}"
            segments[name].append({"text": content, "in_loss": marks[start]})
            start = stop
    return segments
