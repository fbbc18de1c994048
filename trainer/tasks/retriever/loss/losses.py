"""The contrast of a query's positives with other passages, as sums over queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.tasks.retriever.loss.own_passages import own_passages, owners

if TYPE_CHECKING:
    from trainer.tasks.retriever.config import FalseNegatives, Loss

# Q queries of this rank, P passages of the pool (first those of the Q queries, in their order), R
# positives of the Q queries, A queries of the pool (first the Q), D width

Temperature = float | Tensor  # one for all, or (Q,)


def in_batch(pool: Mapping[str, Tensor], how: Loss, *, temperature: Temperature) -> Tensor:
    """() the sum over queries of -log softmax of their positives, over all passages of the pool.

    pool: queries (Q, D), passages (P, D), counts (Q,): how many passages each query has, positives
    first; in place of their dot products it may hold products (Q, P). Where a query may have
    several positives, targets (Q,) says how many. mask_duplicates
    leaves a query's known positives out of the softmax, except its own passages; the pool then also
    holds identities (P,), positive_ids and positive_counts (Q,). symmetric wants askers (A, D), the
    queries of the pool, or asker_products (A, P), and with mask_duplicates asker_ids and
    asker_counts (A,).

    Sources: Karpukhin et al. 2020 (DPR) and texttron/tevatron; symmetric: Radford et al. 2021
    (CLIP); margin: Yang et al. 2019 (additive margin softmax); positives: Khosla et al. 2020
    (SupCon, L_out), Miech et al. 2020 (MIL-NCE) for "marginal".
    """
    products_QP = _products(pool)
    is_target_QP = _targets(pool, products_QP.shape[1])
    hidden = []
    if how.mask_duplicates:
        hidden.append(_among(pool["identities"], pool["positive_ids"], pool["positive_counts"]))
    if how.false_negatives is not None:
        judged_QP = _judged(pool, products_QP, how.false_negatives)
        hidden.append(_false_negatives(judged_QP, is_target_QP, how.false_negatives))
    scores_QP = _scores(products_QP, is_target_QP, how.margin, hidden, _column(temperature))
    if "targets" in pool:
        total = _surprise(scores_QP, is_target_QP, how.positives).sum()
    else:
        target_Q = pool["counts"].cumsum(0) - pool["counts"]
        total = F.cross_entropy(scores_QP, target_Q, reduction="sum")
    if not how.symmetric:
        return total
    return (total + _backwards(pool, is_target_QP, how, temperature=temperature)) / 2


def triplet(pool: Mapping[str, Tensor], *, margin: float) -> Tensor:
    """() the sum over queries of the mean, over pairs of an own positive and an own negative, of
    what the positive's dot product lacks to exceed the negative's by `margin`.

    A query without negatives adds nothing. Source: Schroff et al. 2015 (FaceNet).
    """
    own = own_passages(pool)
    differences_QNN = own.products_QN[:, :, None] - own.products_QN[:, None]
    is_pair_QNN = own.is_positive_QN[:, :, None] & own.is_negative_QN[:, None]
    lacks_QNN = (margin - differences_QNN).clamp(min=0).masked_fill(~is_pair_QNN, 0)
    pairs_Q = is_pair_QNN.sum((1, 2)).clamp(min=1)
    return (lacks_QNN.sum((1, 2)) / pairs_Q).sum()


def _backwards(
    pool: Mapping[str, Tensor], is_target_QP: Tensor, how: Loss, *, temperature: Temperature
) -> Tensor:
    """() the sum over queries of the mean, over their positives, of -log softmax of the query over
    all queries of the pool.
    """
    owner_R, place_R = is_target_QP.nonzero().T
    if "asker_products" in pool:
        products_RA = pool["asker_products"].T[place_R]
    else:
        products_RA = pool["passages"][place_R] @ pool["askers"].T
    is_own_RA = torch.zeros_like(products_RA, dtype=torch.bool)
    is_own_RA[torch.arange(len(owner_R), device=owner_R.device), owner_R] = True
    hidden = []
    if how.mask_duplicates:
        identities_R = pool["identities"][place_R]
        hidden.append(_among(identities_R, pool["asker_ids"], pool["asker_counts"]).T)
    if how.false_negatives is not None and how.false_negatives.by == "retriever":
        hidden.append(_false_negatives(products_RA.detach(), is_own_RA, how.false_negatives))
    scale = temperature[owner_R] if isinstance(temperature, Tensor) else temperature
    scores_RA = _scores(products_RA, is_own_RA, how.margin, hidden, _column(scale))
    surprise_R = F.cross_entropy(scores_RA, owner_R, reduction="none")
    return (surprise_R / is_target_QP.sum(1)[owner_R]).sum()


def _products(pool: Mapping[str, Tensor]) -> Tensor:
    return pool["products"] if "products" in pool else pool["queries"] @ pool["passages"].T


def _scores(
    products: Tensor,
    is_target: Tensor,
    margin: float,
    hidden: list[Tensor],
    temperature: Temperature,
) -> Tensor:
    """The products as the softmax takes them: the targets' less a margin, and none where one of
    `hidden` is True, but for the targets.
    """
    if margin:
        products = products - margin * is_target.to(products.dtype)
    scores = products / temperature
    for is_hidden in hidden:
        scores = scores.masked_fill(is_hidden & ~is_target, float("-inf"))
    return scores


def _surprise(scores_QP: Tensor, is_target_QP: Tensor, positives: str) -> Tensor:
    """(Q,) -log softmax of the several positives of each query, as Loss.positives says."""
    if positives == "marginal":
        of_targets_Q = scores_QP.masked_fill(~is_target_QP, float("-inf")).logsumexp(1)
        return scores_QP.logsumexp(1) - of_targets_Q
    if positives == "supcon":
        surprise_QP = scores_QP.logsumexp(1, keepdim=True) - scores_QP
    else:
        others_Q1 = scores_QP.masked_fill(is_target_QP, float("-inf")).logsumexp(1, keepdim=True)
        surprise_QP = F.softplus(others_Q1 - scores_QP)
    return surprise_QP.masked_fill(~is_target_QP, 0.0).sum(1) / is_target_QP.sum(1)


def _targets(pool: Mapping[str, Tensor], num_passages: int) -> Tensor:
    """(Q, P) whether a passage is one of the positives that a query brought."""
    counts_Q = pool["counts"]
    targets_Q = pool["targets"] if "targets" in pool else torch.ones_like(counts_Q)
    first_Q1 = (counts_Q.cumsum(0) - counts_Q)[:, None]
    place_P = torch.arange(num_passages, device=counts_Q.device)
    return (place_P >= first_Q1) & (place_P < first_Q1 + targets_Q[:, None])


def _among(identities_P: Tensor, known: Tensor, counts_Q: Tensor) -> Tensor:
    """(Q, P) whether a passage is one of the known positives of a query, of which the first has the
    first counts_Q[0] of `known`, and so on.
    """
    hits = (known[:, None] == identities_P).long()
    found_QP = hits.new_zeros(len(counts_Q), hits.shape[1]).index_add(0, owners(counts_Q), hits)
    return found_QP > 0


def _judged(pool: Mapping[str, Tensor], products_QP: Tensor, how: FalseNegatives) -> Tensor:
    """(Q, P) the scores that tell false negatives; NaN where a teacher gave none."""
    if how.by == "retriever":
        return products_QP.detach()
    owner = owners(pool["counts"])
    place = torch.arange(len(owner), device=owner.device)
    empty_QP = torch.full_like(products_QP.detach(), float("nan"))
    return empty_QP.index_put((owner, place), pool["teacher"].to(empty_QP.dtype))


def _false_negatives(judged_QP: Tensor, is_target_QP: Tensor, how: FalseNegatives) -> Tensor:
    """(Q, P) whether a passage scores too much to be a negative, against a limit or the best of the
    query's positives; False without a score.

    Sources: Solatorio 2024 (GISTEmbed) and Zhang et al. 2025 (Qwen3-Embedding) for margin; Moreira
    et al. 2024 (NV-Retriever) for share; a limit is Ren et al. 2021's (RocketQA).
    """
    is_out_QP = torch.zeros_like(is_target_QP)
    is_judged_QP = is_target_QP & judged_QP.isfinite()
    best_Q1 = judged_QP.masked_fill(~is_judged_QP, float("-inf")).amax(1, keepdim=True)
    best_Q1 = best_Q1.masked_fill(~best_Q1.isfinite(), float("inf"))  # nothing is above it
    if how.above is not None:
        is_out_QP |= judged_QP > how.above
    if how.margin is not None:
        is_out_QP |= judged_QP > best_Q1 - how.margin
    if how.share is not None:
        less_Q1 = best_Q1.abs() * (1 - how.share)
        limit_Q1 = torch.where(best_Q1.isfinite(), best_Q1 - less_Q1, best_Q1)
        is_out_QP |= judged_QP > limit_Q1
    return is_out_QP


def _column(temperature: Temperature) -> Temperature:
    return temperature[:, None] if isinstance(temperature, Tensor) else temperature
