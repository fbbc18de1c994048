"""The scores of each query's own passages, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Q queries of this rank, N the most passages of a query


@dataclass(frozen=True)
class OwnPassages:
    """Tables of a row for each query; rows end with places that no passage has."""

    products_QN: Tensor  # dot products; 0 where there is no passage
    is_positive_QN: Tensor
    is_negative_QN: Tensor
    where: tuple[Tensor, Tensor]  # (query, place) of each passage, in their order


def own_passages(pool: Mapping[str, Tensor]) -> OwnPassages:
    """The tables of a pool (losses.in_batch)."""
    counts_Q = pool["counts"]
    query = owners(counts_Q)
    place = torch.arange(len(query), device=query.device) - (counts_Q.cumsum(0) - counts_Q)[query]
    if "products" in pool:
        products = pool["products"][query, torch.arange(len(query), device=query.device)]
    else:
        products = (pool["queries"][query] * pool["passages"][: len(query)]).sum(-1)
    empty_QN = products.new_zeros(len(counts_Q), int(counts_Q.max()))
    column_N = torch.arange(empty_QN.shape[1], device=query.device)
    targets_Q = pool["targets"] if "targets" in pool else torch.ones_like(counts_Q)
    is_positive_QN = column_N < targets_Q[:, None]
    return OwnPassages(
        products_QN=empty_QN.index_put((query, place), products),
        is_positive_QN=is_positive_QN,
        is_negative_QN=(column_N < counts_Q[:, None]) & ~is_positive_QN,
        where=(query, place),
    )


def owners(counts_Q: Tensor) -> Tensor:
    """The query of each item: 0 as often as the first count says, then 1, and so on."""
    return torch.repeat_interleave(torch.arange(len(counts_Q), device=counts_Q.device), counts_Q)
