"""The retriever's losses, as sums over queries: the contrast with other passages, and the
distillation of a teacher's scores.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

# Q queries of this rank, P passages of the pool (first those of the Q queries, in their order), D
# width


def in_batch(pool: Mapping[str, Tensor], *, temperature: float, mask_duplicates: bool) -> Tensor:
    """() the sum over queries of -log softmax of their target, which is the first of their own
    passages; the softmax is over all passages of the pool.

    pool: queries (Q, D), passages (P, D), counts (Q,): how many passages each query has.
    mask_duplicates: leave a query's known positives out of the softmax, except its target. The pool
    then also holds identities (P,), positive_ids and positive_counts (Q,). Source: Karpukhin et al.
    2020 (DPR); texttron/tevatron.
    """
    scores_QP = pool["queries"] @ pool["passages"].T / temperature
    target_Q = pool["counts"].cumsum(0) - pool["counts"]
    if mask_duplicates:
        owner = _owners(pool["positive_counts"])
        hits = (pool["positive_ids"][:, None] == pool["identities"]).long()
        found_QP = hits.new_zeros(len(target_Q), hits.shape[1]).index_add(0, owner, hits) > 0
        found_QP[torch.arange(len(target_Q), device=target_Q.device), target_Q] = False
        scores_QP = scores_QP.masked_fill(found_QP, float("-inf"))
    return F.cross_entropy(scores_QP, target_Q, reduction="sum")


def _owners(counts_Q: Tensor) -> Tensor:
    """The query of each item: 0 as often as the first count says, then 1, and so on."""
    return torch.repeat_interleave(torch.arange(len(counts_Q), device=counts_Q.device), counts_Q)


def distil(pool: Mapping[str, Tensor], *, temperature: float, teacher_temperature: float) -> Tensor:
    """() the sum over queries of KL(teacher || retriever) over each query's own passages.

    pool: as for in_batch, with teacher (own passages,), NaN where the teacher gave no score. A
    passage without a score is left out; a query with fewer than two scores adds nothing. Source:
    Izacard & Grave 2021 (FiD-KD).
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
