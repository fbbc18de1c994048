"""How a retriever learns a teacher's scores of each query's own passages, as sums over queries."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.tasks.retriever.loss.losses import Temperature
from trainer.tasks.retriever.loss.own_passages import own_passages

# Q queries of this rank, N the most passages of a query


def distil(
    pool: Mapping[str, Tensor], *, temperature: Temperature, teacher_temperature: float
) -> Tensor:
    """() the sum over queries of KL(teacher || retriever) over each query's own passages.

    pool: as for losses.in_batch, with teacher (own passages,), NaN where the teacher gave no score.
    A passage without a score is left out; a query with fewer than two scores adds nothing. Source:
    Izacard & Grave 2021 (FiD-KD).
    """
    every = own_passages(pool)
    query, place = every.where
    scale = temperature[query] if isinstance(temperature, Tensor) else temperature
    own = every.products_QN[query, place] / scale
    counts_Q, teacher = pool["counts"], pool["teacher"]
    is_scored = teacher.isfinite()
    scored_Q = torch.zeros_like(counts_Q).index_add(0, query, is_scored.long())
    is_scored = is_scored & (scored_Q > 1)[query]
    where = (query[is_scored], place[is_scored])
    empty_QN = own.new_full((len(counts_Q), int(counts_Q.max())), float("-inf"))
    student = empty_QN.index_put(where, own[is_scored]).log_softmax(-1)[where]
    target = teacher[is_scored].to(own.dtype) / teacher_temperature
    target = empty_QN.index_put(where, target).log_softmax(-1)[where]
    return (target.exp() * (target - student)).sum()


def margin_mse(
    pool: Mapping[str, Tensor], *, temperature: Temperature, teacher_temperature: float
) -> Tensor:
    """() the sum over queries of the mean, over their scored negatives, of the squared difference
    between the retriever's margin and the teacher's: the first positive's score minus the
    negative's.

    pool: as for distil. A query whose first positive or whose negatives have no score adds nothing.
    Source: Hofstaetter et al. 2020 (arXiv 2010.02666).
    """
    own = own_passages(pool)
    scale = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    scores_QN = own.products_QN / scale
    empty_QN = torch.full_like(scores_QN.detach(), float("nan"))
    teacher = pool["teacher"].to(empty_QN.dtype) / teacher_temperature
    teacher_QN = empty_QN.index_put(own.where, teacher)
    margins_QN = teacher_QN[:, :1] - teacher_QN
    is_scored_QN = own.is_negative_QN & margins_QN.isfinite()
    wrong_QN = (scores_QN[:, :1] - scores_QN) - margins_QN.masked_fill(~is_scored_QN, 0.0)
    squares_Q = wrong_QN.square().masked_fill(~is_scored_QN, 0.0).sum(1)
    return (squares_Q / is_scored_QN.sum(1).clamp(min=1)).sum()


def divergence(
    vectors: Mapping[str, Tensor], whole: Mapping[str, Tensor], *, temperature: float
) -> Tensor:
    """() as many times as there are own queries, the mean over own texts of KL(whole || vectors),
    times the temperature, where a vector stands for the softmax of its numbers divided by the
    temperature. The whole vectors get no gradient.

    vectors, whole: queries (Q, D) and passages (P, D), of which the first are those of the queries,
    and in `whole` counts (Q,). Every query has equally many passages in training, so that the sum
    over ranks is that of one rank. Source: AdaptiveLayerLoss of sentence-transformers.
    """
    own = int(whole["counts"].sum())
    total = whole["queries"].new_zeros(())
    for name, count in (("queries", len(whole["queries"])), ("passages", own)):
        target = (whole[name][:count].detach() / temperature).softmax(-1)
        logs = (vectors[name][:count] / temperature).log_softmax(-1)
        total = total + torch.nn.functional.kl_div(logs, target, reduction="sum")
    queries = len(whole["queries"])
    return total * temperature * queries / (queries + own)
