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
from trainer.models.packed.layout import pack
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
        cfg = self.cfg.loss
        if cfg.chunk_tokens is not None:
            return self._in_chunks(texts, side)
        if self.is_packed:
            size = cfg.query_chunk if side == "query" else cfg.passage_chunk
            return packed(texts, side, size=size)
        return {f"{side}_{name}": tensor for name, tensor in self._padded(texts, side).items()}

    def _padded(self, texts: Sequence[Any], side: Side) -> dict[str, Tensor]:
        ids, mask = pad_right(texts, self.tokens.pad)
        room = (0, self.tokens.width(ids.shape[1], side) - ids.shape[1])
        return {"ids": pad(ids, room, value=self.tokens.pad), "mask": pad(mask, room)}

    def _in_chunks(self, texts: Sequence[Any], side: Side) -> dict[str, Tensor]:
        """Pieces of texts of like length, the longest first, each of at most loss.chunk_tokens
        tokens, pads included. `texts` (texts of a piece,) says which texts of the side they are.
        """
        lengths = np.array([len(text) for text in texts])
        budget = self.cfg.loss.chunk_tokens
        if budget == "auto":  # nothing is chosen yet: as little as there can be
            budget = max(self.tokens.limit("query"), self.tokens.limit("passage"))
        widths = [self.tokens.width(int(length), side) for length in lengths]
        sizes = lengths if self.is_packed else np.array(widths)
        laid_out: dict[str, Tensor] = {}
        for number, places in enumerate(chunks_of(sizes, int(budget or 0), self.is_packed)):
            some = [texts[place] for place in places]
            piece = pack(some, bucketed=True) if self.is_packed else self._padded(some, side)
            piece["texts"] = torch.from_numpy(places)
            laid_out |= {f"{side}_{number}_{name}": tensor for name, tensor in piece.items()}
        return laid_out


def chunks_of(sizes: np.ndarray, budget: int, is_packed: bool) -> list[np.ndarray]:
    """The places of texts of these sizes in chunks of at most `budget` tokens: of streams the sum
    of their sizes, of padded rows their number times the largest. The largest come first; a text
    above the budget goes alone.

    Source: mini_batch_num_tokens of sentence-transformers, which keeps the order of the rows.
    """
    order = np.argsort(-sizes, kind="stable")
    starts, tokens = [0], 0
    for place, size in enumerate(sizes[order].tolist()):
        widest = int(sizes[order[starts[-1]]])
        tokens = tokens + size if is_packed else (place - starts[-1] + 1) * widest
        if tokens > budget and place > starts[-1]:
            starts.append(place)
            tokens = size
    return np.split(order, starts[1:])


def _at(values: Sequence[np.ndarray], choices: Sequence[list[int]]) -> Tensor:
    """The values of the chosen passages of each row, one row after the other."""
    pairs = zip(values, choices, strict=True)
    return torch.from_numpy(np.concatenate([of_row[places] for of_row, places in pairs]))


def texts_of(batch: Batch) -> dict[str, Tensor]:
    """The arguments of the model in a batch."""
    return {name: x for name, x in batch.items() if name.startswith(("query_", "passage_"))}
