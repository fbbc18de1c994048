"""The retriever's losses, as sums over queries: the contrast with other passages, and the
distillation of a teacher's scores.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

# Q queries of this rank, P passages of the pool (those of the Q queries first, in their order), D
# width


def in_batch(pool: Mapping[str, Tensor], *, temperature: float, mask_duplicates: bool) -> Tensor:
    """() the sum over queries of -log softmax of the first of their own passages, over all passages
    of the pool.

    pool: queries (Q, D), passages (P, D), counts (Q,): how many passages each query has.
    mask_duplicates: of the passages (identities (P,)) that are known positives of a query
    (positive_ids, positive_counts (Q,) of each query), only the one that it looks for stays.
    Source: Karpukhin et al. 2020 (DPR); texttron/tevatron.
    """
    scores_QP = pool["queries"] @ pool["passages"].T / temperature
    target_Q = pool["counts"].cumsum(0) - pool["counts"]
    if mask_duplicates:
        scores_QP = scores_QP.masked_fill(_other_positives(pool, target_Q), float("-inf"))
    return F.cross_entropy(scores_QP, target_Q, reduction="sum")


def _other_positives(pool: Mapping[str, Tensor], target_Q: Tensor) -> Tensor:
    """(Q, P) whether a passage is a known positive of a query, but not the one at its target."""
    owner = _owners(pool["positive_counts"])
    hits = (pool["positive_ids"][:, None] == pool["identities"]).long()
    found_QP = hits.new_zeros(len(target_Q), hits.shape[1]).index_add(0, owner, hits) > 0
    found_QP[torch.arange(len(target_Q), device=target_Q.device), target_Q] = False
    return found_QP


def _owners(counts_Q: Tensor) -> Tensor:
    """The query that each thing belongs to: 0 as often as the first count says, and so on."""
    return torch.repeat_interleave(torch.arange(len(counts_Q), device=counts_Q.device), counts_Q)


def distil(pool: Mapping[str, Tensor], *, temperature: float, teacher_temperature: float) -> Tensor:
    """() the sum over queries of KL(teacher || retriever) over each query's own passages.

    pool: as for in_batch, and teacher (own passages,), NaN where the teacher gave no score: such a
    passage is left out, and a query of fewer than two scored passages adds nothing. Source: Izacard
    & Grave 2021 (FiD-KD).
    """
    counts_Q, teacher = pool["counts"], pool["teacher"]
    query = _owners(counts_Q)
    place = torch.arange(len(query), device=query.device) - (counts_Q.cumsum(0) - counts_Q)[query]
    own = (pool["queries"][query] * pool["passages"][: len(query)]).sum(-1) / temperature
    is_scored = teacher.isfinite()
    scored_Q = torch.zeros_like(counts_Q).index_add(0, query, is_scored.long())
    is_scored = is_scored & (scored_Q > 1)[query]
    where = (query[is_scored], place[is_scored])
    empty_QN = own.new_full((len(counts_Q), int(counts_Q.max())), float("-inf"))
    student = empty_QN.index_put(where, own[is_scored]).log_softmax(-1)[where]
    target = teacher[is_scored].to(own.dtype) / teacher_temperature
    target = empty_QN.index_put(where, target).log_softmax(-1)[where]
    return (target.exp() * (target - student)).sum()
