"""Losses over a pool of representations that no device could hold the graph of: GradCache, under
any ZeRO stage.

A contrastive loss needs the representations of all micro-batches and ranks at once. Each
micro-batch is encoded twice: first without a graph, to fill the pool; then, once the loss has given
the gradient of every representation, with one, to carry that gradient into the weights. Source: Gao
et al. 2021 (arXiv 2101.06983).

The last one is encoded once: its graph waits for the loss, and its backward pass comes first.
Micro-batches come the longest first, so that the graph which waits is the smallest, and the memory
that is needed stays that of the largest. Of K like micro-batches a step costs 4 - 1/K forwards
against 3 without GradCache: 1.25 times at K = 4, 1.29 at 8.

Tried and dropped: one pass whose activations torch's checkpoint recomputes, for all micro-batches
at once. On ZeRO-3 (deepspeed 0.19.8, two ranks) the losses of six recorded steps were then off by
up to 0.09, without an error: several forwards waited for their backwards. So no more than one graph
is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from trainer.runtime import distributed, rng

# By name, (N, ...). Floating-point ones carry gradients; integers are passed along.
Representations = dict[str, Tensor]
PooledLoss = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class PoolScope:
    """What a loss over a pool sees, and where it is computed."""

    # Names that are not exchanged. With any, `loss` is this rank's part of the sum: it sees its own
    # rows of these, and all ranks' rows of the others, its own first; their gradients are summed
    # over ranks. With none, every rank computes the whole loss.
    own: tuple[str, ...] = ()
    # False: each rank has a pool of its own, and the loss is this rank's part of the sum.
    across_ranks: bool = True
    on_host: bool = False  # representations, scores and their gradients stay in the CPU's memory


EVERYTHING = PoolScope()


def pooled_losses(
    encode: Callable[[Any], Representations],
    batches: Sequence[Any],
    loss: PooledLoss,
    how: PoolScope = EVERYTHING,
) -> Iterator[Tensor]:
    """len(batches) scalars for Task.losses whose gradients, over all ranks, are those of `loss`
    over the whole pool.

    encode: a micro-batch -> its representations; run once under no_grad and once again with the
    same random numbers, but the last micro-batch only once; its loss is yielded first. loss: the
    representations of all ranks and micro-batches, in their order, in fp32 (fp64 stays fp64) -> (),
    the SUM that the loop divides. A collective: all ranks must have equally many micro-batches.
    """
    *others, last = range(len(batches))
    states: list[dict[str, Tensor]] = []
    parts: list[Representations] = []
    with torch.no_grad():
        for index in others:
            states.append(rng.capture())
            parts.append(encode(batches[index]))
    parts.append(encode(batches[last]))
    gradients, share = _gradients(parts, loss, how)
    yield _carrier(parts.pop(), gradients[last], share)
    for index in others:
        with rng.replay(states[index]):
            again = encode(batches[index])
        yield _carrier(again, gradients[index], share)


def _carrier(part: Representations, gradients: Mapping[str, Tensor], share: Tensor) -> Tensor:
    """() a scalar with the value of `share`, whose backward pass gives each representation of a
    micro-batch its gradient.
    """
    products = [(_wide(part[name]) * gradient).sum() for name, gradient in gradients.items()]
    scalar = torch.stack(products).sum()
    return scalar + (share - scalar).detach()


def _gradients(
    parts: Sequence[Representations], loss: PooledLoss, how: PoolScope
) -> tuple[list[dict[str, Tensor]], Tensor]:
    """The gradient of the loss of all ranks with respect to each micro-batch's representations on
    this rank, and the value that each micro-batch yields: over all ranks and micro-batches they sum
    up to the loss.
    """
    names = [name for name, values in parts[0].items() if values.is_floating_point()]
    device = parts[0][names[0]].device
    place = torch.device("cpu") if how.on_host else device
    leaves = [
        {name: _wide(part[name].detach()).to(place).requires_grad_() for name in names}
        for part in parts
    ]
    own = {
        name: torch.cat(
            [leaf.get(name, part[name].to(place)) for part, leaf in zip(parts, leaves, strict=True)]
        )
        for name in parts[0]
    }
    with torch.enable_grad():
        total = loss(_pool(own, how))
        inputs = [leaf[name] for leaf in leaves for name in names]
        flat = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
    gradients: list[dict[str, Tensor]] = []
    for start in range(0, len(flat), len(names)):
        of_part = [gradient.to(device) for gradient in flat[start : start + len(names)]]
        gradients.append(dict(zip(names, of_part, strict=True)))
    is_whole = how.across_ranks and not how.own
    share = total.detach().to(device) / (len(parts) * (distributed.world() if is_whole else 1))
    return gradients, share


def _pool(own: Mapping[str, Tensor], how: PoolScope) -> dict[str, Tensor]:
    """The representations as `loss` sees them."""
    if not how.across_ranks or distributed.world() == 1:
        return dict(own)
    exchanged = [name for name in own if name not in how.own]
    everyone = gather_tensors({name: own[name].detach() for name in exchanged})
    pool = dict(own)
    for name in exchanged:
        rows = [part[name] for part in everyone]
        if how.own:
            pool[name] = _Shared.apply(own[name], rows)  # pyright: ignore[reportAssignmentType] (untyped in torch)
        else:
            rows[distributed.rank()] = own[name]
            pool[name] = torch.cat(rows)
    return pool


class _Shared(torch.autograd.Function):
    """A gather that gradients pass: this rank's rows, then those of the others; each rank gets the
    sum of the gradients that all ranks have for its rows. A collective, also backwards.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: list[Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        rank = distributed.rank()
        ctx.counts = [len(part) for part in rows]
        return torch.cat([own, *rows[:rank], *rows[rank + 1 :]])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rank, counts = distributed.rank(), ctx.counts
        own, before, after = gradient.split(
            [counts[rank], sum(counts[:rank]), sum(counts[rank + 1 :])]
        )
        summed = distributed.total(torch.cat([before, own, after])).to(gradient.dtype)
        return summed.split(counts)[rank], None


def gather_tensors(own: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors (N, ...) by name, of every rank, by rank, on all ranks; N may differ. No gradient
    passes.

    All names travel as one array of bytes: two collectives, however many there are.
    """
    if distributed.world() == 1:
        return [dict(own)]
    device = next(iter(own.values())).device
    lengths = torch.tensor([len(values) for values in own.values()], device=device)
    raw = [
        values.detach().contiguous().flatten().view(torch.uint8)
        for values in (lengths, *own.values())
    ]
    by_rank: list[dict[str, Tensor]] = []
    for part in distributed.gather_rows(torch.cat(raw)):
        start = 8 * len(own)
        lengths_there = part[:start].clone().view(torch.int64).tolist()
        tensors: dict[str, Tensor] = {}
        for (name, values), length in zip(own.items(), lengths_there, strict=True):
            stop = start + length * prod(values.shape[1:]) * values.element_size()
            # a clone is aligned, which a slice of bytes need not be
            flat = part[start:stop].clone().view(values.dtype)
            tensors[name] = flat.view(length, *values.shape[1:])
            start = stop
        by_rank.append(tensors)
    return by_rank


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
