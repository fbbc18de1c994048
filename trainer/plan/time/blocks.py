"""A deep model counted by a few of its blocks, because equal blocks do equal work.

`shorten` leaves a few blocks of every stack whose blocks are alike (the first may differ). A step
of the short model is recorded as events. `parts_of_whole` compares two blocks in the middle, event
by event, and counts one of them as often as the whole model has such blocks. Where the two differ
it raises UnequalBlocksError, and the step is run with all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

SHOWN = 4  # blocks: the first and the last, and two between them, which must be equal
# of recomputed ones: backward, the last but one frees what the others leave
SHOWN_RECOMPUTED = 5
_NUMBERS = ("layer_idx", "layer_id", "index")  # what equal blocks differ in


@dataclass(frozen=True)
class Entered:
    """The event of an operation that reads weights of a block after those of another."""

    stack: str  # "": no block of a stack
    index: int = 0


@dataclass(frozen=True)
class Part:
    """Events that follow each other, and how often in a row."""

    events: Sequence[Any]
    times: int = 1


class UnequalBlocksError(Exception):
    """Blocks that look alike did different work."""


@dataclass
class Stacks:
    """The stacks of a model that were shortened."""

    num_left: int  # blocks that are left of each
    missing: dict[str, int]  # blocks that were taken away, by the name of their stack
    place_of: dict[int, Entered]  # by storage of a weight (Tensor.untyped_storage()._cdata)
    removed: list[nn.Module]  # the blocks that were taken away: their weights are still the model's


def whole() -> Stacks:
    """No stack is shortened."""
    return Stacks(0, {}, {}, [])


def shorten(model: nn.Module, num_left: int) -> Stacks:
    """The stacks of `model`, cut down in place to `num_left` blocks each; none of a model that says
    `knows_blocks_by_number`.
    """
    if getattr(model, "knows_blocks_by_number", False):
        return whole()
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    missing: dict[str, int] = {}
    removed: list[nn.Module] = []
    place_of: dict[int, Entered] = {}
    for name, blocks in lists:
        is_inside = any(name.startswith(f"{stack}.") for stack in missing)
        if is_inside or len(blocks) <= num_left:
            continue
        looks = [_look(block) for block in list(blocks)[1:]]  # the first may differ
        if any(look != looks[0] for look in looks):
            continue
        missing[name] = len(blocks) - num_left
        removed += list(blocks)[num_left:]
        del blocks[num_left:]
        for index, block in enumerate(blocks):
            for weight in block.parameters():
                place_of[storage_of(weight)] = Entered(name, index)
    for weight in model.parameters() if missing else ():
        place_of.setdefault(storage_of(weight), Entered(""))
    return Stacks(num_left, missing, place_of, removed)


def storage_of(tensor: Tensor) -> int:
    """Which storage a tensor lies in."""
    return tensor.untyped_storage()._cdata


def _look(block: nn.Module) -> list[Any]:
    """Everything by which a block may choose what it does."""
    facts: list[Any] = []
    for name, module in block.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, int | float | str | tuple) and key not in _NUMBERS
        }
        weights = [
            (key, tuple(weight.shape), weight.dtype, weight.requires_grad)
            for key, weight in module.named_parameters(recurse=False)
        ]
        facts.append((name, type(module), plain, weights))
    return facts


def parts_of_whole(events: Sequence[Any], stacks: Stacks) -> list[Part]:
    """The events of the whole model: those recorded, a middle block's as often as it has blocks.

    UnequalBlocksError when the two blocks in the middle did different things.
    """
    if not stacks.missing:
        return [Part(events)]
    parts: list[Part] = []
    upward = list(range(stacks.num_left))
    for visits in _passes(list(_visits(events)), stacks.num_left):
        stack = visits[0][0].stack
        if not stack:
            parts += [Part(work) for _, work in visits]
            continue
        order = [place.index for place, _ in visits]
        if order not in (upward, upward[::-1]):
            raise UnequalBlocksError(f"{stack}: its blocks were entered in the order {order}")
        works = [work for _, work in visits]
        if works[1] != works[2]:
            raise UnequalBlocksError(f"{stack}: two blocks in its middle did different things")
        parts += [Part(works[0]), Part(works[1], 1 + stacks.missing[stack])]
        parts += [Part(work) for work in works[2:]]
    return parts


def _visits(events: Sequence[Any]) -> Iterator[tuple[Entered, list[Any]]]:
    """(where, what was done there), one after the other."""
    place, work = Entered(""), []
    for event in events:
        if isinstance(event, Entered):
            yield place, work
            place, work = event, []
        else:
            work.append(event)
    yield place, work


def _passes(
    visits: Sequence[tuple[Entered, list[Any]]], num_left: int
) -> Iterator[list[tuple[Entered, list[Any]]]]:
    """Visits of one stack that go through it once, up or down; else of no stack."""
    current = [visits[0]]
    for (before, _), visit in pairwise(visits):
        place = visit[0]
        is_next = place.stack and place.stack == before.stack and len(current) < num_left
        if is_next:
            current.append(visit)
        else:
            yield current
            current = [visit]
    yield current
