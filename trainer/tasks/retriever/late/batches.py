"""Lays out texts for the model of late interaction: as streams or padded rows, with the places of
the tokens that have a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.data.padding import pad_right
from trainer.models.packed.layout import pack
from trainer.protocol.abilities import Side
from trainer.protocol.task import Batch, Text
from trainer.tasks.retriever.batches import Batches
from trainer.tasks.retriever.late.vector_tokens import VectorTokens
from trainer.tasks.retriever.model import pieces_of


@dataclass(frozen=True)
class LateBatches(Batches):
    """Makes batches of the rows of one experiment."""

    vectors: VectorTokens

    def lay_out(self, texts: Sequence[Any], side: Side) -> dict[str, Tensor]:
        """Token ids of some texts in pieces, which the model encodes one after the other: the name
        of a tensor begins with the side and the number of its piece. Besides what a body reads:

        - kept (K,): places of the tokens with a vector, in the stream or the flattened rows.
        - lengths (N,): how many each text has of them.
        - seen (N, L): 1 where tokens attend to a token, if that is not where rows have one.
        """
        cfg = self.cfg.loss
        size = (cfg.query_chunk if side == "query" else cfg.passage_chunk) or len(texts)
        pieces = [texts[at : at + size] for at in range(0, len(texts), size)]
        return {
            f"{side}_{number}_{name}": tensor
            for number, piece in enumerate(pieces)
            for name, tensor in self._piece(piece, side).items()
        }

    def _piece(self, texts: Sequence[Any], side: Side) -> dict[str, Tensor]:
        own = [[int(number) for number in text] for text in texts]
        rows = [self.vectors.expanded(text) for text in own] if side == "query" else own
        # no token attends to a mask token of the expansion unless the experiment says so
        is_hidden = rows != own and not self.cfg.late.attend
        if self.is_packed and not is_hidden:
            piece = pack(rows, bucketed=True)
            starts = piece["starts"].tolist()
        else:
            ids, mask = pad_right(rows, self.tokens.pad)
            piece = {"ids": ids, "mask": mask}
            if is_hidden:
                own_lengths = torch.tensor([[len(text)] for text in own])
                piece["seen"] = mask * (torch.arange(ids.shape[1]) < own_lengths)
            starts = [row * ids.shape[1] for row in range(len(rows))]
        places = [self.vectors.places(row, side) for row in rows]
        flat = [start + at for start, of_row in zip(starts, places, strict=False) for at in of_row]
        lengths = torch.tensor([len(of_row) for of_row in places])
        return {**piece, "kept": torch.tensor(flat), "lengths": lengths}


def texts_by_name(batch: Batch) -> dict[str, Text]:
    """The queries of a batch with their mask tokens, and its passages, one by one."""
    found: dict[str, Text] = {}
    sides: tuple[Side, Side] = ("query", "passage")
    for side in sides:
        texts = [text for piece in pieces_of(batch, side) for text in _texts(piece)]
        found |= {f"{side} {number}": text for number, text in enumerate(texts, start=1)}
    return found


def _texts(piece: dict[str, Tensor]) -> list[Text]:
    if "tokens" in piece:
        return [Text(ids) for ids in piece["tokens"].split(piece["starts"].diff().tolist())]
    return [Text(ids, mask) for ids, mask in zip(piece["ids"], piece["mask"], strict=True)]
