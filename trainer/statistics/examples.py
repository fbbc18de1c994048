"""Rows as the model gets them, turned back into text, with what the loss is over marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from trainer.data.store import TokenStore
from trainer.losses import IGNORED
from trainer.task import Batch, Task

_PLACES = (0.1, 0.5, 1.0)  # of the rows by length: a short one, the median, the longest
_MOST_TOKENS = 400  # shown of a text, half of them from its beginning

Segment = dict[str, Any]  # {"text": ..., "in_loss": ...}


def examples(
    task: Task, store: TokenStore, *, ids: Sequence[str], decode: Callable[[Any], str]
) -> list[dict[str, Any]]:
    """Three rows, a short one, the median and the longest: {"id", "length", "texts": {tensor: segments}}.

    Every tensor of token ids in a collated batch is a text. A segment says whether it is in the loss; None where the
    batch has no labels for tokens.
    """
    order = np.argsort(store.lengths, kind="stable")
    places = dict.fromkeys(int(order[round(share * (len(order) - 1))]) for share in _PLACES)
    return [
        {
            "id": ids[row] if row < len(ids) else str(row),
            "length": int(store.lengths[row]),
            "texts": texts(task.collate([store[row]]), decode),
        }
        for row in places
    ]


def texts(batch: Batch, decode: Callable[[Any], str]) -> dict[str, list[Segment]]:
    """The token ids in a batch of one row, as segments of text by the name of their tensor."""
    labels = batch.get("labels")
    found: dict[str, list[Segment]] = {}
    is_shown = False
    for name, ids in batch.items():
        if not _holds_tokens(name, ids):
            continue
        is_real = _mask_of(name, ids, batch)
        in_loss = labels != IGNORED if labels is not None and labels.shape == ids.shape else None
        is_shown |= in_loss is not None
        found[name] = _segments(ids[is_real], None if in_loss is None else in_loss[is_real], decode, labels is not None)
    if labels is not None and not is_shown:
        found["labels"] = _segments(labels[labels != IGNORED], labels[labels != IGNORED] >= 0, decode, True)
    return found


def _holds_tokens(name: str, ids: Tensor) -> bool:
    return not ids.is_floating_point() and (name == "tokens" or name.endswith("input_ids"))


def _mask_of(name: str, ids: Tensor, batch: Batch) -> Tensor:
    mask = batch.get(name.replace("input_ids", "attention_mask")) if name.endswith("input_ids") else None
    return ids == ids if mask is None or mask.shape != ids.shape else mask.bool()


def _segments(ids: Tensor, in_loss: Tensor | None, decode: Callable[[Any], str], has_labels: bool) -> list[Segment]:
    """Runs of tokens that are all in the loss, or all not."""
    tokens = ids.flatten().tolist()
    marks: list[bool | None] = (
        [False if has_labels else None] * len(tokens) if in_loss is None else in_loss.flatten().tolist()
    )
    segments: list[Segment] = []
    start = 0
    for stop in range(1, len(tokens) + 1):
        if stop == len(tokens) or marks[stop] != marks[start]:
            segments.append({"text": _shortened(tokens[start:stop], decode), "in_loss": marks[start]})
            start = stop
    return segments


def _shortened(tokens: list[int], decode: Callable[[Any], str]) -> str:
    if len(tokens) <= _MOST_TOKENS:
        return decode(tokens)
    half = _MOST_TOKENS // 2
    return f"{decode(tokens[:half])} [... {len(tokens) - 2 * half} tokens ...] {decode(tokens[-half:])}"
