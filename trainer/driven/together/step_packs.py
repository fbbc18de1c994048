"""The packs of one step of a group of ordinary runs: a function of the lengths of its rows alone.

Step n of every experiment that has a step n is computed with step n of the others. A pack holds
rows of whichever experiments come next, in the order of the group. Where an experiment has done the
step already, or has failed, nobody's rows stand in the places of its own: a row and its part of
the gradient have the same bits, whenever the step is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.order import Sharding, Sizes, window_rows
from trainer.driven.together.rounds import Pack, Slot
from trainer.models.losses import IGNORED

if TYPE_CHECKING:
    from trainer.protocol.task import Batch, Row


@dataclass(frozen=True)
class StepRows:
    """How long the rows of one experiment are. seed: of their order, None: as they are given; end:
    the number of its steps.
    """

    sizes: Sizes
    sharding: Sharding
    seed: int | None
    end: int

    def lengths(self, step: int) -> list[int]:
        """The tokens of this rank's rows of a step, the first of which is 0; [] after the last."""
        if step >= self.end:
            return []
        how: Any = {"lengths": self.sizes, "sharding": self.sharding, "seed": self.seed}
        numbers = np.concatenate(window_rows(step, **how))
        return self.sizes.lengths_N[numbers].tolist()


def packs_of(lengths: Mapping[str, Sequence[int]], *, most_tokens: int) -> list[Pack]:
    """The packs of a step. lengths: of the rows of each experiment, by name; most_tokens: of a
    pack; a longer row goes alone.
    """
    packs: list[Pack] = []
    held = 0
    for name, of_rows in lengths.items():
        for number, tokens in enumerate(of_rows):
            held += tokens
            if not packs or held > most_tokens:
                packs.append([])
                held = tokens
            packs[-1].append(Slot(name, number, tokens))
    return packs


def rows_of(batches: Sequence[Batch]) -> list[Row]:
    """The rows of collated micro-batches, as CausalLM's task collates them: "ids", and "scored", 1
    where a token has a label.
    """
    return [row for batch in batches for row in _rows(batch)]


def filler_row(tokens: int) -> Row:
    """A row that is only as long as another one: no token of it has a label."""
    return {"ids": np.zeros(tokens, np.int64), "scored": np.zeros(tokens, np.int64)}


def _rows(batch: Batch) -> list[Row]:
    if "starts" in batch:
        sizes = batch["starts"].diff().tolist()
        ids, labels = batch["tokens"].split(sizes), batch["labels"].split(sizes)
    else:
        sizes = batch["attention_mask"].sum(1).tolist()
        ids = [row[:size] for row, size in zip(batch["input_ids"], sizes, strict=True)]
        labels = [row[:size] for row, size in zip(batch["labels"], sizes, strict=True)]
    return [
        {"ids": one.numpy(), "scored": (of != IGNORED).long().numpy()}
        for one, of in zip(ids, labels, strict=True)
    ]
