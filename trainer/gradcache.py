"""Losses over a pool of representations that no device could hold the graph of: GradCache, under any ZeRO stage.

A contrastive loss needs the representations of all micro-batches and ranks at once. Each micro-batch is encoded twice:
first without a graph, to fill the pool; then, once the loss has given the gradient of every representation, with one,
to carry that gradient into the weights. Source: Gao et al. 2021 (arXiv 2101.06983).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer import distributed, rng

Representations = dict[str, Tensor]  # by name, (N, ...): floating-point ones carry gradients, others are passed along


def pooled_losses(
    encode: Callable[[Any], Representations],
    batches: Sequence[Any],
    loss: Callable[[Mapping[str, Tensor]], Tensor],
) -> Iterator[Tensor]:
    """len(batches) scalars for Task.losses whose gradients, over all ranks, are those of `loss` over the whole pool.

    encode: a micro-batch -> its representations; run once under no_grad and once again with the same random numbers,
    or only once when there is a single micro-batch. loss: the representations of all ranks and micro-batches, in their
    order, in fp32 -> (), the SUM that the loop divides; every rank computes all of it, which is cheap beside encoding.
    A collective: all ranks must have equally many micro-batches.
    """
    if len(batches) == 1:
        (own,) = [encode(batches[0])]
        total = loss(_pool(own))
        yield total + (total / distributed.world() - total).detach()
        return
    states, parts = [], []
    for batch in batches:
        states.append(rng.capture())
        with torch.no_grad():
            parts.append(encode(batch))
    gradients, total = _gradients(parts, loss)
    share = total / (distributed.world() * len(batches))
    for batch, state, wanted in zip(batches, states, gradients, strict=True):
        with rng.replay(state):
            again = encode(batch)
        carried = torch.stack([(again[name].float() * gradient).sum() for name, gradient in wanted.items()]).sum()
        yield carried + (share - carried).detach()


def _gradients(
    parts: Sequence[Representations], loss: Callable[[Mapping[str, Tensor]], Tensor]
) -> tuple[list[dict[str, Tensor]], Tensor]:
    """The gradient of `loss` with respect to each micro-batch's representations on this rank, and its value."""
    names = [name for name, values in parts[0].items() if values.is_floating_point()]
    leaves = [{name: part[name].float().requires_grad_() for name in names} for part in parts]
    own = {
        name: torch.cat([leaf.get(name, part[name]) for part, leaf in zip(parts, leaves, strict=True)])
        for name in parts[0]
    }
    with torch.enable_grad():
        total = loss(_pool(own))
        flat = [leaf[name] for leaf in leaves for name in names]
        found = iter(torch.autograd.grad(total, flat, allow_unused=True, materialize_grads=True))
    return [{name: next(found) for name in names} for _ in leaves], total.detach()


def _pool(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The representations of all ranks in their order; only this rank's own carry a gradient."""
    pool: dict[str, Tensor] = {}
    for name, values in own.items():
        values = values.float() if values.is_floating_point() else values
        everyone = distributed.gather_rows(values.detach())
        everyone[distributed.rank()] = values
        pool[name] = torch.cat(everyone)
    return pool
