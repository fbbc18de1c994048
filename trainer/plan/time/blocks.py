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
# where blocks are recomputed: in backward the last but one frees what the others keep
SHOWN_RECOMPUTED = 5
_NUMBERS = ("layer_idx", "layer_id", "index")  # attributes in which equal blocks may differ


@dataclass(frozen=True)
class Entered:
    """An event: the model starts to read the weights of another block."""

    stack: str  # the name of the block's ModuleList; "": the weights belong to no such block
    index: int = 0


@dataclass(frozen=True)
class Part:
    """A sequence of events, and how often it repeats in a row."""

    events: Sequence[Any]
    times: int = 1


class UnequalBlocksError(Exception):
    """Blocks that look alike did different work."""


@dataclass
class Stacks:
    """The lists of equal blocks in a model that were shortened."""

    num_left: int  # how many blocks of each stack are left
    missing: dict[str, int]  # blocks that were taken away, by the name of their stack
    place_of: dict[int, Entered]  # the block of each weight, by storage_of(weight)
    removed: list[nn.Module]  # the blocks that were taken away: their weights are still the model's


def whole() -> Stacks:
    """The Stacks of a model that was not shortened."""
    return Stacks(0, {}, {}, [])


def shorten(model: nn.Module, num_left: int) -> Stacks:
    """Remove all but `num_left` blocks from every stack of equal blocks in `model`, in place. A
    model that has the attribute `knows_blocks_by_number` stays whole.
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
    """A number that names the storage of a tensor."""
    return tensor.untyped_storage()._cdata


def _look(block: nn.Module) -> list[Any]:
    """What decides the work of a block: the plain attributes and weights of its modules."""
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
    """The events of the whole model: those of the short model, with one middle block repeated for
    every block that was removed.

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
    """Split the events at every Entered: (the block, its events), in order."""
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
    """Group the visits: a group is one pass through a stack, up or down, or one visit outside."""
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
