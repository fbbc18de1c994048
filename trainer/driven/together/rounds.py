"""Which rows of which runs are computed at once: a round, one pack of rows for each rank.

    {"world": W, "rounds": [[{"lengths": [5, 3, 9], "rows": [[1, 0]]}, ...], ...]}

is the layout of a pass, as its result holds it: for each of its rounds and each rank the tokens of
every row in the pack, and [place in the pack, number of the row] of its own rows. The bits of a row
and of its gradient depend on its pack by these lengths alone, so that the pass can be run again
without the other runs: with rows of any content in their places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.driven.packs import TARGETS
from trainer.errors import ReplayDiffers
from trainer.operations.rows import DrivenRow


@dataclass(frozen=True)
class Slot:
    """A place in a pack. run: whose row it is; None: nobody's, it is only as long. row: its number
    in its operation.
    """

    run: str | None
    row: int
    tokens: int


Pack = list[Slot]  # the slots of a run stand side by side


def compose(
    queues: Mapping[str, Sequence[tuple[int, int]]],
    served: Mapping[str, int],
    *,
    world: int,
    most_tokens: int,
) -> list[Pack]:
    """The next round: a pack for each rank. The next row is always one of the run that was served
    the fewest tokens, so that a run with many rows keeps no other one waiting.

    queues: by run, (number, tokens) of the rows that are left, in their order; served: tokens, of
    each run. most_tokens: of a pack; a longer row goes alone.
    """
    packs: list[Pack] = [[] for _ in range(world)]
    sums, tokens_of = [0] * world, dict(served)
    left = {run: deque(rows) for run, rows in queues.items() if rows}
    while left:
        run = min(left, key=lambda one: (tokens_of[one], one))
        row, tokens = left[run][0]
        rank = sums.index(min(sums))
        if sums[rank] and sums[rank] + tokens > most_tokens:
            del left[run]  # it fits nowhere, and is among the first of the next round
            continue
        packs[rank].append(Slot(run, row, tokens))
        sums[rank] += tokens
        tokens_of[run] += tokens
        left[run].popleft()
        if not left[run]:
            del left[run]
    order = {run: number for number, run in enumerate(queues)}
    return [sorted(pack, key=lambda slot: (order[str(slot.run)], slot.row)) for pack in packs]


def layout_of_round(packs: Sequence[Pack], run: str) -> list[dict[str, Any]]:
    """What a run has to write down of a round, for each rank."""
    return [
        {
            "lengths": [slot.tokens for slot in pack],
            "rows": [[place, slot.row] for place, slot in enumerate(pack) if slot.run == run],
        }
        for pack in packs
    ]


def packs_of_layout(layout: Sequence[Mapping[str, Any]], run: str) -> list[Pack]:
    """The packs of a round that was written down, with nobody's rows in the places of others."""
    packs: list[Pack] = []
    for of_rank in layout:
        own = dict(of_rank["rows"])
        packs.append(
            [
                Slot(run if place in own else None, own.get(place, -1), tokens)
                for place, tokens in enumerate(of_rank["lengths"])
            ]
        )
    return packs


def refuse_other_world(layout: Mapping[str, Any], *, world: int, seq: int) -> None:
    """ReplayDiffers when a pass was packed for another number of ranks."""
    if layout["world"] != world:
        raise ReplayDiffers(
            f"operation {seq} was computed on {layout['world']} rank(s), and now there are "
            f"{world}: its bits would be others. Start the run on {layout['world']} rank(s)."
        )


def filler(tokens: int) -> DrivenRow:
    """A row that is only as long as another one: no target of it is scored."""
    nothing = np.zeros((tokens, 0), np.int64)
    return DrivenRow(np.zeros(tokens, np.int32), {TARGETS: nothing})


def runs_of(packs: Sequence[Pack]) -> list[str]:
    """The runs of a round, in the order of their first slots over the ranks."""
    names = [slot.run for pack in packs for slot in pack if slot.run is not None]
    return list(dict.fromkeys(names))
