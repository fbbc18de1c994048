"""Makes batches of rows: chooses the passages of each row, and lays texts out for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.data.padding import pad_right
from trainer.protocol.abilities import Side
from trainer.protocol.task import Batch
from trainer.tasks.retriever import selection
from trainer.tasks.retriever.config import Config
from trainer.tasks.retriever.model import packed
from trainer.tasks.retriever.tokens import Tokens, passage_of, words_of


@dataclass(frozen=True)
class Batches:
    """Makes batches of the rows of one experiment."""

    cfg: Config
    tokens: Tokens
    is_packed: bool  # True: texts are streams of real tokens; False: padded rows

    def of_rows(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """A batch of Q queries and P passages. The passages stand query by query, positives first.

        Texts are streams (model.packed), or query_ids, query_mask (Q, L) and passage_ids,
        passage_mask (P, L). Other tensors: counts (Q,), the passages of each query, and targets
        (Q,), how many of them are positives; identities (P,); positive_ids, the identities of all
        positives; positive_counts (Q,); teacher (P,), the scores of a teacher; numbers (Q,), the
        numbers of the rows.
        """
        choices = [selection.choose(row, self.cfg.data, seed=self.cfg.train.seed) for row in rows]
        passages = [
            passage_of(row, index)
            for row, places in zip(rows, choices, strict=True)
            for index in places
        ]
        identities = [words_of(row["identities"]) for row in rows]
        scores = [np.asarray(row["scores"], dtype=np.int32).view(np.float32) for row in rows]
        positives = [
            words[: int(row["num_positives"][0])]
            for row, words in zip(rows, identities, strict=True)
        ]
        return {
            **self.lay_out([row["query"] for row in rows], "query"),
            **self.lay_out(passages, "passage"),
            "counts": torch.tensor([len(places) for places in choices]),
            "targets": torch.tensor(
                [
                    sum(place < int(row["num_positives"][0]) for place in places)
                    for row, places in zip(rows, choices, strict=True)
                ]
            ),
            "identities": _at(identities, choices),
            "positive_ids": torch.from_numpy(np.concatenate(positives)),
            "positive_counts": torch.tensor([len(words) for words in positives]),
            "teacher": _at(scores, choices),
            "numbers": torch.tensor([int(row["item"][0]) for row in rows]),
        }

    def lay_out(self, texts: Sequence[Any], side: Side) -> dict[str, Tensor]:
        """Token ids of some texts as tensors that the model takes."""
        if self.is_packed:
            cfg = self.cfg.loss
            size = cfg.query_chunk if side == "query" else cfg.passage_chunk
            return packed(texts, side, size=size)
        ids, mask = pad_right(texts, self.tokens.pad)
        room = (0, self.tokens.width(ids.shape[1], side) - ids.shape[1])
        ids = pad(ids, room, value=self.tokens.pad)
        return {f"{side}_ids": ids, f"{side}_mask": pad(mask, room)}


def _at(values: Sequence[np.ndarray], choices: Sequence[list[int]]) -> Tensor:
    """The values of the chosen passages of each row, one row after the other."""
    pairs = zip(values, choices, strict=True)
    return torch.from_numpy(np.concatenate([of_row[places] for of_row, places in pairs]))


def texts_of(batch: Batch) -> dict[str, Tensor]:
    """The arguments of the model in a batch."""
    return {name: x for name, x in batch.items() if name.startswith(("query_", "passage_"))}
