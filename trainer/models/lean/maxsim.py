"""Late interaction: the score of two lists of vectors.

For each vector of the first list, the query's, the largest dot product with a vector of the second
one counts. Their sum is the score. Source: Khattab & Zaharia 2020 (ColBERT), section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Q queries, T vectors of all of them, P passages, M vectors of all of them, E width of a vector

BUDGET = 2**24  # dot products that are there at the same time: 64 MiB of fp32


def maxsim(
    queries_TE: Tensor,
    query_lengths_Q: Tensor,
    passages_ME: Tensor,
    passage_lengths_P: Tensor,
    *,
    budget: int = BUDGET,
) -> Tensor:
    """(Q, P) scores of all queries and passages, in the dtype of the vectors.

    The vectors of the first query or passage stand first; lengths say how many each one has, at
    least one. Of the (M, T) dot products at most `budget` are there at the same time, or those of
    one vector of a query; the backward pass computes them again.
    """
    blocks = queries_TE.split(max(1, budget // max(1, len(passages_ME))))
    arguments = (passages_ME, passage_lengths_P)
    if len(blocks) == 1:
        best = [_best(*arguments, blocks[0])]
    else:
        best = [checkpoint(_best, *arguments, block, use_reentrant=False) for block in blocks]
    best_TP = torch.cat(best, dim=1).T.contiguous()
    return _reduced(best_TP, "sum", query_lengths_Q)


def _best(passages_ME: Tensor, lengths_P: Tensor, block_TE: Tensor) -> Tensor:
    """(P, T) the largest dot product of each vector of some queries with those of each passage.
    Autocast does not make them coarser: sums of bf16 numbers would often be equal.
    """
    with torch.autocast(passages_ME.device.type, enabled=False):
        return _reduced(passages_ME @ block_TE.T, "max", lengths_P)


def _reduced(values: Tensor, how: str, lengths: Tensor) -> Tensor:
    """The sum or the largest of each so many rows. unsafe: torch does not read the lengths to check
    them, for which a GPU would have to be waited for.
    """
    return torch.segment_reduce(values, how, lengths=lengths, axis=0, unsafe=True)
