"""What a step consists of: its matrix products, and the positions that it embeds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_"}


class Products(TorchDispatchMode):
    """Counts the matrix products of what runs inside, by their shapes and layouts. Those inside a
    fused attention are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _PRODUCTS:
            left, right = args[-2:]
            self.counts[tuple((tuple(x.shape), x.stride()) for x in (left, right))] += 1
        return func(*args, **(kwargs or {}))

    def seconds(self) -> float:
        """That the products take alone: of each shape the best of three."""
        return sum(count * _seconds_of(shapes) for shapes, count in self.counts.items())


def _seconds_of(shapes: Sequence[tuple[Any, Any]]) -> float:
    left, right = (torch.empty_strided(size, stride).normal_() for size, stride in shapes)
    found = []
    for _ in range(3):
        start = time.process_time()
        torch.matmul(left, right)
        found.append(time.process_time() - start)
    return min(found)


def share_of_products(step: Callable[[int], Any], number: int) -> float:
    """The share of a step's CPU seconds that its matrix products take by themselves."""
    with Products() as products:
        step(number)
    took = []
    for _ in range(2):
        start = time.process_time()
        step(number)
        took.append(time.process_time() - start)
    return products.seconds() / min(took)


@contextmanager
def embedded(model: nn.Module) -> Iterator[list[int]]:
    """Collects how many ids each call of a table of words was given."""
    counts: list[int] = []
    tables = [x for x in model.modules() if isinstance(x, nn.Embedding)]
    words = max(table.num_embeddings for table in tables)

    def count(table: Any, given: Any) -> None:
        counts.append(given[0].numel())

    hooks = [t.register_forward_pre_hook(count) for t in tables if t.num_embeddings == words]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def positions(model: nn.Module, step: Callable[[int], Any], number: int) -> int:
    """How many positions a step embeds."""
    with embedded(model) as counts:
        step(number)
    return sum(counts)
